# What the pods of a job run: Ray, vLLM, PyTorch and rlhf_runtime. `make images` builds it; by hand, from the repository's root:
#
#   docker build -f docker/runtime.Dockerfile --build-arg BUILD=gpu -t rlhf-runtime:0.1.0-gpu .
#
# The base is Debian or Ubuntu with Python 3.11 and venv, as `python3`. Behind a proxy with a certificate authority of its
# own: --secret id=ca,src=CA.crt --build-arg PIP_CERT=/run/ca.crt --build-arg SSL_CERT_FILE=/run/ca.crt
ARG BASE_IMAGE=python:3.11-slim-bookworm
ARG BUILD=cpu

FROM ${BASE_IMAGE} AS tools
ARG PIP_CERT
COPY requirements/build.txt /build/
RUN --mount=type=secret,id=ca,target=/run/ca.crt \
    python3 -m venv /build/tools \
 && /build/tools/bin/python -m pip install --no-cache-dir --disable-pip-version-check --require-hashes -r /build/build.txt

FROM ${BASE_IMAGE} AS base
ARG BUILD
# Debian's packages are those of the day: its archive drops older ones, so that a version named here would soon be gone.
# vLLM's CPU build links libgomp1 and libnuma1; on GPUs Triton and FlashInfer compile kernels, with Python's headers.
# KubeRay's probes for older Rays call wget. A shell of bash -l starts from /etc/profile, which sets PATH anew.
# hadolint ignore=DL3008
RUN case $BUILD in \
      cpu) packages="libgomp1 libnuma1" ;; \
      gpu) packages=g++; \
           python3 -c 'import os, sysconfig; os.stat(sysconfig.get_path("include") + "/Python.h")' 2>/dev/null \
           || packages="$packages python3-dev" ;; \
      *) echo "BUILD: got $BUILD; expected cpu or gpu" >&2; exit 2 ;; \
    esac \
 && apt-get update \
 && DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends $packages wget \
 && rm -rf /var/lib/apt/lists/* /var/cache/apt/* /var/log/* \
 && groupadd --gid 1000 rlhf \
 && useradd --uid 1000 --gid 1000 --home-dir /rlhf --create-home --skel /dev/null --shell /bin/bash rlhf \
 && echo 'export PATH=/opt/rlhf/bin:$PATH' > /etc/profile.d/rlhf.sh

# Dependencies with their byte code: pods cannot write to these folders, and without it imports take three times as long.
FROM base AS dependencies
ARG BUILD
ARG SSL_CERT_FILE
COPY requirements/runtime-${BUILD}.txt /opt/rlhf/requirements.txt
RUN --mount=type=secret,id=ca,target=/run/ca.crt \
    --mount=type=bind,from=tools,source=/build/tools,target=/mnt \
    python3 -m venv --without-pip /opt/rlhf \
 && /mnt/bin/uv pip sync --python /opt/rlhf/bin/python --require-hashes --no-cache --compile-bytecode \
      /opt/rlhf/requirements.txt \
 && cd /opt/rlhf/lib/python3.11/site-packages \
 && rm -rf ray/jars torch/include \
 && if [ "$BUILD" = cpu ]; then rm -rf nvidia/cudnn/lib/libcudnn_* nvidia/cu13/lib/libnvrtc.alt* nvidia/*/include; fi

FROM dependencies AS code
COPY LICENSE /build/
COPY operator/api /build/operator/api
COPY runtime /build/runtime
RUN --mount=type=bind,from=tools,source=/build/tools,target=/mnt \
    for project in operator/api runtime; do \
      /mnt/bin/uv build --quiet --offline --no-cache --no-build-isolation --python /mnt/bin/python --wheel \
        --out-dir /build/wheels "/build/$project" || exit 1; \
    done \
 && /mnt/bin/uv pip install --offline --no-cache --no-deps --compile-bytecode --python /opt/rlhf/bin/python \
      --prefix /build/code /build/wheels/*.whl \
 && PYTHONPATH=/build/code/lib/python3.11/site-packages /mnt/bin/python -m cyclonedx_py environment \
      --pyproject /build/runtime/pyproject.toml --output-reproducible --output-format JSON \
      --output-file /build/code/sbom.cdx.json /opt/rlhf/bin/python

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
