"""Requests that arrive together -> one batch, computed in a thread of its own, so that the event loop stays free."""

import asyncio
import math
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import accumulate, islice
from typing import Any

from logitmix.serving.connection import Connection
from logitmix.serving.request import Options, Request, of_one
from logitmix.serving.retriever import Retriever, Row

BATCH = 32
"""Most requests of a batch: as many as the Retriever ranks at once."""
ROWS = 2**16
"""Items that the requests of a batch ask for, at most, unless there is but one: a row takes half a kilobyte."""
QUEUE = 512
"""Most requests that wait."""


@dataclass(frozen=True)
class Question:
    """A request, and how it shall be answered."""

    request: Request
    options: Options

    @property
    def group(self) -> tuple[object, ...]:
        """Questions of a group are answered by one call. Their k's differ by less than a factor of 2, so that a large
        one does not slow the others down."""
        return self.options.k.bit_length(), replace(self.options, k=1)


@dataclass(frozen=True)
class Answer:
    rows: list[Row]
    retriever: Retriever
    """That which answered."""
    missing: Mapping[str, Any] = field(default_factory=dict)
    """What of the items it could not reach."""


class QueueFull(Exception):
    """More requests wait than a batcher holds."""


class ClientGone(Exception):
    """Nobody waits for the answer any more."""


@dataclass(frozen=True, eq=False)
class _Waiting:
    question: Question
    client: Connection | None
    answer: asyncio.Future[Answer]
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

    async def ask(self, question: Question, client: Connection | None = None) -> Answer:
        """Raises ValueError for a question that cannot be answered, whatever becomes of the others in its batch,
        QueueFull, and ClientGone."""
        if len(self._waiting) >= QUEUE:
            self._drop(lambda of: of.gone or of.half_closed)
        if len(self._waiting) >= QUEUE:
            raise QueueFull
        waiting = _Waiting(question, client, asyncio.get_running_loop().create_future())
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
                self._drop(lambda of: of.gone)
                if not self._waiting:
                    continue
                # Those who may be gone come last.
                self._waiting = deque(sorted(self._waiting, key=lambda of: bool(of.client and of.client.half_closed)))
                totals = accumulate(of.question.options.k for of in islice(self._waiting, BATCH))
                count = max(1, sum(total <= ROWS for total in totals))
                batch = [self._waiting.popleft() for _ in range(count)]
                size, retriever = len(batch), self._current()
                self._observe(size)
                questions = [of.question for of in batch]
                try:
                    found = await loop.run_in_executor(thread, answer, retriever, questions)
                except Exception as error:  # a bug, which each request of the batch reports
                    found = [error] * size
                for of, result in zip(batch, found, strict=True):
                    if of.answer.done():  # its client is gone
                        continue
                    if isinstance(result, Exception):
                        of.answer.set_exception(result)
                    else:
                        of.answer.set_result(result)

    def _drop(self, whose: Callable[[Connection], bool]) -> None:
        """Leaves out the questions of these clients."""
        kept = deque[_Waiting]()
        for of in self._waiting:
            if not (of.client and whose(of.client)):
                kept.append(of)
            elif not of.answer.done():
                of.answer.set_exception(ClientGone())
        self._waiting = kept

    async def _until(self, count: int) -> None:
        """Waits until that many questions wait."""
        while len(self._waiting) < count:
            self._arrived.clear()
            await self._arrived.wait()


def answer(retriever: Retriever, questions: Sequence[Question]) -> list[Answer | Exception]:
    """For each question its answer, or the ValueError that says why there is none."""
    groups: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for place, question in enumerate(questions):
        groups[question.group].append(place)
    found: dict[int, Answer | Exception] = {}
    for places in groups.values():
        found |= zip(places, _of_group(retriever, [questions[at] for at in places]), strict=True)
    return [found[place] for place in range(len(questions))]


def _of_group(retriever: Retriever, questions: Sequence[Question]) -> Sequence[Answer | Exception]:
    try:
        return _together(retriever, questions)
    except ValueError:
        problems = retriever.problems([of.request for of in questions], questions[0].options)
    good = [of for of, problem in zip(questions, problems, strict=True) if problem is None]
    answers = iter(_together(retriever, good) if good else ())
    return [next(answers) if problem is None else ValueError(of_one(problem)) for problem in problems]


def _together(retriever: Retriever, questions: Sequence[Question]) -> list[Answer | Exception]:
    options = replace(questions[0].options, k=max(of.options.k for of in questions))
    found = retriever.answer([of.request for of in questions], options)
    missing = retriever.missing
    return [
        Answer(rows[: of.options.k], retriever, missing)
        if all(math.isfinite(row["score"]) for row in rows[: of.options.k])
        else ValueError("the request's scores are not finite: a number among its features is too large")
        for of, rows in zip(questions, found, strict=True)
    ]
