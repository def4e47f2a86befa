#!/usr/bin/env bash
# Trains a recipe on one machine, a DGX-1 or another, with one worker per GPU, bound to its GPU's socket and memory.
set -euo pipefail
trap 'exit 75' TERM USR1
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"
. "$root/launch/env.sh"

usage="launch/dgx1.sh [options] RECIPE|-- [flags of train.py]

Trains RECIPE on this machine with one worker per GPU.

  --print-binding        print the GPU, NUMA nodes, cores and threads of each worker, and exit
  --workers-per-gpu=N    let N workers share each GPU, for small images (LARS paper, section 4.2). Run NVIDIA's MPS, or
                         they take turns. NCCL does not support it: it needs one worker per GPU
  -np N                  number of workers. Default: one per GPU, or one if there is no GPU
  --no-preflight         do not check the machine first
  --dry-run, --dry_run   print the plan, and the command on standard error, and exit

RECIPE is a file of flags, or its name in recipes/. With -- in its place, train.py chooses the recipe that fits
--data_dir. Flags of train.py override the recipe. Exit codes: 0 done, 2 wrong flag, 75 stopped on request (SIGTERM or
SIGUSR1 to this script; the same command continues), 1 anything else."

preflight=yes print='' workers=''
take_dry_run "$@"
set -- "${words[@]}"
number() { [[ "$2" =~ ^[1-9][0-9]*$ ]] || fail 2 "$1 takes a number, not '$2'"; }
while [ $# -gt 0 ]; do
    case "$1" in
        --print-binding) print=yes ;;
        --workers-per-gpu=*) export BIGBATCH_WORKERS_PER_GPU="${1#*=}" ;;
        --workers-per-gpu) export BIGBATCH_WORKERS_PER_GPU="${2-}" && shift ;;
        -np) workers=${2-} && shift && number -np "$workers" ;;
        --no-preflight) preflight='' ;;
        -h | --help) echo "$usage" && exit ;;
        --) break ;;
        -*) fail 2 "there is no option $1; see --help, and put the flags of train.py after the recipe" ;;
        *) break ;;
    esac
    shift || fail 2 "the last option needs a value; see --help"
done
number --workers-per-gpu "${BIGBATCH_WORKERS_PER_GPU:-1}"
given=(${workers:+"--workers=$workers"})
if [ -n "$print" ]; then
    exec "$python" -m launch.binding --print "${given[@]}"
fi
ask dgx1.sh "${given[@]}" "$@"
plan=("$python" "$root/train.py" "${training[@]}" --dry_run "--workers=$workers" "--workers_per_node=$workers")
if [ -n "$dry_run" ]; then
    echo "mpirun --bind-to none -np $workers ${python@Q} -m launch.binding ${python@Q} '$root/train.py' ${training[*]@Q}" >&2
    exec "${plan[@]}"
fi
"${plan[@]}" >/dev/null # reports wrong flags once, not once per worker
train dgx1.sh mpirun --bind-to none # NCCL finds NVLink between the GPUs by itself
exit "$code"
