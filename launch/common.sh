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

# take_recipe RECIPE|-- [--] [flags of train.py]: sets `recipe` to its first word, and `words` to the flags.
# shellcheck disable=SC2034 # the scripts read them
take_recipe() {
    [ $# -gt 0 ] || fail 2 "the recipe is missing; see --help"
    recipe=$1
    shift
    [ "${1-}" != -- ] || shift
    words=("$@")
}

inside=() output='' training=() workers=''

# ask SCRIPT [options of launch/job.py] RECIPE|-- [flags of train.py]: sets `workers` and `training`, or with --paths
# `output` and `paths`, as launch/job.py answers. `inside` holds the words that start it where the training runs, such as
# in a container.
# shellcheck disable=SC2154 # launch/env.sh sets python
ask() {
    local answer
    answer=$("${inside[@]}" "${python[@]}" -m launch.job "--script=$1" "${@:2}") || exit
    eval "$answer"
}

# Runs mpirun or srun. SIGTERM and SIGUSR1 to this script reach the workers as SIGUSR1, on which they save and exit with
# 75. (mpirun would handle a SIGTERM itself and kill them.) SIGINT and SIGHUP end them at once. Returns the command's
# exit code. `stopped_by` is TERM or USR1 if that signal came, else empty.
run_workers() {
    local child code=0 last=0 before
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
    wait "$child" 2>/dev/null || last=$?
    [ "$last" = 127 ] || code=$last
    trap - TERM USR1 INT HUP
    eval "$before"
    return "$code"
}

# has_written FILE: whether the training has written a file of the run since this start.
has_written() {
    [ "$output/$1" -nt "$BIGBATCH_LOGS/started" ]
}

# exit_code CODE [PROGRAM]: prints the exit code of a launch script, 0, 2, 75 or 1, for that of mpirun or srun. PROGRAM is
# which of them has trained in a Slurm job. What the run's folder has then got since $BIGBATCH_LOGS/started corrects it.
exit_code() {
    local code=$1
    case "$code" in
        0 | 2 | 75) ;;
        # SIGUSR1 kills what does not handle it yet: a launcher or a worker that starts. srun ends the others by SIGTERM.
        138 | 143) [ -n "$stopped_by" ] && code=75 || code=1 ;;
        *) code=1 ;;
    esac
    if [ -z "${2-}" ]; then
        :
    elif [ "$code" = 0 ] && ! has_written summary.json; then # mpirun 5 exits with 0 even if it has lost a node
        echo "${script-}: $2 exited with 0, but the training has not finished" >&2
        code=1
    elif [ "$code-$stopped_by-$2" = 75--srun ] && ! has_written checkpoints/checkpoint; then
        code=1 # a worker failed before training: srun ends the others by SIGTERM, and exits with theirs, the highest code
    elif [ "$code" = 1 ] && [ -n "$stopped_by" ] && ! has_written checkpoints/checkpoint; then
        code=75 # if a worker that starts ends on request, Open MPI may abort the others, which exit with 1
    fi
    echo "$code"
}

# train SCRIPT LAUNCHER...: checks the hosts if `preflight` is set, then trains `training` on `workers` workers, which the
# words LAUNCHER start, and the next phases of --workers_schedule on as many as they need. Sets `code`. A request to stop
# before training is left to the script's traps. `output` is the folder of the run if the script knows it.
train() {
    local script=$1 starter=("${@:2}") program=${output:+$2} words=("${python[@]}")
    code=0
    export BIGBATCH_WORLD_SIZE=$workers # train.py ends unless this many find each other
    if [ -n "$preflight" ]; then
        run_workers "${starter[@]}" -n "$workers" "${words[@]}" -m launch.preflight "${training[@]}" >&2 || code=$?
        [ -z "$stopped_by" ] || kill -s "$stopped_by" "$$"
        code=$(exit_code "$code")
        [ "$code" = 0 ] || exit "$code"
    fi
    [ -z "$program" ] || touch "$BIGBATCH_LOGS/started"
    while :; do
        run_workers "${starter[@]}" -n "$workers" "${words[@]}" -m launch.binding "${words[-1]}" "$root/train.py" \
            "${training[@]}" || code=$?
        code=$(exit_code "$code" "$program")
        if [ "$code" != 75 ] || [ -n "$stopped_by" ]; then break; fi
        ask "$script" --next -- "${training[@]}"
        [ -n "$workers" ] || break
        code=0
        export BIGBATCH_WORLD_SIZE=$workers
        echo "$script: continues on $workers workers" >&2
    done
}
