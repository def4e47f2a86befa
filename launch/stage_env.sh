#!/usr/bin/env bash
# Unpacks archives of launch/stage_env.py to a new folder on a local disk of this node and prints `ready`. Removes the
# folder when standard input ends, or on a signal: launch/stage_env.sh FOLDER/bigbatch-environment-UID-JOB ARCHIVE...
set -euo pipefail
. "${BASH_SOURCE[0]%/*}/common.sh"
host=$(uname -n) target=$1 # HOSTNAME may come from the first node
shift

# Whether a process of this node has mapped a file of a copy.
is_used() {
    grep -qsF "$1/" /proc/[0-9]*/maps
}

# Removes the copy when no process uses it, or after 20 seconds: Slurm kills a job's processes after 30.
remove() {
    trap '' TERM INT HUP
    local made=$1 end=$((SECONDS + 20))
    while is_used "$made" && [ "$SECONDS" -lt "$end" ]; do sleep 0.1; done
    rm -rf "$made"
}

# Removes a copy that a killed job or a power cut has left. A copy in use is locked by its process of this script.
clean() {
    exec 8<"$1"
    ! flock -n 8 || is_used "$1" || rm -rf "$1"
}
for old in "${target%-*}"-*; do
    [ ! -O "$old" ] || (clean "$old")
done

trap '' USR1 # for the workers
trap 'exit 143' TERM INT HUP
made=$(mktemp -d "${target%/*}/bigbatch.XXXXXX" 2>/dev/null) ||
    fail 1 "$host: no folder can be made in ${target%/*}; give --stage-env a local disk that you can write to"
trap 'remove "$made"' EXIT
exec 9<"$made"
flock 9
mv -T "$made" "$target" 2>/dev/null || fail 1 "$host: $target is in use; remove it"
made=$target

# Copies an archive to $part and checks it. A copy that a killed job has left is continued.
copy() {
    part=${target%/*}/bigbatch-archive-$(id -u)-${archive##*/}
    if ! { exec 7>>"$part"; } 2>/dev/null || ! flock -n 7 || ! [ "$part" -ef /proc/self/fd/7 ]; then
        part=$target/archive # another job copies the same archive
        exec 7>>"$part"
    fi
    if ! error=$(tail -c "+$(($(stat -c %s "$part") + 1))" -- "$archive" 2>&1 >&7); then
        [ -s "$part" ] || rm "$part"
        fail 1 "$host: $archive cannot be copied to ${target%/*}: ${error%%$'\n'*}"
    fi
    digest=$(sha256sum <"$part")
    [[ "${archive%.tar*}" = *"-${digest:0:16}" ]]
}
for archive; do
    # The archive is read once from the shared disk, and checked before anything in it is used.
    copy || { rm "$part" && copy; } || { rm "$part" && fail 1 "$host: $archive is damaged; delete it and start again"; }
    error=$(tar -x --no-same-owner -f "$part" -C "$target" 2>&1) ||
        fail 1 "$host: $archive cannot be unpacked to $target: ${error%%$'\n'*}"
    rm "$part"
done
[ ! -d "$target/base" ] || sed -i "s|^home *=.*|home = $target/base/bin|" "$target/venv/pyvenv.cfg"
echo ready
read -r _ || true
