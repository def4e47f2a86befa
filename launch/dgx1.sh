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
workers=${workers:-$("$python" -m launch.binding --count)}
if [ -n "$print" ]; then
    exec "$python" -m launch.binding --print "--workers=$workers"
fi
take_recipe "$@"
set -- "${words[@]}"

# NCCL finds NVLink between the GPUs by itself.
launcher=(mpirun --bind-to none -np "$workers")
mapfile -t flags < <(recipe_flags "$recipe")
training=("$root/train.py" "${flags[@]}")
micro_batch=$(micro_batch_flag "$workers" "${training[@]:1}" "$@")
training+=(${micro_batch:+"$micro_batch"} "$@") # given flags override it
plan=(--dry_run "--workers=$workers" "--workers_per_node=$workers")
if [ -n "$dry_run" ]; then
    echo "${launcher[*]@Q} ${python@Q} -m launch.binding ${python@Q} ${training[*]@Q}" >&2
    exec "$python" "${training[@]}" "${plan[@]}"
fi
"$python" "${training[@]}" "${plan[@]}" >/dev/null # reports wrong flags once, not once per worker
export BIGBATCH_WORLD_SIZE=$workers
if [ -n "$preflight" ]; then
    run_workers "${launcher[@]}" "$python" -m launch.preflight "${training[@]:1}" >&2
    [ -z "$stopped_by" ] || exit 75
fi
run_workers "${launcher[@]}" "$python" -m launch.binding "$python" "${training[@]}"
