#!/bin/sh
# Entry point of the image. Flags go to train.py, no arguments train the digits, and anything else runs as a command.
case ${1--} in
    -*) exec python "$(dirname "$0")/../train.py" "$@" ;;
    *) exec "$@" ;;
esac
