# docker build -t logitmix .                                  the CPU alone
# docker build -t logitmix --build-arg ACCELERATOR=cuda .     NVIDIA GPUs; run it with --gpus all
# docker run -v "$PWD:/work" -u "$(id -u)" logitmix logitmix train ...
# docker run -v "$PWD:/work" -p 8080:8080 logitmix logitmix serve exports/demo-mol --host 0.0.0.0
#
# On CPU, --build-arg PIP_EXTRA_INDEX_URL=… with an index of CPU wheels makes the image 5 GB smaller.
#
# docker build -t logitmix-serve --target serve .             serving alone, without compilers and training
# docker run --read-only --tmpfs /tmp -v "$PWD/exports:/exports:ro" -p 8080:8080 logitmix-serve demo-mol
#
# --build-arg TORCH=cuda takes the public torch for it, where there is no index of CPU wheels.
FROM python:3.11.15-slim-trixie@sha256:90744cff8f32887f075c47d747a173ff333e9e98801667af93c357fa9f5e28ff AS python
# Asks `logitmix serve` on its usual port, and no proxy of the environment. With --tls-client-ca, docker run
# --no-healthcheck.
ENV HEALTH="import ssl, urllib.request as u; s = 's' * (b'--tls-key' in open('/proc/1/cmdline', 'rb').read()); \
u.build_opener(u.ProxyHandler({}), u.HTTPSHandler(context=ssl._create_unverified_context())) \
.open(f'http{s}://127.0.0.1:8080/healthz', timeout=5)"

FROM python AS serve-build
ARG TORCH=cpu
ARG PIP_EXTRA_INDEX_URL
ENV PIP_NO_CACHE_DIR=1
RUN apt-get update \
 && apt-get install --yes --no-install-recommends gcc libc6-dev
WORKDIR /opt/logitmix
# The packages in a layer of their own, which changes of the code leave as it is.
COPY requirements requirements
RUN python -m venv --without-pip /opt/serve \
 && pip --python /opt/serve install --no-deps --require-hashes \
    --requirement requirements/torch-$TORCH.txt --requirement requirements/serve.txt
COPY . .
RUN pip --python /opt/serve install --no-deps --no-build-isolation --prefix /opt/code .

FROM python AS serve
RUN useradd --no-create-home --uid 1000 logitmix
COPY --from=serve-build /opt/serve /opt/serve
COPY --from=serve-build /opt/code /opt/serve
# Imports what serves, for the bytecode of the standard library: the base has none of it, and user 1000 can write none.
RUN /opt/serve/bin/python -c "import ssl, urllib.request, logitmix.serving.server, logitmix.trainer.commands.serve"
ENV PATH=/opt/serve/bin:$PATH PYTHONDONTWRITEBYTECODE=1
USER 1000
WORKDIR /exports
EXPOSE 8080
HEALTHCHECK --start-period=60s CMD python -c "$HEALTH"
ENTRYPOINT ["logitmix", "serve", "--host", "0.0.0.0"]

FROM python
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
# --old-file: COPY has made the lists newer than what was installed from them.
RUN make install ACCELERATOR=$ACCELERATOR --old-file=.venv/locked-$ACCELERATOR

# What runs cannot change the code. Another user (-u) has the same home, for caches of what is compiled and fetched.
RUN useradd --create-home --uid 1000 logitmix \
 && chmod 755 /home/logitmix \
 && install --directory --owner logitmix --mode 1777 /work /home/logitmix/.cache /home/logitmix/.triton
ENV PATH=/opt/logitmix/.venv/bin:$PATH HOME=/home/logitmix
USER logitmix
# Datasets and runs: mount a volume here, or name its folder with --data.path and --run.
WORKDIR /work
EXPOSE 8080
# There is nothing to ask of other commands, which end by themselves.
HEALTHCHECK --start-period=60s CMD ! grep --quiet --null-data --line-regexp serve /proc/1/cmdline || python -c "$HEALTH"
CMD ["logitmix", "--help"]
