"""`serve A --shadow B`: B answers a share of the requests after A has, for the metrics, and those to /shadow."""

import asyncio
import random
from time import perf_counter

from prometheus_client import CollectorRegistry, Counter, Histogram

from logitmix.serving.batcher import Batcher, QueueFull
from logitmix.serving.live import LiveExport
from logitmix.serving.metrics import SECONDS
from logitmix.serving.request import Question
from logitmix.serving.retriever import Answer

CUTOFFS = (1, 10, 100)
"""The agreement is that of so many first items, where a request asks for as many."""
MOST = 32
"""Requests that wait for the shadow; further ones are left out, so that it falls behind by no more."""


class Shadow:
    def __init__(self, export: LiveExport, share: float, wait: float, registry: CollectorRegistry) -> None:
        """`share` of the requests are compared; each waits `wait` seconds for others at most."""
        self.export, self._share, self._tasks = export, share, set[asyncio.Task[None]]()
        self.batcher = Batcher(lambda: export.retriever, wait, lambda _: None)
        self._agreement = Histogram(
            "logitmix_shadow_agreement",
            "Share of the first items that the shadow has among its first as many.",
            ["at"],
            buckets=[tenth / 10 for tenth in range(11)],
            registry=registry,
        )
        self._seconds = Histogram(
            "logitmix_answer_seconds",
            "Time from a question to its answer, of those that were compared.",
            ["export"],
            buckets=SECONDS,
            registry=registry,
        )
        self._left_out = Counter("logitmix_shadow_left_out", "Requests that found the shadow busy.", registry=registry)
        self._failures = Counter("logitmix_shadow_failures", "Requests that it cannot answer.", registry=registry)

    def compare(self, question: Question, answer: Answer, seconds: float) -> None:
        """Lets the shadow answer too, if it is this question's turn; returns at once. `seconds`: what the answer
        took."""
        if random.random() >= self._share:
            return
        if len(self._tasks) >= MOST:
            self._left_out.inc()
            return
        task = asyncio.create_task(self._compare(question, answer, seconds))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _compare(self, question: Question, answer: Answer, seconds: float) -> None:
        start = perf_counter()
        try:
            found, _ = await self.batcher.ask(question)
        except QueueFull:
            found = {"error": "more requests wait than the shadow holds"}
        if "error" in found:  # such as for features or options that this export does not have
            self._failures.inc()
            return
        self._seconds.labels("served").observe(seconds)
        self._seconds.labels("shadow").observe(perf_counter() - start)
        for at in CUTOFFS:
            if at <= question.options.k and answer["items"]:
                first, other = ({row["id"] for row in of["items"][:at]} for of in (answer, found))
                self._agreement.labels(str(at)).observe(len(first & other) / len(first))
