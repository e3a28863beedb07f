"""Requests that arrive together -> one batch, computed in a thread of its own, so that the event loop stays free."""

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import accumulate, islice
from typing import NamedTuple

from logitmix.serving.request import Question
from logitmix.serving.retriever import Answer, Retriever

BATCH = 32
"""Most requests of a batch: as many as the Retriever ranks at once."""
ROWS = 2**16
"""Items that the requests of a batch ask for, at most, unless there is but one: a row takes half a kilobyte."""
QUEUE = 512
"""Most requests that wait."""


class Answered(NamedTuple):
    """An answer, and the retriever that gave it."""

    answer: Answer
    retriever: Retriever


class QueueFull(Exception):
    """More requests wait than a batcher holds."""


class ClientGone(Exception):
    """Nobody waits for the answer any more."""


@dataclass(frozen=True, eq=False)
class _Waiting:
    question: Question
    gone: Callable[[], bool]
    answer: asyncio.Future[Answered]
    since: float = field(default_factory=lambda: asyncio.get_running_loop().time())


class Batcher:
    """Answers questions in batches, one at a time.

    A batch begins when the one before it has ended and as many questions wait as it had, or the oldest one has waited
    for `wait` seconds. So with one client nobody waits for others, and with many the batches grow to their number.
    """

    def __init__(self, current: Callable[[], Retriever], wait: float, observe: Callable[[int], object]) -> None:
        """`current` is asked before each batch for the retriever that answers it; `observe` is told its size."""
        self._current, self._wait, self._observe = current, wait, observe
        self._waiting: deque[_Waiting] = deque()
        self._arrived = asyncio.Event()

    def __len__(self) -> int:
        """Questions that wait."""
        return len(self._waiting)

    async def ask(self, question: Question, gone: Callable[[], bool] = lambda: False) -> Answered:
        """Returns the answer to a question, once its batch is answered.

        Args:
            question: What is asked.
            gone: Says whether the client has closed its connection, so that nobody waits for the answer.

        Raises:
            QueueFull: Too many questions are waiting.
            ClientGone: The client has closed its connection.
        """
        if len(self._waiting) >= QUEUE:
            self._drop_those_gone()
        if len(self._waiting) >= QUEUE:
            raise QueueFull
        waiting = _Waiting(question, gone, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        self._arrived.set()
        return await waiting.answer

    async def run(self) -> None:
        """Answers until it is canceled."""
        size, loop = 1, asyncio.get_running_loop()
        with ThreadPoolExecutor(1, thread_name_prefix="retriever") as thread:
            while True:
                await self._until(1)
                try:
                    async with asyncio.timeout_at(self._waiting[0].since + self._wait):
                        await self._until(size)
                except TimeoutError:
                    pass
                self._drop_those_gone()
                if not self._waiting:
                    continue
                totals = accumulate(of.question.options.k for of in islice(self._waiting, BATCH))
                count = max(1, sum(total <= ROWS for total in totals))
                batch = [self._waiting.popleft() for _ in range(count)]
                size, retriever = len(batch), self._current()
                self._observe(size)
                questions = [of.question for of in batch]
                # Clients may go meanwhile.
                try:
                    answers = await loop.run_in_executor(thread, retriever.answer, questions)
                except Exception as error:  # a bug, or shards that are gone: each request of the batch reports it
                    for of in batch:
                        if not of.answer.done():
                            of.answer.set_exception(error)
                else:
                    for of, found in zip(batch, answers, strict=True):
                        if not of.answer.done():
                            of.answer.set_result(Answered(found, retriever))

    def _drop_those_gone(self) -> None:
        for waiting in [waiting for waiting in self._waiting if waiting.gone()]:
            self._waiting.remove(waiting)
            if not waiting.answer.done():
                waiting.answer.set_exception(ClientGone())

    async def _until(self, count: int) -> None:
        """Waits until that many questions wait."""
        while len(self._waiting) < count:
            self._arrived.clear()
            await self._arrived.wait()
