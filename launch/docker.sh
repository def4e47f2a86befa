#!/usr/bin/env bash
# Trains a recipe on this machine, in the image that the Dockerfile builds. See `launch/docker.sh --help`.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/common.sh" # not env.sh: the environment is the image's
engine=${BIGBATCH_ENGINE:-docker}
passed_on='(NCCL|HOROVOD|OMP|OMPI_MCA|UCX|CUDA|TF_CPP|TF_GPU|TF_USE|TF_XLA|XLA)_.*|NVIDIA_TF32_OVERRIDE'
passed_on+='|BIGBATCH_WORKERS_PER_GPU'
# These variables name folders of the host, which do not exist in the container.
of_the_host='CUDA_(ROOT|PATH|CACHE_PATH|TOOLKIT_.*|BIN_PATH)|.*_(LIB|INCLUDE|HOME)'

usage() {
    cat <<'TEXT'
launch/docker.sh [--image NAME] [--build] [--data DIR] [--output DIR] [--dry-run] RECIPE|-- [flags of train.py]

Trains RECIPE, a flag file or its name in recipes/, in a container on this machine, with one worker per GPU. With
-- in place of RECIPE, train.py chooses the recipe that fits the dataset.

  --image NAME   image to run (default: bigbatch)
  --build        build the image from this checkout first
  --data DIR     folder of the dataset. Inside the container it is /data and read-only
  --output DIR   folder for the runs (default: runs). Inside the container it is /output
  --security-opt OPTION
                 as for the engine. With SELinux: label=disable (docs/gpu.md). Can be repeated
  --dry-run      print the command and exit. --dry_run, also after RECIPE, does the same

A relative --output_dir is a folder in --output. Files that are written elsewhere vanish with the container.
$BIGBATCH_ENGINE names another engine than docker, such as podman. The container sees the variables NCCL_*, HOROVOD_*, OMP_*,
OMPI_MCA_*, UCX_*, CUDA_*, NVIDIA_TF32_OVERRIDE, TF_CPP_*, TF_GPU_*, TF_USE_*, TF_XLA_*, XLA_* and
BIGBATCH_WORKERS_PER_GPU of the host, except those that name folders, such as CUDA_HOME. GPU kernels that the driver
compiles at first use are kept in ${XDG_CACHE_HOME:-~/.cache}/bigbatch/cuda.

Exit codes: 0 done, 2 wrong flag, 75 stopped on request (SIGTERM, SIGUSR1; the same command continues), 1 anything else.
125 to 127 come from the engine.
TEXT
}

# not_address OPTION PATH: fails if a path that is written to is an address. The host may have no Python for launch.job.
not_address() {
    [[ $2 != *://* ]] || fail 2 "$1=$2: nothing can be written to an address; give a path"
}

# --- the command line ---
image=bigbatch build='' data='' output=runs security=()
take_dry_run "$@"
set -- "${words[@]}"
while [[ ${1-} == -* ]]; do
    case $1 in
        --help | -h) usage && exit ;;
        --) break ;;
        --build) build=yes ;;
        --image | --data | --output | --security-opt)
            [[ -n ${2-} ]] || fail 2 "$1 needs a value"
            if [[ $1 = --security-opt ]]; then security+=("$1=$2"); else printf -v "${1#--}" %s "$2"; fi
            shift ;;
        --image=* | --data=* | --output=* | --security-opt=*)
            set -- "${1%%=*}" "${1#*=}" "${@:2}"
            continue ;;
        *) fail 2 "there is no option $1; see --help, and put the flags of train.py after the recipe" ;;
    esac
    shift
done
take_recipe "$@"
set -- "${words[@]}"
data=$(expanded "$data")
[[ -z $data || -d $data ]] || fail 1 "--data: the folder $data does not exist"
not_address --output "$output"
output=$(realpath -m -- "$(expanded "$output")")

# mount HOST-PATH PATH [readonly]: unlike --volume, it allows a colon in a path, and fails if the path is missing.
mount() {
    [[ $1 != *,* ]] || fail 2 "$1: the engine cannot mount a path with a comma; rename it"
    options+=(--mount "type=bind,source=$1,target=$2${3+,$3}")
}

# Prints the path of an --output_dir in the container, which has to be inside the output folder.
inside() {
    local path
    not_address --output_dir "$1"
    path=$(expanded "$1")
    case $path in
        '') echo ;; # train.py reports it
        /output | /output/*) echo "$path" ;;
        "$output" | "$output"/*) echo "/output${path#"$output"}" ;;
        /*) fail 2 "--output_dir=$1 is lost with the container; give a relative path, and its folder as --output" ;;
        *) echo "/output/${path#runs/}" ;;
    esac
}

# --- options of the container ---
# Podman also comes under docker's name, and either may run without root.
is_podman='' is_rootless=''
says() { "$engine" "$@" 2>/dev/null || true; }
if [[ ${engine##*/} = podman ]]; then
    is_podman=yes
    [[ $(id -u) = 0 ]] || is_rootless=yes
