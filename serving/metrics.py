"""What GET /metrics shows, besides memory, CPU time and open files of the process."""

import os
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, ProcessCollector
from prometheus_client import generate_latest as prometheus_text
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families as families_of
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from logitmix.serving.batcher import BATCH
from logitmix.serving.live import LiveExport
from logitmix.serving.retriever import Retriever

PATHS = ("/", "/docs", "/healthz", "/items", "/metrics", "/openapi.json", "/readyz", "/retrieve", "/shadow")
VERSION = version("logitmix")
SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)
"""Buckets of times."""


def identity(of: Retriever) -> dict[str, str | int]:
    """What an answer came from."""
    return {**vars(of.source), "digest": of.digest, "delta": of.delta, "logitmix": VERSION}


class Metrics:
    def __init__(self, export: LiveExport, waiting: Callable[[], int]) -> None:
        self._export = export
        self.registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        self.requests = Counter("logitmix_requests", "Requests.", ["path", "status"], registry=registry)
        self.seconds = Histogram(
            "logitmix_retrieve_seconds",
            "Time from the head of a request to /retrieve to the end of its answer.",
            buckets=SECONDS,
            registry=registry,
        )
        sizes = [2**power for power in range(BATCH.bit_length())]
        self.batch = Histogram("logitmix_batch_requests", "Requests of a batch.", buckets=sizes, registry=registry)
        self.reloads = Counter("logitmix_reloads", "New exports that took over.", registry=registry)

        for name, meaning, read in (
            ("queue_requests", "Requests that wait for a batch.", waiting),
            ("export_step", "Step of the checkpoint that answers.", lambda: export.retriever.source.step),
            ("export_items", "Items of the export that answers.", lambda: export.retriever.num_items),
            ("export_delta", "Number of the last delta in it.", lambda: export.retriever.delta),
            ("shards_missing", "Shards out of reach.", lambda: len(export.missing.get("missing_shards", ()))),
            ("deltas_refused", "Whether there are deltas that are not applied.", lambda: bool(export.refused)),
        ):
            Gauge(f"logitmix_{name}", meaning, registry=registry).set_function(read)
        self._identity = Info("logitmix_export", "What answers.", registry=registry)
        self.identify()

    def identify(self) -> None:
        """To be called when another export answers."""
        self._identity.info({name: str(value) for name, value in identity(self._export.retriever).items()})


def leave_metrics(folder: Path, registry: CollectorRegistry) -> None:
    """Writes the metrics of this worker for the others."""
    file = folder / f"{os.getpid()}.prom"
    with suppress(OSError):  # they do without, and this one goes on
        file.with_suffix(".part").write_bytes(prometheus_text(registry))
        file.with_suffix(".part").replace(file)


class OfWorkers(Collector):
    """The metrics of all workers, with a label that has their process: those of the others as they have left them."""

    def __init__(self, folder: Path, own: CollectorRegistry) -> None:
        leave_metrics(folder, own)
        self._texts = {}
        for file in folder.glob("*.prom"):
            with suppress(FileNotFoundError):  # that worker has just ended
                self._texts[file.stem] = file.read_text()

    def collect(self) -> Iterable[Metric]:
        families: dict[str, Metric] = {}
        for process, text in sorted(self._texts.items()):
            for found in families_of(text):
                family = families.setdefault(found.name, Metric(found.name, found.documentation, found.type))
                for sample in found.samples:
                    family.samples.append(sample._replace(labels={**sample.labels, "worker": process}))
        return families.values()


class Counting:
    """Counts and times requests."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self.app, self.metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        status, start = 500, time.perf_counter()

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        path = scope["path"] if scope["path"] in PATHS else "other"
        try:
            await self.app(scope, receive, sending)
        finally:
            self.metrics.requests.labels(path, status).inc()
            if path == "/retrieve":
                self.metrics.seconds.observe(time.perf_counter() - start)
