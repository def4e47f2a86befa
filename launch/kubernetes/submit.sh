#!/usr/bin/env bash
# Prints an MPIJob that trains a recipe on Kubernetes, or submits it. See `launch/kubernetes/submit.sh --help`.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/../env.sh"
exec "$python" -m launch.mpijob "$@"
