# What the pods of a job run: Ray, vLLM, PyTorch, rlhf_runtime. `make images` builds it; by hand, from the repository's root:
#
#   docker build -f docker/runtime.Dockerfile --build-arg BUILD=gpu -t rlhf-runtime:0.1.0-gpu .
#
# The base is Debian or Ubuntu with Python 3.11 and venv, as `python3`. Behind a proxy with a certificate authority of its
# own: --secret id=ca,src=CA.crt --build-arg PIP_CERT=/run/ca.crt --build-arg SSL_CERT_FILE=/run/ca.crt
ARG BASE_IMAGE=python:3.11-slim-bookworm
ARG BUILD=cpu

FROM ${BASE_IMAGE} AS base
ARG BUILD
# Debian's packages are those of the day: its archive drops older ones, so that a version named here would soon be gone.
# vLLM's CPU build links libgomp1 and libnuma1; on GPUs Triton and FlashInfer compile kernels, with Python's headers, and
# NCCL loads the libraries of InfiniBand where a node has it, and goes over TCP without a word where they lack.
# KubeRay's probes for older Rays call wget. A shell of bash -l starts from /etc/profile, which sets PATH anew.
# hadolint ignore=DL3008,SC2086
RUN case $BUILD in \
      cpu) packages="libgomp1 libnuma1" ;; \
      gpu) packages="g++ ibverbs-providers libibverbs1 librdmacm1"; \
           python3 -c 'import os, sysconfig; os.stat(sysconfig.get_path("include") + "/Python.h")' 2>/dev/null \
           || packages="$packages python3-dev" ;; \
      *) echo "BUILD: got $BUILD; expected cpu or gpu" >&2; exit 2 ;; \
    esac \
 && apt-get update \
 && DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends $packages wget \
 && rm -rf /var/lib/apt/lists/* /var/cache/apt/* /var/log/* \
 && groupadd --gid 1000 rlhf \
 && useradd --uid 1000 --gid 1000 --home-dir /rlhf --create-home --skel /dev/null --shell /bin/bash rlhf \
 && echo "export PATH=/opt/rlhf/bin:\$PATH" > /etc/profile.d/rlhf.sh

# Dependencies with their byte code: pods cannot write to these folders, and without it imports take three times as long.
# Left out are headers, jars and tests; on CPUs also vLLM's debug information, and what CUDA loads only beside a GPU.
FROM base AS dependencies
ARG BUILD
ARG PIP_CERT
ARG SSL_CERT_FILE
COPY requirements/uv.txt requirements/runtime-${BUILD}.txt /opt/rlhf/requirements/
WORKDIR /opt/rlhf/lib/python3.11/site-packages
# hadolint ignore=DL3008,SC2086
RUN --mount=type=secret,id=ca,target=/run/ca.crt \
    python3 -m venv /tmp/uv \
 && /tmp/uv/bin/python -m pip install --no-cache-dir --disable-pip-version-check --require-hashes \
      -r /opt/rlhf/requirements/uv.txt \
 && python3 -m venv --without-pip /opt/rlhf \
 && /tmp/uv/bin/uv pip sync --python /opt/rlhf/bin/python --require-hashes --no-cache --compile-bytecode \
      "/opt/rlhf/requirements/runtime-$BUILD.txt" \
 && rm -rf /tmp/uv /opt/rlhf/.lock ray/jars torch/include \
 && find . -type d -name tests -prune -exec rm -r {} + \
 && if [ "$BUILD" = cpu ]; then \
      rm -r nvidia/cudnn/lib/libcudnn_* nvidia/cu13/lib/libnvrtc.alt* nvidia/cu13/lib/libnvperf* nvidia/*/include \
 &&   apt-get update \
 &&   apt-get install --yes --no-install-recommends binutils \
 &&   strip --strip-debug vllm/*.so \
 &&   apt-get purge --yes --auto-remove binutils \
 &&   rm -rf /var/lib/apt/lists/* /var/cache/apt/* /var/log/*; \
    fi

FROM dependencies AS code
ARG PIP_CERT
COPY requirements/build.txt /build/
RUN --mount=type=secret,id=ca,target=/run/ca.crt \
    python3 -m venv /build/tools \
 && /build/tools/bin/python -m pip install --no-cache-dir --disable-pip-version-check --require-hashes -r /build/build.txt
WORKDIR /build
COPY LICENSE ./
COPY operator/api operator/api
COPY runtime runtime
RUN for project in operator/api runtime; do \
      tools/bin/uv build --quiet --offline --no-cache --no-build-isolation --python tools/bin/python --wheel \
        --out-dir wheels "$project" || exit 1; \
    done \
 && tools/bin/uv pip install --no-index --find-links wheels --no-cache --no-deps --compile-bytecode \
      --python /opt/rlhf/bin/python --prefix code rlhf-api rlhf-runtime \
 && rm -f code/.lock \
 && PYTHONPATH=/build/code/lib/python3.11/site-packages tools/bin/python -m cyclonedx_py environment --no-validate \
      --pyproject runtime/pyproject.toml --output-reproducible --output-format JSON --output-file code/sbom.cdx.json \
      /opt/rlhf/bin/python

# Our own code is the last layer, a small one: when it changes, the dependencies stay as they are.
FROM dependencies
COPY --from=code /build/code /opt/rlhf
ENV PATH=/opt/rlhf/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
    HOME=/rlhf \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    RAY_USAGE_STATS_ENABLED=0 \
    VLLM_NO_USAGE_STATS=1 \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
WORKDIR /rlhf
USER 1000:1000
CMD ["python", "-m", "rlhf_runtime", "--help"]
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="rlhf-runtime" \
      org.opencontainers.image.description="Ray, vLLM and PyTorch with the data plane of the RLHF operator" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
