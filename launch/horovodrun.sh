#!/usr/bin/env bash
# Trains a recipe on several hosts, from a login node: launch/horovodrun.sh [-H host1:8,host2:8 | --hostfile F] RECIPE
# [flags of train.py]. See `launch/horovodrun.sh --help`.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"
. "$root/launch/env.sh"
take_dry_run "$@"
exec "$python" -m launch.horovodrun ${dry_run:+--dry-run} "${words[@]}"
