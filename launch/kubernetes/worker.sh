#!/usr/bin/env bash
# Runs sshd in a pod of an MPIJob, through which launch/horovodrun.sh starts the workers. On SIGTERM, as when the pod's
# node is drained, all workers save a checkpoint before the pod ends.
set -euo pipefail
folder=$(mktemp -d)
ssh-keygen -q -t ed25519 -N '' -f "$folder/host_key" # a key in the image would be everybody's
ulimit -S -l hard # memory that RDMA may pin
trap 'kill "$sshd"' TERM
/usr/sbin/sshd -D -e -f "$(dirname "$0")/sshd_config" -h "$folder/host_key" &
sshd=$!
wait "$sshd" || true
# Only the listener has ended, so that the launcher waits for the next pod. The sessions end with their workers.
pkill -USR1 -f '^\S*python -X \S+ \S*train\.py' || true
while pgrep -u "$UID" -x 'sshd(-session)?' >/dev/null; do
    sleep 0.2
done
exit 1 # if sshd has ended by itself, Kubernetes starts the container again
