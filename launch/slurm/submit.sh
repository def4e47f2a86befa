#!/usr/bin/env bash
# Submits a training to Slurm: launch/slurm/submit.sh --nodes N --gpus-per-node G RECIPE [flags].
set -euo pipefail
# shellcheck source=../common.sh
. "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

usage="launch/slurm/submit.sh --nodes N --gpus-per-node G [options] RECIPE|-- [flags of train.py]

Submits the training of RECIPE as a Slurm job. Prints the job's number, or the plan with --dry-run. How to watch and
cancel the job goes to standard error.

  --workers-per-node N         workers per node, on nodes without GPUs, too. Default: one per GPU
  --time LIMIT                 time limit, as for sbatch
  --signal-before SECONDS      save and requeue the job this long before the time limit. Default: 180
  --partition P, --account A, --qos Q, --gres G, --constraint C, --mem M and the like
                               as for sbatch
  --cpus-per-task N, --cpus-per-gpu N
                               as for sbatch. Default: as many of a node's processors, and as much of its memory, as the
                               job takes of its GPUs. A job that takes all of them, or none, has its nodes alone
  --exclusive                  take whole nodes
  --sbatch=OPTION              any other option for sbatch. Can be repeated
  --array 0-2                  submit one job per seed, each with a folder seed-N in --output_dir, or per run of a
                               sweep if RECIPE is SWEEP/%a.flags, which \`python -m experiments.sweep --dry_run\` writes
  --launcher auto|mpirun|srun  program that starts the workers. auto: the one whose workers find each other
  --container-image IMAGE      run the workers in a container: a file *.sif with Apptainer, another file or
                               REGISTRY#IMAGE:TAG with Pyxis
  --container-mounts A:B,...   mounts in addition to the checkout, the current folder, --data_dir and --output_dir
  --setup FILE                 source FILE in the job first, such as one that loads modules
  --no-preflight               do not check the nodes first
  --dry-run, --dry_run         print the plan, write the script, and ask Slurm when it could start, but do not submit it

RECIPE is a file of flags, or its name in recipes/. With -- in its place, train.py chooses the recipe that fits
--data_dir. The script and the output of rank 0 go to runs/slurm/, the run to runs/slurm-JOB (or --output_dir), and the
output of the other ranks to runs/slurm-JOB-logs/."

nodes='' gpus='' workers='' signal_before=180 array='' partition='' options=() exclusive='' shared=''
launcher=auto no_preflight='' image='' mounts='' setup=''
[ $# -gt 0 ] || { echo "$usage" >&2 && exit 2; }
take_dry_run "$@"
set -- "${words[@]}"
while [ $# -gt 0 ]; do
    case "$1" in
        --no-preflight) no_preflight=yes && shift && continue ;;
        --exclusive) exclusive=yes && shift && continue ;;
        -h | --help) echo "$usage" && exit ;;
        --) break ;;
        --*=*) option=${1%%=*} value=${1#*=} && shift ;;
        --*) option=$1 value=${2-} && shift && { shift || fail 2 "$option needs a value"; } ;;
        -*) option=$1 value=none ;;
        *) break ;;
    esac
    [ -n "$value" ] || fail 2 "$option needs a value"
    case "$option" in
        --nodes) nodes=$value ;;
        --gpus-per-node) gpus=$value ;;
        --workers-per-node) workers=$value ;;
        --signal-before) signal_before=$value ;;
        --array) array=$value ;;
        --launcher) launcher=$value ;;
        --container-image) image=$(expanded "$value") ;;
        --container-mounts) mounts=$value ;;
        --setup) setup=$(readlink -e -- "$(expanded "$value")") || fail 2 "--setup: there is no file $value" ;;
        --cpus-per-task | --cpus-per-gpu) shared=yes && options+=("$option=$value") ;;
        --partition) partition=$value && options+=("$option=$value") ;;
        --time | --account | --qos | --gres | --constraint | --mem | --mem-per-cpu | --mem-per-gpu | \
            --nodelist | --exclude | --reservation | --dependency | --begin | --nice | --licenses | --switches | --tmp | \
            --comment | --mail-type | --mail-user | --export) options+=("$option=$value") ;;
        --sbatch) options+=("$value") ;;
        *) fail 2 "there is no option $option; see --help, and put the flags of train.py after the recipe" ;;
    esac
done
workers=${workers:-${gpus##*:}}
for number in "--nodes:$nodes" "--gpus-per-node or --workers-per-node:$workers" "--signal-before:$signal_before"; do
    [ -n "${number##*:}" ] || fail 2 "${number%:*} is missing"
    [[ "${number##*:}" =~ ^[1-9][0-9]*$ ]] || fail 2 "${number%:*} takes a number above 0, not '${number##*:}'"
done
[[ "$gpus" =~ ^([A-Za-z][A-Za-z0-9_.-]*:)?[0-9]*$ ]] ||
    fail 2 "--gpus-per-node takes a number, or TYPE:NUMBER such as a100:4, not '$gpus'"
[[ "$launcher" =~ ^(auto|mpirun|srun)$ ]] || fail 2 "--launcher takes auto, mpirun or srun, not '$launcher'"
is_sweep='' given=${1-}
if [[ "${1-}" = *%a.flags ]]; then
    [[ "$array" =~ ^[0-9] ]] || fail 2 "$1 needs --array, such as --array=0-2"
    is_sweep=yes
    set -- "${1%\%a.flags}${array%%[-,:%]*}.flags" "${@:2}"
fi
take_recipe "$@"
name=$(basename -- "$recipe" .flags)
[ "$recipe" != -- ] || name=bigbatch
[ -z "$is_sweep" ] || name=$(basename -- "$(dirname -- "$(realpath -m -- "$(expanded "$recipe")")")")
set -- "${words[@]}"
for flag in ${array:+seed} ${is_sweep:+output_dir}; do
    [[ " $*" != *" -$flag"* && " $*" != *" --$flag"* ]] || fail 2 "--array gives each job its own --$flag; remove it"
done
if [ -f "$image" ]; then
    image=$(realpath -- "$image")
else # a file on the nodes' own disks has an absolute path
    case "${image,,}" in
        *://*) fail 2 "--container-image=$image: give a file, which 'enroot import' or 'apptainer build' makes of an \
address, or for Pyxis REGISTRY#IMAGE:TAG" ;;
        /*) ;;
        .* | *.img | *.sif | *.simg | *.sqfs | *.sqsh | *.squashfs) fail 2 "--container-image: there is no file $image here" ;;
    esac
fi
export BIGBATCH_CONTAINER_IMAGE=$image
# shellcheck source=../env.sh
. "$root/launch/env.sh"

# Prints the options that give the job the same share of a node's processors and memory as of its GPUs. Fails if it
# takes all or none of them, or if Slurm does not tell how many a node has.
shares() {
    local name cpus memory gres all each taken=${gpus##*:} pattern='gpu:([^:,(]+:)?([0-9]+)'
    [[ "$gpus" != *:* ]] || pattern="gpu:(${gpus%:*}:)([0-9]+)"
    while read -r name cpus memory gres; do
        [[ "${partition:+yes}$name" =~ ^yes|\*$ ]] || continue # without --partition, the default one has an asterisk
        [[ "$gres" =~ $pattern ]] || continue
        all=${BASH_REMATCH[2]}
        [ "$taken" -lt "$all" ] || return
        each=$((cpus * taken / all / workers))
        echo "--cpus-per-task=$((each > 0 ? each : 1))"
        memory=$((memory * taken / all)) # 0 where Slurm does not count it
        [[ "$memory" = 0 || " ${options[*]}" = *" --mem"* || -n "${!SBATCH_MEM_PER_*}" ]] || echo "--mem=${memory}M"
        return
    done < <(timeout 20 sinfo --noheader --exact ${partition:+"--partition=$partition"} --format='%P %c %m %G' 2>/dev/null)
    return 1
}
if [ -z "$shared$exclusive" ] && [ "${gpus:-0}" != 0 ] && own=$(shares); then
    mapfile -t own <<<"$own"
    options+=("${own[@]}")
    echo "submit.sh: the job shares its nodes (${own[*]}); --exclusive takes whole ones" >&2
elif [ -z "$shared" ]; then
    exclusive=yes
fi

world=$((nodes * workers))
plan=''
if [ -x "$python" ]; then
    plan=$("$python" -m launch.job --script=submit.sh "--workers=$world" "--workers_per_node=$workers" \
        "$recipe" "$@")
else
    echo "submit.sh: $python does not exist here, so the job checks the flags when it starts" >&2
fi
name=$name-${nodes}x$workers
script=$PWD/runs/slurm/$name.sbatch
mkdir -p "${script%/*}"
job=%j
[ -z "$array" ] || job=%A_%a

# quoted VALUE: prints the value of an #SBATCH option in quotes, because sbatch splits such a line at spaces.
quoted() {
    local value=${1//\\/\\\\}
    echo "\"${value//\"/\\\"}\""
}

# Writes the complete job script: the resource request, the settings of this run, and the body of train.sbatch.
{
    echo "#!/usr/bin/env bash"
    printf '#SBATCH %s\n' "--job-name=$(quoted "$name")" "--nodes=$nodes" "--ntasks-per-node=$workers" \
        "--signal=B:USR1@$signal_before" --requeue --open-mode=append \
        ${exclusive:+--exclusive}
    [ "${gpus:-0}" = 0 ] || echo "#SBATCH --gpus-per-node=$gpus"
    [ -z "$array" ] || echo "#SBATCH --array=$array"
    folder=${script%/*}
    echo "#SBATCH --output=$(quoted "${folder//%/%%}/%x-$job.out")"
    [ ${#options[@]} = 0 ] || printf '#SBATCH %s\n' "${options[@]}"
    for setting in "BIGBATCH_ROOT=$root" "BIGBATCH_SUBMIT_DIR=$PWD" "BIGBATCH_LAUNCHER=$launcher" \
        "BIGBATCH_CONTAINER_IMAGE=$image" "BIGBATCH_CONTAINER_MOUNTS=$mounts" \
        "BIGBATCH_NO_PREFLIGHT=$no_preflight" "BIGBATCH_SETUP=$setup"; do
        printf 'export %s=%q\n' "${setting%%=*}" "${setting#*=}"
    done
    arguments=("$given" "$@")
    echo "set -- ${arguments[*]@Q}"
    sed '1,/^# BODY$/d' "$root/launch/slurm/train.sbatch"
} >"$script"
echo "submit.sh: $world workers; wrote $script" >&2
if [ -n "$dry_run" ]; then
    [ -z "$plan" ] || echo "$plan"
    if ! timeout 20 sinfo >/dev/null 2>&1; then
        echo "submit.sh: no Slurm answers here, so it was not asked whether it accepts the job" >&2
        exit
    fi
    code=0
    answer=$(sbatch --test-only "$script" 2>&1) || code=$?
    said=$(grep -E '^(sbatch: |allocation failure)' <<<"$answer" | tail -n 1) || said=${answer##*$'\n'}
    [ "$code" = 0 ] || fail 1 "Slurm does not accept the job: ${said#sbatch: }"
    echo "submit.sh: ${said#sbatch: }" >&2
    exit
fi
code=0 number='' pattern='^(Submitted batch job )?([0-9]+)((;| on cluster )[^ ]+)?[[:space:]]*$'
answer=$(sbatch --parsable "$script") || code=$?
while IFS= read -r line; do # a site may say more, before and after
    if [[ "$line" =~ $pattern ]]; then
        number=${BASH_REMATCH[2]}
    elif [ -n "$line" ]; then
        echo "$line" >&2
    fi
done <<<"$answer"
[ "$code" = 0 ] || exit "$code"
[ -n "$number" ] || fail 1 "sbatch has not said the job's number; squeue --me shows whether the job was submitted"
echo "$number"
log=${script%.sbatch}-$number${array:+_${array%%[-,:%]*}}.out # that of an array's first job
echo "submit.sh: watch job $number with: tail -F ${log@Q}" >&2
echo "submit.sh: cancel it with: scancel $number" >&2
