# shellcheck shell=bash
# Functions that the launchers share. The environment, which needs a .venv, is in launch/env.sh.
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

# fail CODE MESSAGE: prints one line and exits. CODE is 2 for a wrong option, else 1.
fail() {
    echo "${0##*/}: $2" >&2
    exit "$1"
}

# Sets `dry_run` if --dry-run or --dry_run is among the words, also after the recipe, and `words` to the other ones.
# shellcheck disable=SC2034 # the scripts read them
take_dry_run() {
    local word
    dry_run='' words=()
    for word; do
        case "$word" in
            --dry[-_]run | --dry[-_]run=true | -dry[-_]run) dry_run=yes ;;
            *) words+=("$word") ;;
        esac
    done
}

# expanded PATH: prints a path with the home folder in place of ~, which a shell leaves in quotes and after a `=`.
expanded() {
    [[ $1 = \~ || $1 = \~/* ]] && printf '%s\n' "$HOME${1#\~}" || printf '%s\n' "$1"
}

# not_address OPTION PATH: fails if a path that is written to is an address, as common/flags.py does.
not_address() {
    [[ ! $2 =~ ^[A-Za-z][A-Za-z0-9+.-]*:// ]] || fail 2 "$1=$2: nothing can be written to an address; give a path"
}

# Prints the file of a recipe, given by its path or by its name in recipes/.
recipe_path() {
    local name
    if [[ ! -f $1 && $1 == *launch/recipes/* && -f $root/recipes/${1##*launch/recipes/} ]]; then
        printf 'recipes have moved: %s is now recipes/%s\n' "$1" "${1##*launch/recipes/}" >&2
        set -- "${1##*launch/recipes/}"
    fi
    for name in "$(expanded "$1")" "$root/recipes/$1" "$root/recipes/$1.flags"; do
        if [ -f "$name" ]; then
            realpath -- "$name"
            return
        fi
    done
    fail 2 "there is no recipe ${1:-given}; recipes/README.md lists the recipes"
}

# take_recipe [RECIPE] [--] [flags of train.py]: sets `recipe` to the file of RECIPE, or to nothing if -- comes first, and
# `words` to the flags.
# shellcheck disable=SC2034 # the scripts read them
take_recipe() {
    [ $# -gt 0 ] || fail 2 "the recipe is missing; see --help"
    recipe=''
    if [ "$1" != -- ]; then
        recipe=$(recipe_path "$1")
        shift
    fi
    [ "${1-}" != -- ] || shift
    words=("$@")
}

# Prints the flags that read a recipe, one per line: also those of RECIPE.launch, how its paper trained, if that exists.
# Without a recipe, train.py chooses one.
recipe_flags() {
    local launch=${1%.flags}.launch
    [ -n "$1" ] || return 0
    echo "--flagfile=$1"
    [ -f "$launch" ] || return 0
    echo "${0##*/}: $(basename "$launch") adds $(grep '^--' "$launch" | paste -sd' ')" >&2
    echo "--flagfile=$launch"
}

# micro_batch_flag WORKERS [flags of train.py]: prints the --micro_batch_size for the GPUs of this host, if it has any.
# `inside` and `python` hold the words that start Python in the container of the training.
inside=()
# shellcheck disable=SC2154 # launch/env.sh sets python
micro_batch_flag() {
    local workers=$1
    shift
    ! command -v nvidia-smi >/dev/null ||
        "${inside[@]}" "${python[@]}" -m launch.workers --micro_batch "--workers=$workers" "$@"
}

# Runs mpirun or srun. SIGTERM and SIGUSR1 to this script reach the workers as SIGUSR1, on which they save and exit with
# 75. (mpirun would handle a SIGTERM itself and kill them.) SIGINT and SIGHUP end them at once. Returns the command's
# exit code if it is 0, 2 or 75, else 1. `stopped_by` is TERM or USR1 if that signal came, else empty.
run_workers() {
    local child code=0 last before
    before=$(trap -p TERM USR1 INT HUP)
    export stopped_by=''
    "$@" </dev/null &
    child=$!
    trap 'stopped_by=TERM; kill -USR1 "$child" 2>/dev/null' TERM
    trap 'stopped_by=USR1; kill -USR1 "$child" 2>/dev/null' USR1
    trap 'kill -TERM "$child" 2>/dev/null' INT HUP
    while :; do
        code=0
        wait "$child" || code=$?
        kill -0 "$child" 2>/dev/null || break # a signal ended the wait
    done
    last=0
    wait "$child" 2>/dev/null || last=$?
    [ "$last" = 127 ] || code=$last
    trap - TERM USR1 INT HUP
    eval "$before"
    case "$code" in
        0 | 2 | 75) ;;
        # SIGUSR1 kills what does not handle it yet: a launcher or a worker that starts. srun ends the others by SIGTERM.
        138 | 143) [ -n "$stopped_by" ] && code=75 || code=1 ;;
        *) code=1 ;;
    esac
    return "$code"
}
