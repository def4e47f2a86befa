#!/bin/sh
# The image's first program. Flags are train.py's, and nothing at all trains the digits; the rest is a command to run.
case ${1--} in
    -*) exec python "$(dirname "$0")/../train.py" "$@" ;;
    *) exec "$@" ;;
esac
