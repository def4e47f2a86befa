#!/usr/bin/env bash
# What a machine with new GPUs can do, in about an hour, as one page: launch/first_gpu_hour.sh [--output_dir=DIR]
# `launch/first_gpu_hour.sh --help` says more; --pretend goes through it all on CPUs.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/env.sh"
exec "$python" -m launch.first_hour "$@"
