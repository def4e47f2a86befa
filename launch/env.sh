# shellcheck shell=bash
# Every launcher sources this file. It sets the variables that NCCL, DALI, OpenMP, CUDA, TensorFlow and MPI need. It
# keeps variables that are already set, so a site can export its own values.

# The checkout, and the Python that `uv sync` installed for it. A container has its own Python, and the host needs none.
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=${UV_PROJECT_ENVIRONMENT:-.venv}
[[ $venv = /* ]] || venv=$root/$venv # as uv has it
python=${BIGBATCH_PYTHON:-$venv/bin/python}
if [ ! -x "$python" ] && [ -z "${BIGBATCH_CONTAINER_IMAGE-}" ]; then
    echo "${0##*/}: $python does not exist; run 'uv sync' in $root first" >&2
    exit 1
fi
# mpirun and horovodrun come from this environment, unless a site has replaced the MPI wheel in it with its own MPI.
export PATH="${python%/*}:$PATH"
# Python finds the modules from any working directory, on every host.
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
# Unbuffered output shows the last line of a worker that is killed.
export PYTHONUNBUFFERED=1

# CUDA numbers the GPUs by PCI slot, as nvidia-smi does. launch/binding.py finds their sockets by this number.
export CUDA_DEVICE_ORDER=${CUDA_DEVICE_ORDER:-PCI_BUS_ID}
# TensorFlow 2.15 has no compiled code for most of its kernels on GPUs newer than V100 and T4. The driver compiles them,
# which takes minutes, and caches them in ~/.nv, unless they exceed the default limit of 1 GB.
export CUDA_CACHE_MAXSIZE=${CUDA_CACHE_MAXSIZE:-4294967296}
# A site chooses another folder with CUDA_CACHE_PATH, as for pods of Kubernetes.
[ -z "${CUDA_CACHE_PATH-}" ] || mkdir -p "$CUDA_CACHE_PATH"
# Dedicated threads launch kernels, so the input pipeline cannot delay them.
export TF_GPU_THREAD_MODE=${TF_GPU_THREAD_MODE:-gpu_private}
export TF_GPU_THREAD_COUNT=${TF_GPU_THREAD_COUNT:-2}
# NCCL prints only warnings and errors.
export NCCL_DEBUG=${NCCL_DEBUG:-WARN}
# docker0 has the same address on every host that runs Docker, as each DGX does, so messages sent there never arrive.
# The list for Open MPI includes its own default exclusions. NCCL gets a list only if another interface is left.
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
# Open MPI's workers take the ports that every other program here gets from the kernel, so that a firewall can admit one
# range (sysctl net.ipv4.ip_local_port_range).
if { read -r first last </proc/sys/net/ipv4/ip_local_port_range; } 2>/dev/null; then
    export OMPI_MCA_btl_tcp_port_min_v4=${OMPI_MCA_btl_tcp_port_min_v4:-$first}
    export OMPI_MCA_btl_tcp_port_min_v6=${OMPI_MCA_btl_tcp_port_min_v6:-$first}
    export OMPI_MCA_btl_tcp_port_range_v4=${OMPI_MCA_btl_tcp_port_range_v4:-$((last - first + 1))}
    export OMPI_MCA_btl_tcp_port_range_v6=${OMPI_MCA_btl_tcp_port_range_v6:-$((last - first + 1))}
fi
# Waiting threads of a worker sleep, because other threads on the same cores, above all DALI's, have work to do.
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-PASSIVE}
# OMP_NUM_THREADS and DALI's threads follow from the cores that launch/binding.py binds each worker to.

# Root is often the only user in a container.
if [ "$(id -u)" = 0 ]; then
    export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
    export PRTE_ALLOW_RUN_AS_ROOT=1 PRTE_ALLOW_RUN_AS_ROOT_CONFIRM=1
fi
# launch/binding.py binds workers to their GPU's socket. MPI's own binding would leave each worker a single core.
export PRTE_MCA_hwloc_default_binding_policy=none OMPI_MCA_hwloc_base_binding_policy=none
# MPI should allow more workers than cores, for example on a laptop.
export PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe OMPI_MCA_rmaps_base_oversubscribe=1
