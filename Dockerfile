# Builds an image of Bigbatch and its dependencies: `docker build --tag bigbatch .`. It is for NVIDIA GPUs by default.
# For CPUs only, add `--build-arg BASE_IMAGE=debian:bookworm-slim`. The build tests for features that only one base has.
# A digest instead of a tag (`--build-arg RUN_IMAGE=nvidia/cuda@sha256:...`) makes a build repeatable.
ARG BASE_IMAGE
ARG BUILD_IMAGE=${BASE_IMAGE:-nvidia/cuda:12.2.2-cudnn8-devel-ubuntu22.04}
ARG RUN_IMAGE=${BASE_IMAGE:-nvidia/cuda:12.2.2-cudnn8-runtime-ubuntu22.04}

FROM ${BUILD_IMAGE} AS requirements
WORKDIR /opt/bigbatch
# Removes the settings of pytest and ruff at the end, so that changing them does not compile Horovod again.
COPY pyproject.toml ./
RUN sed --in-place '/^\[tool\.pytest/,$d' pyproject.toml && touch --date=@0 pyproject.toml


FROM ${BUILD_IMAGE} AS build
# Debian packages have no pinned versions, because a version would exist on one base only.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends ca-certificates g++ make python3-venv \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/bigbatch
ARG UV_VERSION=0.13.9
RUN python3 -m venv /opt/uv \
    && /opt/uv/bin/pip install --no-cache-dir "uv==${UV_VERSION}"
# uv uses the base's Python if it is 3.11, as in Debian 12, and installs one if not. Ubuntu 22.04 has 3.10, and its 3.11
# is a release candidate.
ENV UV_PYTHON_INSTALL_DIR=/opt/python UV_CACHE_DIR=/tmp/uv
COPY uv.lock ./
COPY --from=requirements /opt/bigbatch/pyproject.toml ./
# If the base has NCCL, Horovod is compiled with it, in addition to MPI and Gloo. What runs needs no headers.
RUN mkdir -p /opt/python \
    && if [ -e /usr/include/nccl.h ]; then export HOROVOD_GPU_OPERATIONS=NCCL; fi \
    && /opt/uv/bin/uv sync --frozen --no-install-project --no-group dev --extra onnx --compile-bytecode \
    && rm -rf /tmp/uv .venv/lib/python3*/site-packages/tensorflow/include .venv/lib/python3*/site-packages/nvidia/*/include
# XLA in TensorFlow needs ptxas and libdevice, and its profiler CUPTI. The runtime image lacks them.
WORKDIR /usr/local/cuda
RUN mkdir /opt/cuda \
    && for file in bin/ptxas nvvm/libdevice/libdevice.10.bc lib64/libcupti.so.12; do \
        if [ -e "$file" ]; then cp --dereference --parents "$file" /opt/cuda; fi; \
    done


FROM ${RUN_IMAGE}
# NCCL loads the libraries of InfiniBand and RoCE by name, and falls back to TCP if they are missing.
# ssh, sshd and pkill are for pods of Kubernetes. Each pod makes its own host key.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends ca-certificates ibverbs-providers libibverbs1 librdmacm1 numactl \
        openssh-client openssh-server procps python3 tini \
    && rm -rf /var/lib/apt/lists/* /etc/ssh/ssh_host_*
WORKDIR /opt/bigbatch
# The container can run as any user (docker run --user), in /etc/passwd or not, so all can write to these folders.
RUN useradd --uid 10000 --no-create-home --home-dir /home/bigbatch bigbatch \
    && mkdir --mode=1777 /home/bigbatch /data /output \
    && ln -s /output runs \
    && ln -s /opt/bigbatch/launch/kubernetes/ssh_config /etc/ssh/ssh_config.d/bigbatch.conf
COPY --from=build /opt/python /opt/python
COPY --from=build /opt/bigbatch/.venv .venv
COPY --from=build /opt/cuda /opt/cuda
RUN if [ -d /usr/local/cuda ]; then cp --recursive --symbolic-link --force /opt/cuda/. /usr/local/cuda && ldconfig; fi
# USER is set because some libraries need a user name.
ENV PATH=/opt/bigbatch/.venv/bin:$PATH \
    HOME=/home/bigbatch \
    USER=bigbatch
COPY . .
# A checkout made with a strict umask has files that only root can read.
RUN find . -name .venv -prune -o ! -perm -a=r -exec chmod a+rX {} + \
    && .venv/bin/python -m compileall -q -x /.venv/ .
USER 10000:10000
VOLUME /data /output
ENTRYPOINT ["tini", "--", "/opt/bigbatch/launch/entrypoint.sh"]
