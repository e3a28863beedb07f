# docker build -t logitmix .                                  the CPU alone
# docker build -t logitmix --build-arg ACCELERATOR=cuda .     NVIDIA GPUs; run it with --gpus all
#
# On CPU, --build-arg PIP_EXTRA_INDEX_URL=… with an index of CPU wheels makes the image 5 GB smaller.
FROM python:3.11-slim

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

ENV PATH=/opt/logitmix/.venv/bin:$PATH
# Datasets and runs: mount a volume here, or name its folder with --data.path and --run.
WORKDIR /work
CMD ["logitmix", "--help"]