elif command -v "$engine" >/dev/null; then
    info=$(says info | grep -v '^ *Name: ') || true
    if [[ $(says --version) = *[Pp]odman* ]]; then
        is_podman=yes
        [[ $(id -u) = 0 || $info = *'rootless: false'* ]] || is_rootless=yes
    elif [[ $(id -u) != 0 && $(says version)$info = *[Pp]odman* ]]; then
        fail 1 "$engine reaches podman here, which needs its own options; set BIGBATCH_ENGINE=podman"
    elif grep -x ' *rootless' <<<"$info" >/dev/null; then
        is_rootless=yes
    fi
fi
options=(
    --rm
    # NCCL and MPI exchange data between workers in /dev/shm, which has only 64 MB in a container by default.
    --ipc=host
    # Seconds from `docker stop` to the kill, for the last checkpoint.
    --stop-timeout 300
    "${security[@]}"
)
compiled=''
if command -v nvidia-smi >/dev/null; then
    # Without this folder, each container would compile TensorFlow's kernels again at its start, for minutes.
    [[ -n ${XDG_CACHE_HOME-}${HOME-} ]] || fail 1 "\$HOME is not set; set it, or \$XDG_CACHE_HOME for compiled kernels"
    compiled=$(realpath -m -- "${XDG_CACHE_HOME:-${HOME-}/.cache}/bigbatch/cuda")
    mount "$compiled" /cuda-cache
    options+=(--env CUDA_CACHE_PATH=/cuda-cache)
    if [[ -n $is_podman ]]; then options+=(--device nvidia.com/gpu=all); else options+=(--gpus all); fi
fi
user=$(id -u):$(id -g) # written files belong to the user who starts this script
if [[ -n $is_rootless ]]; then # an engine without root cannot raise limits
    # Podman maps this user to another ID in the container by default. Docker maps its root to this user.
    if [[ -n $is_podman ]]; then options+=(--userns=keep-id); else user=0:0; fi
else
    # numactl binds each worker's memory to its GPU's socket. Docker's seccomp profile requires this capability for it.
    options+=(--cap-add=SYS_NICE)
    # NCCL, CUDA and MPI pin buffers. The kernel's default allows 8 MB of pinned memory.
    options+=(--ulimit memlock=-1)
    # NVIDIA recommends this for its frameworks: it sets the stack size of threads, and deep graphs need more than 8 MB.
    options+=(--ulimit stack=67108864)
fi
options+=(--user "$user")
while read -r name; do
    options+=(--env "$name")
done < <(compgen -e | grep -E "^($passed_on)\$" | grep -vE "^($of_the_host)\$" || true)
mount "$output" /output
flags=()
if [[ -n $data ]]; then
    mount "$(realpath -- "$data")" /data readonly
    flags+=(--data_dir=/data)
fi
file=$(realpath -e -- "$(expanded "$recipe")" 2>/dev/null) || file=''
if [[ $file = "$root"/recipes/* ]]; then
    recipe=${file#"$root"/}
elif [[ -f $file ]]; then # else it is the name of a recipe in the container
    mount "$file" "/recipe/${file##*/}" readonly
    recipe=/recipe/${file##*/}
fi
while [[ $# -gt 0 ]]; do
    case $1 in
        --output_dir=* | -output_dir=*) flags+=("--output_dir=$(inside "${1#*=}")") ;;
        --output_dir | -output_dir) # its value is the next word; train.py reports a missing one
            flags+=("$1")
            if [[ $# -gt 1 ]]; then
                flags+=("$(inside "$2")")
                shift
            fi ;;
        *) flags+=("$1") ;;
    esac
    shift
done

# --- run ---
build_command=("$engine" build --tag "$image" "$root")
command=("$engine" run "${options[@]}" "$image" launch/dgx1.sh "$recipe" "${flags[@]}")
if [[ -n $dry_run ]]; then
    [[ -z $build ]] || echo "${build_command[*]@Q}"
    echo "${command[*]@Q}"
    exit
fi
command -v "$engine" >/dev/null || fail 1 "there is no $engine; set \$BIGBATCH_ENGINE to another engine, such as podman"
[[ -z $build ]] || "${build_command[@]}" >&2
"$engine" image inspect "$image" >/dev/null 2>&1 || fail 1 "$engine has no image $image; add --build to build it"
[[ -z $compiled ]] || mkdir -p -- "$compiled" || fail 1 "$compiled cannot be created; set \$XDG_CACHE_HOME"
mkdir -p -- "$output" || fail 1 "--output: the folder $output cannot be created; choose another one"
# The engine replaces this process, forwards signals to the image's init, and returns the training's exit code.
exec "${command[@]}"
