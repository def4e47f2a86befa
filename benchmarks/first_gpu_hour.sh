#!/usr/bin/env bash
# Measures a machine with NVIDIA GPUs in about an hour: benchmarks/first_gpu_hour.sh [--pretend] [DIR [DATA]]
# Each command has a time limit, and writes DIR/NAME.json or DIR/NAME.txt, and its messages to DIR/NAME.log. If one
# fails, the others still run, and the exit code is 1. --pretend runs one tiny command of each kind on CPUs. SIZES and
# PRECISIONS in the environment choose what is measured. All other measurements use the last size and first precision.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/../launch/common.sh"
. "$root/launch/env.sh"
pretend=''
case "${1-}" in
    --pretend) pretend=yes && shift ;;
    -*) fail 2 "use: benchmarks/first_gpu_hour.sh [--pretend] [DIR [DATA]]" ;;
esac
out=${1:-runs/first_gpu_hour} data=${2:-digits} failed=''
trap 'kill "$(jobs -p)" 2>/dev/null || true; wait; exit 130' INT TERM

run() { # FILE SECONDS COMMAND...: runs a command with a time limit
    local file=$1 log=$out/${1%.*}.log limit=$2 code=0 begun=$SECONDS
    shift 2 && mkdir -p "$out" && echo "\$ ${*@Q}" >"$log"
    timeout --kill-after=30 "$limit" "$@" >"$out/$file" 2>>"$log" & # a signal interrupts `wait` only
    wait $! || code=$? failed+=" ${file%.*}"
    echo "$file: exit code $code after $((SECONDS - begun)) s" >&2
}
steps() { # NAME WORKERS SIZE PRECISION FLAG...: measures training steps on data that stays on the device
    run "$1.json" 240 mpirun --bind-to none -np "$2" "$python" -m launch.binding "$python" -m experiments.benchmark \
        "${common[@]}" "--data_dir=synthetic:$((8 * $2 * $3))" "--global_batch_size=$(($2 * $3))" \
        "--micro_batch_size=$3" "--precision=$4" "${@:5}"
}

if [ -n "$pretend" ]; then
    export BIGBATCH_PRETEND_GPU=1 CUDA_VISIBLE_DEVICES=''
    gpus=2 model=convnet seconds=0.05 rounds=1 span=16 sizes=(32) precisions=(float32) xla=(false) decoders=(cpu)
    exchanges=("2 ring fp16") tests=("$root/tests/test_gpu.py" -k a_step_changes_every_weight)
else
    nvidia-smi -L >/dev/null 2>&1 || fail 1 "nvidia-smi lists no GPU here; --pretend tries the script on CPUs"
    gpus=$("$python" -m launch.binding --count) model=resnet50 seconds=5 rounds=15 span=32 tests=("$root/tests")
    read -ra sizes <<<"${SIZES:-64 128 256}"
    read -ra precisions <<<"${PRECISIONS:-mixed_float16 float32 mixed_bfloat16}"
    xla=(false true auto) decoders=(cpu "gpu 0" "gpu 0.65" "gpu 0.9") # of DALI, with the load of the hardware decoder
    exchanges=() && [ "$gpus" = 1 ] || exchanges=("1 ring none" "$gpus ring none" "$gpus torus none" "$gpus ring fp16")
    run gpus.txt 60 sh -c "nvidia-smi && nvidia-smi topo -m"
fi
size=${sizes[-1]} precision=${precisions[0]} common=("--model=$model" "--seconds=$seconds" --json)
run preflight.txt 300 mpirun --bind-to none -np "$gpus" "$python" -m launch.preflight "--data_dir=$data"
run tests.txt 600 "$python" -m pytest -m gpu -o addopts=--import-mode=importlib -rs "${tests[@]}"
for one in "${precisions[@]}"; do for number in "${sizes[@]}"; do for how in "${xla[@]}"; do
    steps "speed-$one-$number-xla-$how" 1 "$number" "$one" "--xla=$how"
done; done; done
steps transposing 1 "$size" "$precision" --nopersistent_batch_norm
for number in "$span" "$size"; do # of a span below the micro-batch, nothing is fused
    steps "span-$span-micro-$number" 1 "$size" "$precision" "--batch_norm_span=$span" "--micro_batch_size=$number"
done
run profiled.txt 240 "$python" "$root/train.py" "--model=$model" "--data_dir=synthetic:$((8 * size))" --epochs=1 \
    "--batch_size=$size" "--micro_batch_size=$size" "--precision=$precision" --profile=3:6 "--output_dir=$out/profiled"
run kernels.json 60 "$python" -m benchmarks.kernels "$out/profiled"
for decoder in "${decoders[@]}"; do
    read -r device load <<<"$decoder"
    run "decode-${decoder/ /-}.json" 240 "$python" -m experiments.benchmark "${common[@]}" "--data_dir=$data" \
        "--micro_batch_size=$size" "--precision=$precision" "--dali_device=$device" ${load:+"--hw_decoder_load=$load"}
done
run optimizer_step.txt 240 "$python" -m benchmarks.optimizer_step "--model=$model" "--rounds=$rounds"
for exchange in "${exchanges[@]}"; do
    read -r number how wire <<<"$exchange"
    steps "exchange-${exchange// /-}" "$number" "$size" "$precision" "--allreduce=$how" "--compression=$wire"
done
[ "$gpus" = 1 ] || HOROVOD_ENABLE_ASYNC_COMPLETION=0 steps waiting "$gpus" "$size" "$precision"
[ -z "$failed" ] || fail 1 "these failed:$failed; see NAME.log in $out"
