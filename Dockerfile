# docker build -t logitmix .                                  the CPU alone
# docker build -t logitmix --build-arg ACCELERATOR=cuda .     NVIDIA GPUs; run it with --gpus all
# docker run -v "$PWD:/work" -u "$(id -u)" logitmix logitmix train ...
# docker run -v "$PWD:/work" -p 8080:8080 logitmix logitmix serve exports/demo-mol --host 0.0.0.0
#
# On CPU, --build-arg PIP_EXTRA_INDEX_URL=… with an index of CPU wheels makes the image 5 GB smaller.
FROM python:3.11.15-slim-trixie@sha256:90744cff8f32887f075c47d747a173ff333e9e98801667af93c357fa9f5e28ff

ARG ACCELERATOR=cpu
ARG PIP_EXTRA_INDEX_URL
ENV PIP_NO_CACHE_DIR=1

# gcc stays in the image: Triton compiles with it when it runs.
RUN apt-get update \
 && apt-get install --yes --no-install-recommends gcc libc6-dev make \
 && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/logitmix
# The wheels in a layer of their own, which changes of the code leave as it is.
COPY Makefile ./
COPY requirements requirements
RUN make .venv/locked-$ACCELERATOR ACCELERATOR=$ACCELERATOR

COPY . .
RUN make install ACCELERATOR=$ACCELERATOR

# What runs cannot change the code. Another user (-u) has the same home, for caches of what is compiled and fetched.
RUN useradd --create-home --uid 1000 logitmix \
 && install --directory --owner logitmix --mode 1777 /work /home/logitmix/.cache /home/logitmix/.triton
ENV PATH=/opt/logitmix/.venv/bin:$PATH HOME=/home/logitmix
USER logitmix
# Datasets and runs: mount a volume here, or name its folder with --data.path and --run.
WORKDIR /work
EXPOSE 8080
# Asks `logitmix serve` on its usual port. There is nothing to ask of other commands, which end by themselves.
HEALTHCHECK --start-period=60s CMD ! grep --quiet --null-data --line-regexp serve /proc/1/cmdline \
 || python -c "import urllib.request as u; u.urlopen('http://127.0.0.1:8080/healthz', timeout=5)"
CMD ["logitmix", "--help"]
