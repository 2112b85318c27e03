# One image for every service: `docker run IMAGE router|prefill|decode ...`.

FROM python:3.11-slim AS builder
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
# Compiles the CPU kernels; Debian's newest will do.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /source
# The CPU kernels take long to compile, and change seldom.
COPY kernels/native kernels/native
COPY kernels/library kernels/library
RUN PYTHONPATH=kernels python -m library.build
COPY . .
# Here /opt/baton gets the files of Baton's wheel alone, which the image takes.
RUN pip wheel --no-deps --wheel-dir /wheel . \
    && python -m venv --without-pip /opt/baton \
    && pip --python /opt/baton/bin/python install --no-deps /wheel/*.whl

FROM python:3.11-slim AS torch
# Where torch comes from. PyPI's torch brings CUDA: build with
# --build-arg TORCH_INDEX_URL=https://pypi.org/simple to serve from GPUs.
ARG TORCH_INDEX_URL=https://download.pytorch.org/whl/cpu
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
# binutils strips libraries.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends binutils \
    && rm -rf /var/lib/apt/lists/*
COPY deploy/image /image
RUN python -m venv /opt/baton \
    && /opt/baton/bin/pip install --index-url "${TORCH_INDEX_URL}" "torch>=2.11,<2.14" \
    && /image/trim_packages.sh /opt/baton

FROM python:3.11-slim
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
# Layers are in the order in which they change, the largest first: a new version of Baton is the
# last of them, so that machines with an earlier one fetch little else.
COPY --from=torch /opt/baton /opt/baton
# Triton compiles the launchers of its kernels when they first run; torch for GPUs needs it.
# hadolint ignore=DL3008
RUN if ls /opt/baton/lib/python3*/site-packages/torch/lib/libtorch_cuda.so 2>/dev/null; then \
    apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*; \
    fi
# Extras of pyproject.toml: --build-arg EXTRAS=nixl adds the connector nixl://.
ARG EXTRAS=
COPY pyproject.toml deploy/image/trim_packages.sh /tmp/
RUN python -c 'import sys, tomllib; p = tomllib.load(sys.stdin.buffer)["project"]; \
    extras = [p["optional-dependencies"][name] for name in sys.argv[1].split(",") if name]; \
    print(*p["dependencies"], *sum(extras, []), sep="\n")' "${EXTRAS}" \
    < /tmp/pyproject.toml > /tmp/requirements.txt \
    && /opt/baton/bin/pip install --requirement /tmp/requirements.txt \
    && /tmp/trim_packages.sh /opt/baton
COPY --from=builder /opt/baton/bin/baton /opt/baton/bin/
COPY --from=builder /opt/baton/lib /opt/baton/lib
# HOME and USER also hold for a user that is not in /etc/passwd.
ENV PATH=/opt/baton/bin:$PATH PYTHONUNBUFFERED=1 HOME=/home/baton USER=baton
# Any user of group 0 may write, as platforms expect that choose the user. Volumes that are mounted
# on these folders, see docker-compose.yml, get their owner, group and mode.
RUN useradd --create-home --uid 10001 --gid 0 baton \
    && chmod g=u /home/baton \
    && install --directory --owner=baton --group=root --mode=0770 /run/baton /turns /hub /triton
USER 10001
WORKDIR /home/baton
# HTTP of a router, and gRPC of every service.
EXPOSE 8000 50051
# Healthy once the model is loaded, and on a GPU its kernels are compiled, which may take minutes; a
# draining service is unhealthy.
HEALTHCHECK --interval=5s --timeout=5s --start-period=600s --retries=3 \
    CMD ["baton", "health", "127.0.0.1:50051"]
ENTRYPOINT ["baton"]
CMD ["--help"]
# docs/release.md has the arguments of a build. Labels come last, as they change with each commit.
ARG VERSION=0.1.0
ARG REVISION=
LABEL org.opencontainers.image.title="Baton" \
    org.opencontainers.image.description="Serves large language models with prefill and decode split into two tiers" \
    org.opencontainers.image.licenses="Apache-2.0 AND BSD-2-Clause" \
    org.opencontainers.image.version="${VERSION}" \
    org.opencontainers.image.revision="${REVISION}" \
    org.opencontainers.image.base.name="python:3.11-slim"
