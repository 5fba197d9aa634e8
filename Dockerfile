# An image that jobs on a TPU slice can run in: burnish from this checkout, with the TPU runtime and gs:// paths.
#
#   docker build -t europe-west4-docker.pkg.dev/MY-PROJECT/images/burnish:1 .
#
# EXTRAS chooses other parts, e.g. --build-arg EXTRAS=cuda,gcs.
FROM python:3.12-slim

ARG EXTRAS=tpu,gcs

ENV PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PYTHONUNBUFFERED=1

WORKDIR /opt/burnish

# Dependencies change less often than the code: they have a layer of their own.
COPY pyproject.toml constraints.txt README.md LICENSE ./
RUN mkdir -p src/burnish && printf '__version__ = "0"\n' > src/burnish/__init__.py \
    && pip install --constraint constraints.txt ".[${EXTRAS}]" \
    && pip uninstall --yes burnish

COPY src ./src
RUN pip install --no-deps . && burnish --version

WORKDIR /work
