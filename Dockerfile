# Container images of the server; see docs/serving.md#deployment.
#
#   docker build --target cpu -t engine:cpu .
#   docker build --target cuda -t engine:cuda .
#
# The images contain only Python and the installed packages: no compiler, no CUDA toolkit. pip is
# included because smollm2 is downloaded as a wheel. NVRTC and the CUDA headers come with the extra
# `cuda12`; the NVIDIA Container Toolkit provides the host's driver.

ARG PYTHON=python:3.12.11-slim-bookworm

# ---- packages, in a virtual environment that both targets copy

FROM ${PYTHON} AS source
RUN python -m venv /opt/venv
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY cuda_src ./cuda_src
COPY engine ./engine

FROM source AS packages-cpu
RUN /opt/venv/bin/pip install --no-cache-dir '.[serve,grammar,hub]'

FROM source AS packages-cuda
RUN /opt/venv/bin/pip install --no-cache-dir '.[serve,grammar,hub,cuda12]'

# ---- base of both targets

FROM ${PYTHON} AS runtime
ARG ENGINE_COMMIT=unknown
# Unprivileged user for the server; its home holds downloaded models and compiled kernels.
RUN groupadd --gid 10001 engine \
    && useradd --uid 10001 --gid 10001 --create-home engine \
    && install --directory --owner=engine --group=engine /home/engine/.cache
ENV PATH=/opt/venv/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    ENGINE_CACHE_DIR=/home/engine/.cache/engine \
    HF_HOME=/home/engine/.cache/huggingface \
    ENGINE_COMMIT=${ENGINE_COMMIT}
USER 10001:10001
WORKDIR /home/engine
VOLUME /home/engine/.cache
EXPOSE 8000
# On SIGTERM the server finishes running requests, then exits (--shutdown-timeout).
STOPSIGNAL SIGTERM
# Allow for the first start, which downloads a model and compiles kernels.
HEALTHCHECK --interval=10s --timeout=5s --start-period=10m --retries=3 \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
ENTRYPOINT ["engine"]
CMD ["serve", "smollm2", "--host", "0.0.0.0", "--port", "8000"]

# ---- the targets

FROM runtime AS cuda
ENV NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    CUDA_CACHE_PATH=/home/engine/.cache/nv \
    CUPY_CACHE_DIR=/home/engine/.cache/cupy
COPY --from=packages-cuda /opt/venv /opt/venv

FROM runtime AS cpu
COPY --from=packages-cpu /opt/venv /opt/venv
