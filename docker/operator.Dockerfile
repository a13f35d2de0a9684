# syntax=docker/dockerfile:1
# The operator and the `rlhf` command. From the repository's root:
#
#   docker build -f docker/operator.Dockerfile -t rlhf-operator:0.1.0 .
#
# The base needs Python 3.11 with venv, as `python3`, at the same path in both stages.
ARG BASE_IMAGE=python:3.11-slim-bookworm

FROM ${BASE_IMAGE} AS dependencies
# Behind a proxy with a certificate authority of its own: its file, mounted into the build.
ARG PIP_CERT
WORKDIR /build
COPY requirements/operator.txt requirements/
RUN python3 -m venv /opt/rlhf \
 && /opt/rlhf/bin/python -m pip install --no-cache-dir --disable-pip-version-check --require-hashes \
      -r requirements/operator.txt \
 && /opt/rlhf/bin/python -m pip uninstall --yes --quiet pip setuptools

# Our own code in a stage and a layer apart: when it changes, the dependencies stay as they are.
FROM dependencies AS code
ARG PIP_CERT
COPY requirements/build.txt requirements/
RUN python3 -m venv /build/tools \
 && /build/tools/bin/python -m pip install --no-cache-dir --disable-pip-version-check --require-hashes \
      -r requirements/build.txt
COPY LICENSE ./
COPY operator operator
RUN /build/tools/bin/python -m pip wheel --no-cache-dir --disable-pip-version-check --no-deps --no-build-isolation \
      --wheel-dir /build/wheels ./operator/api ./operator \
 && /build/tools/bin/python -m pip --python /opt/rlhf/bin/python install --no-cache-dir --disable-pip-version-check \
      --no-deps --no-index --prefix /build/code /build/wheels/*.whl

FROM ${BASE_IMAGE}
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="rlhf-operator" \
      org.opencontainers.image.description="Runs RLHFJobs on Ray clusters made by KubeRay" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
ENV PATH=/opt/rlhf/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1
COPY --from=dependencies /opt/rlhf /opt/rlhf
COPY --from=code /build/code /opt/rlhf
WORKDIR /tmp
USER 65532:65532
EXPOSE 8080 8081
ENTRYPOINT ["rlhf-operator"]
