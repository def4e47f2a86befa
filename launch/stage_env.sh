#!/usr/bin/env bash
# Unpacks archives of launch/stage_env.py to a new folder on a local disk of this node and prints `ready`. Removes the
# folder when standard input ends, or on a signal: launch/stage_env.sh FOLDER/bigbatch-UID/environment-JOB ARCHIVE...
set -euo pipefail
. "${BASH_SOURCE[0]%/*}/common.sh"
host=$(uname -n) target=$1 private=${1%/*} # HOSTNAME may come from the first node
shift

# Whether a process of this node has mapped a file of a copy.
is_used() {
    grep -qsF "$(realpath -m -- "$1")/" /proc/[0-9]*/maps
}

# Removes the copy when no process uses it, or after 20 seconds: Slurm kills a job's processes after 30.
remove() {
    trap '' TERM INT HUP
    local end=$((SECONDS + 20))
    while is_used "$target" && [ "$SECONDS" -lt "$end" ]; do sleep 0.1; done
    rm -rf "$target"
}

# Other users may write to FOLDER. This is the rule of private_folder in common/files.py.
mkdir -m 700 "$private" 2>/dev/null || true
case $(stat -c %f:%u "$private" 2>/dev/null) in # type and permissions in hexadecimal, and the owner
    4[15]c0:"$EUID") ;;
    '') fail 1 "$host: no folder can be made in ${private%/*}; give --stage-env a local disk that you can write to" ;;
    *) fail 1 "$host: $private is not a folder that only you can open; remove it, or give --stage-env another disk" ;;
esac

trap '' USR1 # for the workers
trap 'exit 143' TERM INT HUP
exec 8<"$private"
flock 8 # nobody removes the new copy before it is locked
# Removes copies that killed jobs or a power cut have left. A copy in use is locked by its process of this script.
for old in "$private"/environment-*; do
    (exec 9<"$old" && flock -n 9 && ! is_used "$old" && rm -rf "$old") 2>/dev/null || true
done
mkdir -m 700 "$target" 2>/dev/null || fail 1 "$host: $target is in use; remove it"
trap remove EXIT
exec 9<"$target"
flock 9
exec 8<&-

for archive; do # read once from the shared disk; gzip and zstd check its checksum
    case "$archive" in *.zst) unpacker=zstd ;; *) unpacker=gzip ;; esac
    error=$({ "$unpacker" -dc -- "$archive" | tar -x --no-same-owner -f - -C "$target"; } 2>&1) ||
        fail 1 "$host: $archive cannot be unpacked to $target; if it is damaged, delete it and start again \
(${error%%$'\n'*})"
done
if [ -d "$target/base" ]; then # else the Python of /usr is used
    ln -sf ../../base/bin/python "$target/venv/bin/python"
    sed -i "s|^home *=.*|home = $target/base/bin|" "$target/venv/pyvenv.cfg"
fi
echo ready
read -r _ || true
