#!/usr/bin/env bash
# Measures a machine with new GPUs in about an hour, and writes one page: launch/first_gpu_hour.sh [--output_dir=DIR]
# See `launch/first_gpu_hour.sh --help`. --pretend runs all steps on CPUs.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/env.sh"
exec "$python" -m launch.first_hour "$@"
