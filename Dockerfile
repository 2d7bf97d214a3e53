# The environment of requirements.lock, and this project, for one kind of machine:
#   docker build --build-arg COMMIT=$(git rev-parse HEAD) -t low-bit-reasoning:cpu .
#   docker build --build-arg COMMIT=$(git rev-parse HEAD) --build-arg TORCH=cuda -t low-bit-reasoning:cuda .
#   docker run --init --rm -v "$PWD/runs:/runs" low-bit-reasoning:cpu lowbit study micro
# The CUDA variant brings all but the driver, which the host lends: `docker run --gpus all ...`.
FROM python:3.11-slim-bookworm

# gcc: Triton compiles a launcher with it; rsync: Snakemake moves its markers with it on Kubernetes
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev rsync \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/low-bit-reasoning
COPY requirements.lock requirements-cluster.lock ./
ARG TORCH=cpu
# both indexes have the version of the lock; a build with a local version, 2.13.0+cpu, comes before one without
RUN case "$TORCH" in \
        cpu) export PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu ;; \
        cuda) ;; \
        *) echo "TORCH=$TORCH is not allowed: cpu or cuda" >&2; exit 1 ;; \
    esac \
    && pip install --no-cache-dir -r requirements.lock \
    && pip install --no-cache-dir --no-deps -r requirements-cluster.lock

COPY . .
RUN pip install --no-cache-dir --no-deps --editable .

ARG COMMIT=unknown
ENV LOWBIT_COMMIT=$COMMIT LOWBIT_RUNS=/runs HF_HOME=/runs/.hub
CMD ["lowbit", "check"]
