# The operator and the `rlhf` command. `make images` builds it; by hand, from the repository's root:
#
#   docker build -f docker/operator.Dockerfile -t rlhf-operator:0.1.0 .
#
# The base needs Python 3.11 with venv, as `python3`. Behind a proxy with a certificate authority of its own:
# --secret id=ca,src=CA.crt --build-arg PIP_CERT=/run/ca.crt --build-arg SSL_CERT_FILE=/run/ca.crt
ARG BASE_IMAGE=python:3.11-slim-bookworm

# With byte code, since the operator's pod cannot write to these folders.
FROM ${BASE_IMAGE} AS dependencies
ARG PIP_CERT
ARG SSL_CERT_FILE
COPY requirements/uv.txt requirements/operator.txt /opt/rlhf/requirements/
RUN --mount=type=secret,id=ca,target=/run/ca.crt \
    python3 -m venv /tmp/uv \
 && /tmp/uv/bin/python -m pip install --no-cache-dir --disable-pip-version-check --require-hashes \
      -r /opt/rlhf/requirements/uv.txt \
 && python3 -m venv --without-pip /opt/rlhf \
 && /tmp/uv/bin/uv pip sync --python /opt/rlhf/bin/python --require-hashes --no-cache --compile-bytecode \
      /opt/rlhf/requirements/operator.txt \
 && rm -rf /tmp/uv /opt/rlhf/.lock

FROM dependencies AS code
ARG PIP_CERT
COPY requirements/build.txt /build/
RUN --mount=type=secret,id=ca,target=/run/ca.crt \
    python3 -m venv /build/tools \
 && /build/tools/bin/python -m pip install --no-cache-dir --disable-pip-version-check --require-hashes -r /build/build.txt
WORKDIR /build
COPY LICENSE ./
COPY operator operator
RUN for project in operator/api operator; do \
      tools/bin/uv build --quiet --offline --no-cache --no-build-isolation --python tools/bin/python --wheel \
        --out-dir wheels "$project" || exit 1; \
    done \
 && tools/bin/uv pip install --no-index --find-links wheels --no-cache --no-deps --compile-bytecode \
      --python /opt/rlhf/bin/python --prefix code rlhf-api rlhf-operator \
 && rm -f code/.lock \
 && PYTHONPATH=/build/code/lib/python3.11/site-packages tools/bin/python -m cyclonedx_py environment --no-validate \
      --pyproject operator/pyproject.toml --output-reproducible --output-format JSON --output-file code/sbom.cdx.json \
      /opt/rlhf/bin/python

# Our own code is the last layer, a small one: when it changes, the dependencies stay as they are.
FROM dependencies
COPY --from=code /build/code /opt/rlhf
# With an arena a thread, memory that a list of objects took would be kept a dozen times over.
ENV PATH=/opt/rlhf/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
    MALLOC_ARENA_MAX=2 \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1
WORKDIR /tmp
USER 65532:65532
EXPOSE 8080 8081
ENTRYPOINT ["rlhf-operator"]
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="rlhf-operator" \
      org.opencontainers.image.description="Runs RLHFJobs on Ray clusters made by KubeRay" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
