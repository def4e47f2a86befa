# Bigbatch and all that it needs: `docker build --tag bigbatch .`. By default for NVIDIA's GPUs; for CPUs alone add
# `--build-arg BASE_IMAGE=debian:bookworm-slim`. What only one base has is looked for, never assumed.
ARG BASE_IMAGE=nvidia/cuda:12.2.2-cudnn8-devel-ubuntu22.04

# The devel image stays under the final one: TensorFlow's --xla takes ptxas and libdevice from it, which runtime lacks.
FROM ${BASE_IMAGE} AS base
# NCCL opens the libraries of InfiniBand and RoCE by name, and exchanges over TCP where they are missing.
# Debian packages are the base's business: a version pinned here would hold on one base only.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends ca-certificates ibverbs-providers libibverbs1 librdmacm1 numactl \
        python3 tini \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/bigbatch


FROM base AS requirements
# What uv reads, without the settings of pytest and ruff at the end: a change of theirs need not compile Horovod anew.
COPY pyproject.toml ./
RUN sed --in-place '/^\[tool\.pytest/,$d' pyproject.toml && touch --date=@0 pyproject.toml


FROM base AS build
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ make python3-venv \
    && rm -rf /var/lib/apt/lists/*
ARG UV_VERSION=0.13.9
RUN python3 -m venv /opt/uv \
    && /opt/uv/bin/pip install --no-cache-dir "uv==${UV_VERSION}"
# uv takes the base's Python where that is a 3.11, as Debian 12's is, and brings one where it is not: Ubuntu 22.04 has
# 3.10, and its 3.11 is a release candidate.
ENV UV_PYTHON_INSTALL_DIR=/opt/python UV_CACHE_DIR=/tmp/uv
COPY uv.lock ./
COPY --from=requirements /opt/bigbatch/pyproject.toml ./
# Where the base has NCCL, Horovod is compiled for it, beside MPI and Gloo.
RUN mkdir -p /opt/python \
    && if [ -e /usr/include/nccl.h ]; then export HOROVOD_GPU_OPERATIONS=NCCL; fi \
    && /opt/uv/bin/uv sync --frozen --no-install-project \
    && rm -rf /tmp/uv


FROM base
# Any user may come (docker run --user), known to /etc/passwd or not: what is written goes to places open to all.
RUN useradd --uid 10000 --no-create-home --home-dir /home/bigbatch bigbatch \
    && mkdir --mode=1777 /home/bigbatch /data /output \
    && ln -s /output runs
COPY --from=build /opt/python /opt/python
COPY --from=build /opt/bigbatch/.venv .venv
# USER: some libraries ask for a name. Code is not writable: pytest and Hypothesis keep their notes elsewhere.
ENV PATH=/opt/bigbatch/.venv/bin:$PATH \
    HOME=/home/bigbatch \
    USER=bigbatch \
    PYTEST_ADDOPTS="-p no:cacheprovider" \
    HYPOTHESIS_STORAGE_DIRECTORY=/tmp/hypothesis
COPY . .
# A checkout made with a strict umask would hold files that root alone can read.
RUN find . -name .venv -prune -o ! -perm -a=r -exec chmod a+rX {} + \
    && .venv/bin/python -m compileall -q -x /.venv/ .
USER 10000:10000
VOLUME /data /output
ENTRYPOINT ["tini", "--", "/opt/bigbatch/launch/entrypoint.sh"]
