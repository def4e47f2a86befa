# shellcheck shell=bash
# Sourced by every launcher: what NCCL, DALI, OpenMP, CUDA, TensorFlow and MPI have to find in the environment, in one
# place. What is set already stays, so a site changes a line by exporting its own.

# The checkout, and the Python that `uv sync` made for it. A container has its own, and the host then needs none.
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${BIGBATCH_PYTHON:-$root/.venv/bin/python}
if [ ! -x "$python" ] && [ -z "${BIGBATCH_CONTAINER_IMAGE-}" ]; then
    echo "${0##*/}: there is no $python: run 'uv sync' in $root first" >&2
    exit 1
fi
# mpirun and horovodrun are this environment's, unless a site's own MPI has taken the wheel's place there.
export PATH="${python%/*}:$PATH"
# Modules are found from whatever folder the user stands in, on every host.
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
# A worker that is killed has its last line on the screen.
export PYTHONUNBUFFERED=1

# CUDA numbers the GPUs as nvidia-smi does, by slot: the sockets that they are bound to are found by that number.
export CUDA_DEVICE_ORDER=${CUDA_DEVICE_ORDER:-PCI_BUS_ID}
# TensorFlow 2.15 has no compiled code for most of its kernels on GPUs newer than V100 and T4. The driver compiles them,
# for minutes, and keeps them in ~/.nv, unless they outgrow its 1 GB there.
export CUDA_CACHE_MAXSIZE=${CUDA_CACHE_MAXSIZE:-4294967296}
# Kernels are launched by threads that the input pipeline cannot keep waiting.
export TF_GPU_THREAD_MODE=${TF_GPU_THREAD_MODE:-gpu_private}
export TF_GPU_THREAD_COUNT=${TF_GPU_THREAD_COUNT:-2}
# What goes wrong in NCCL is said, and nothing else.
export NCCL_DEBUG=${NCCL_DEBUG:-WARN}
# docker0 has the same address on every host that runs Docker, as each DGX does: what is sent there never arrives. Open
# MPI excludes its default as well; NCCL is told only where another interface is left.
if grep -q '^ *docker0:' /proc/net/dev; then
    if [ -z "${OMPI_MCA_btl_tcp_if_include-}" ]; then
        export OMPI_MCA_btl_tcp_if_exclude=${OMPI_MCA_btl_tcp_if_exclude:-127.0.0.1/8,sppp,docker0}
    fi
    if [ -z "${PRTE_MCA_prte_if_include-}" ]; then
        export PRTE_MCA_prte_if_exclude=${PRTE_MCA_prte_if_exclude:-docker0} # Open MPI 5
        export OMPI_MCA_oob_tcp_if_exclude=${OMPI_MCA_oob_tcp_if_exclude:-docker0} # Open MPI 4
    fi
    if sed '1,2d' /proc/net/dev | grep -qvE '^ *(lo|docker|veth|br-)'; then
        export NCCL_SOCKET_IFNAME=${NCCL_SOCKET_IFNAME:-^lo,docker}
    fi
fi
# Threads of a worker sleep where they wait: others of the same cores, DALI's above all, have work to do.
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-PASSIVE}
# OMP_NUM_THREADS and DALI's threads follow from the cores that each worker is bound to: launch/binding.py.

# In a container root is often the only user there is.
if [ "$(id -u)" = 0 ]; then
    export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
    export PRTE_ALLOW_RUN_AS_ROOT=1 PRTE_ALLOW_RUN_AS_ROOT_CONFIRM=1
fi
# Workers are bound by launch/binding.py, to their GPU's socket; MPI's own binding would leave a worker one core.
export PRTE_MCA_hwloc_default_binding_policy=none OMPI_MCA_hwloc_base_binding_policy=none
# On a laptop there may be more workers than cores; MPI need not refuse that.
export PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe OMPI_MCA_rmaps_base_oversubscribe=1
