"""`logitmix serve --shard I/N` and `serve --shards`: processes that each rank a part of an export's items, and a front
that encodes requests, asks all of them and merges what they find. Any of them may be gone, and come back.

A front and a shard exchange messages over TCP: JSON, and safetensors for what is large. The front greets with the
token, the shard says which it is. Then the front sends a task, in which conditions are bits of the items that they
allow, or, each second, a question whether the shard has the export that answers. To a task the shard answers with the
keys (topk.py) of its best items; in two stages it first sends those of its stage 1's candidates, and the front returns
the least key that is among the best k' of all.

Axes: B queries, N keys of each.
"""

import json
import math
import socket
import struct
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from copy import copy
from dataclasses import asdict, dataclass
from hmac import compare_digest
from importlib.metadata import version
from threading import Event, Thread
from typing import Any, TypeVar

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.numpy import load as load_arrays
from safetensors.numpy import save as save_arrays
from torch import Tensor

from logitmix.common.files import from_json
from logitmix.common.mappings import require
from logitmix.modules.towers import Sides
from logitmix.serving.expression import Allowed
from logitmix.serving.group import Group
from logitmix.serving.live import POLL_SECONDS, LiveExport
from logitmix.serving.mapped import WrittenInPlace
from logitmix.serving.ranking import Task
from logitmix.serving.request import Options
from logitmix.serving.topk import least_key

T = TypeVar("T")
VERSION = version("logitmix")
PAUSE, LONGEST_PAUSE = 1.0, 60.0
"""Seconds before a shard is asked again that has not answered in time; twice as many each time that it does not."""
SILENT = 60.0
"""Seconds without a word of a front after which a shard closes the connection."""
GREETING_SECONDS = 10.0
MOST_FRONTS = 64
MOST_SECONDS = 3600
LAST_SECONDS = 3.0
"""Time for a shard's connections to end, each after the next word of its front."""
_HEAD = struct.Struct(">II")
"""Before a message: the bytes of its JSON and of its arrays."""
_MOST_OF_GREETING = 2**14


class ShardsLost(ConnectionError):
    """Shards without which no answer is given do not answer."""


def framed(message: Mapping[str, Any]) -> bytes:
    """A message of None, numbers, texts, lists, mappings, arrays and tensors (on the CPU)."""
    arrays: dict[str, np.ndarray] = {}
    text = json.dumps(_packed(message, arrays)).encode()
    body = save_arrays(arrays) if arrays else b""
    return _HEAD.pack(len(text), len(body)) + text + body


def _packed(value: Any, arrays: dict[str, np.ndarray]) -> Any:
    if isinstance(value, list) and value and all(type(of) is int for of in value):
        kind, array = "ints", np.array(value, np.int64)
    elif isinstance(value, Tensor):
        kind, array = "tensor", value.numpy()
    elif isinstance(value, np.ndarray):
        kind, array = "array", value
    elif isinstance(value, Mapping):
        return {"of": {name: _packed(of, arrays) for name, of in value.items()}}
    elif isinstance(value, list | tuple):
        return [_packed(of, arrays) for of in value]
    else:
        return value
    arrays[str(len(arrays))] = np.ascontiguousarray(array)
    return {kind: str(len(arrays) - 1)}


def _unpacked(value: Any, arrays: Mapping[str, np.ndarray]) -> Any:
    if isinstance(value, list):
        return [_unpacked(of, arrays) for of in value]
    if not isinstance(value, dict):
        return value
    ((kind, of),) = value.items()
    if kind == "of":
        return {name: _unpacked(one, arrays) for name, one in of.items()}
    array = arrays[of]
    return array.tolist() if kind == "ints" else torch.from_numpy(array) if kind == "tensor" else array


class Line:
    """One end of a connection. All its methods raise TimeoutError, or another OSError once the other end is gone."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, message: bytes | Mapping[str, Any], seconds: float) -> None:
        """A message, which may be framed."""
        self._end.settimeout(seconds)
        self._end.sendall(message if isinstance(message, bytes) else framed(message))

    def receive(self, seconds: float, most: float = math.inf) -> dict[str, Any]:
        """The next message. ValueError for what is none, or one of more than so many bytes."""
        until = time.monotonic() + seconds
        text, body = _HEAD.unpack(self._read(_HEAD.size, until))
        if text + body > most:
            raise ValueError("it is no front or shard of logitmix")
        try:
            said = from_json(bytes(self._read(text, until)))
            found = _unpacked(said, load_arrays(bytes(self._read(body, until))) if body else {})
        except (KeyError, TypeError, SafetensorError) as error:
            raise ValueError(f"a message is damaged: {error}") from None
        if not isinstance(found, dict):
            raise ValueError("a message is damaged")
        return found

    def _read(self, count: int, until: float) -> bytearray:
        content, at = bytearray(count), 0
        while at < count:
            left = until - time.monotonic()
            if left <= 0:
                raise TimeoutError
            self._end.settimeout(left)
            received = self._end.recv_into(memoryview(content)[at:])
            if not received:
                raise ConnectionError("its connection was closed")
            at += received
        return content

    def close(self) -> None:
        self._end.close()


@dataclass(eq=False)
class _Place:
    """A shard, as a front sees it."""

    name: str
    address: tuple[str, int]
    line: Line | None = None
    problem: str = ""
    """Why its items are missing."""
    newest: str = ""
    """The digest of the export that it read last."""
    pause: float = PAUSE
    due: float = 0.0
    """When it is greeted again."""


class Front(Group):
    """The shards, as the process sees them that asks them and has no items of its own."""

    alone = False
    checked = (0, 1)
    has_shards = True

    def __init__(
        self,
        addresses: Sequence[str],
        say: Callable[[str], object],
        allow_partial: bool = False,
        seconds: float = 5.0,
        token: str = "",
    ) -> None:
        """`addresses`: HOST:PORT of each shard in their order. `seconds`: how long a shard may take for an answer, or
        for a stage of it. With `allow_partial`, there are answers without the items of shards that are missing.
        ValueError for what is impossible."""
        super().__init__()
        require(0 < seconds <= MOST_SECONDS, "--shard-seconds", seconds, f"above 0 and at most {MOST_SECONDS}")
        self.size = len(addresses)
        self._say, self._allow_partial, self._seconds, self._token = say, allow_partial, seconds, token
        self._places = [
            _Place(f"shard {number}/{self.size} at {address}", _address(address))
            for number, address in enumerate(addresses, 1)
        ]
        # Greetings must not keep those waiting who are asked.
        self._pool = ThreadPoolExecutor(2 * self.size, thread_name_prefix="shards")
        self._asked: list[_Place] = []
        """Those that take part in what is asked now."""

    def part(self, whole: range) -> range:
        return whole[:0]

    @property
    def missing(self) -> tuple[int, ...]:
        return tuple(at for at, of in enumerate(self._places) if of.line is None or of.problem)

    @property
    def refusal(self) -> str:
        return self._refusal(self.missing)

    def first(self, action: Callable[[], T]) -> T:
        """Sends the task that `action` makes to all shards. ShardsLost without those that it takes."""
        if refusal := self._refusal([at for at, of in enumerate(self._places) if of.line is None]):
            raise ShardsLost(refusal)
        task = action()
        assert isinstance(task, Task)
        query = [list(of) if of else None for of in task.query]
        masks = [None, *dict.fromkeys(of for of in task.may or () if of)]
        may = {"bits": [of.bits for of in masks[1:] if of], "of": [masks.index(of) for of in task.may or ()]}
        message = framed({"task": {**vars(task), "query": query, "options": asdict(task.options), "may": may}})
        self._asked = [of for of in self._places if of.line]
        self._each(lambda line: line.send(message, self._seconds))
        return task

    @contextmanager
    def in_step(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            for place in self._asked:
                self._lose(place, "an answer was broken off")
            raise
        for place in self._asked:
            place.pause = PAUSE
            self._note(place, "")
        missed = [at for at, of in enumerate(self._places) if of not in self._asked]
        self.missed = tuple(sorted({*self.missed, *missed}))
        if refusal := self._refusal(missed):
            raise ShardsLost(refusal)

    def gather(self, keys_BN: Tensor, width: int) -> Tensor:
        return torch.cat([keys_BN, *self._keys(len(keys_BN))], dim=1)

    def least(self, keys_BN: Tensor, kept: int, widest: int) -> Tensor:
        least_B = least_key(self.gather(keys_BN, kept), kept)
        message = framed({"least": least_B})
        self._each(lambda line: line.send(message, self._seconds))
        return least_B

    def look_after(self, digest: str) -> None:
        absent = [of for of in self._places if of.line is None and time.monotonic() >= of.due]
        greeted = list(self._pool.map(self._greeted, absent))
        with self.turn:
            for place, line in zip(absent, greeted, strict=True):
                if isinstance(line, Line):
                    place.line = line
                else:
                    self._note(place, line)
            self._asked = [of for of in self._places if of.line]

            def has(line: Line) -> dict[str, Any]:
                line.send({"digest": digest}, self._seconds)
                return line.receive(self._seconds)

            for place, said in self._each(has):
                place.newest = str(said.get("newest"))
                self._note(place, str(said.get("problem", "")))

    def all_have(self, digest: str) -> bool:
        return all(of.newest == digest for of in self._places if of.line)

    def close(self) -> None:
        with self.turn:
            for line in [of.line for of in self._places if of.line]:
                line.close()
        self._pool.shutdown()

    def _keys(self, B: int) -> list[Tensor]:
        until, found = time.monotonic() + self._seconds, []
        for place, said in self._each(lambda line: line.receive(until - time.monotonic())):
            keys_BN = said.get("keys")
            if isinstance(keys_BN, Tensor) and keys_BN.dtype == torch.int64 and keys_BN.shape[:-1] == (B,):
                found.append(keys_BN)
            elif place in self._asked:
                self._lose(place, str(said.get("problem") or "it answered something else"), "problem" in said)
        return found

    def _each(self, action: Callable[[Line], T]) -> list[tuple[_Place, T]]:
        """What comes of this for each that takes part; those that fail take no part from then on."""

        def of(place: _Place) -> T | Exception:
            assert place.line
            try:
                return action(place.line)
            except (OSError, ValueError) as error:
                return error

        found: list[tuple[_Place, T]] = []
        for place, result in zip(list(self._asked), list(self._pool.map(of, self._asked)), strict=True):
            if not isinstance(result, Exception):
                found.append((place, result))
                continue
            if isinstance(result, TimeoutError):
                place.due = time.monotonic() + place.pause
                place.pause = min(2 * place.pause, LONGEST_PAUSE)
            self._lose(place, self._why(result))
        return found

    def _greeted(self, place: _Place) -> Line | str:
        """A line to it, or why there is none."""
        try:
            line = Line(socket.create_connection(place.address, self._seconds))
        except (OSError, UnicodeError) as error:
            return self._why(error)
        try:
            line.send({"token": self._token, "logitmix": VERSION}, self._seconds)
            said = line.receive(self._seconds, _MOST_OF_GREETING)
            problem = str(said.get("problem", ""))
            number = self._places.index(place)
            if not problem and said.get("shard") != [number, self.size]:
                own, count = said["shard"]
                problem = f"it is shard {own + 1}/{count}; give --shards in their order, and all of them"
        except (OSError, ValueError, KeyError, TypeError) as error:
            problem = self._why(error)
        if not problem:
            return line
        line.close()
        return problem

    def _lose(self, place: _Place, problem: str, in_step: bool = False) -> None:
        """One that takes no part any more; its line is kept where both still are in step."""
        if place.line and not in_step:
            place.line.close()
            place.line = None
        self._asked = [of for of in self._asked if of is not place]
        self._note(place, problem)

    def _note(self, place: _Place, problem: str) -> None:
        if problem != place.problem:
            self._say(f"{place.name} is missing: {problem}" if problem else f"{place.name} answers")
        place.problem = problem

    def _why(self, error: Exception) -> str:
        if isinstance(error, TimeoutError):
            return f"no answer within {self._seconds:g} s"
        return getattr(error, "strerror", None) or str(error) or type(error).__name__

    def _refusal(self, missing: Sequence[int]) -> str:
        """Why there are no answers without these; empty if there are."""
        if not missing or (self._allow_partial and len(missing) < self.size):
            return ""
        return "; ".join(f"{self._places[at].name} is missing: {self._places[at].problem}" for at in missing)


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.strip().rpartition(":")
    if not (host and port.isascii() and port.isdecimal() and 0 < int(port) < 2**16):
        raise ValueError(f"--shards has {text!r}; each shard is HOST:PORT, and commas are between them")
    return host.removeprefix("[").removesuffix("]"), int(port)


class Shard(Group):
    """A process that ranks a part of the items, and the line to the front that asks."""

    alone = False

    def __init__(self, number: int, count: int) -> None:
        super().__init__()
        self.rank, self.size = number, count
        self._line: Line | None = None

    @classmethod
    def parse(cls, text: str) -> "Shard":
        """From I/N. ValueError for anything else."""
        number, _, count = text.partition("/")
        if not (number.isascii() and number.isdecimal() and count.isascii() and count.isdecimal()):
            raise ValueError(f"--shard is {text!r}; it must be I/N, such as 1/3")
        require(1 <= int(number) <= int(count), "--shard", text, "from 1/N to N/N")
        return cls(int(number) - 1, int(count))

    def at(self, line: Line) -> "Shard":
        """This one, for one front."""
        found = copy(self)
        found._line = line
        return found

    def gather(self, keys_BN: Tensor, width: int) -> Tensor:
        with self._aside() as line:
            line.send({"keys": keys_BN.cpu()}, SILENT)
        return keys_BN

    def least(self, keys_BN: Tensor, kept: int, widest: int) -> Tensor:
        with self._aside() as line:
            line.send({"keys": keys_BN.cpu()}, SILENT)
            least_B = line.receive(SILENT)["least"]
        assert isinstance(least_B, Tensor)
        return least_B.to(keys_BN.device)

    @contextmanager
    def _aside(self) -> Iterator[Line]:
        """Others have their turn while this one waits for its front."""
        assert self._line
        self.turn.release()
        try:
            yield self._line
        finally:
            self.turn.acquire()


class ShardServer:
    """Answers fronts with a part of the items of an export."""

    def __init__(self, export: LiveExport, shard: Shard, token: str = "") -> None:
        self.export, self._shard, self._token = export, shard, token
        self.ended = Event()
        self._lines: dict[Thread, socket.socket] = {}

    def run(self, listening: socket.socket) -> None:
        """Until `ended` is set."""
        listening.settimeout(0.1)
        Thread(target=self._watch, daemon=True).start()
        while not self.ended.is_set():
            with suppress(OSError):  # nobody has come, the front is gone, or too many files are open
                end, _ = listening.accept()
                self._lines = {of: line for of, line in self._lines.items() if of.is_alive()}
                if len(self._lines) >= MOST_FRONTS:
                    end.close()
                    continue
                thread = Thread(target=self._serve, args=[end], daemon=True)
                self._lines[thread] = end
                thread.start()
        listening.close()
        until = time.monotonic() + LAST_SECONDS
        for thread, end in self._lines.items():
            thread.join(max(0.0, until - time.monotonic()))
            with suppress(OSError):  # it has ended
                end.shutdown(socket.SHUT_RDWR)
        self.export.release()

    def _watch(self) -> None:
        while not self.ended.wait(POLL_SECONDS):
            self.export.refresh()

    def _serve(self, end: socket.socket) -> None:
        with end, suppress(OSError, ValueError):  # the front says what it misses, and greets again
            line, retriever = Line(end), self.export.retriever
            problem = self._refused(line.receive(GREETING_SECONDS, _MOST_OF_GREETING))
            place = {"problem": problem} if problem else {"shard": [self._shard.rank, self._shard.size]}
            line.send(place, GREETING_SECONDS)
            while not (problem or self.ended.is_set()):
                said = line.receive(SILENT)
                task, newest = said.get("task"), self.export.retriever
                # The old one goes on for a front that has not read the new one yet.
                if retriever.digest != (digest := task["digest"] if task else said.get("digest")):
                    retriever = newest
                answer = {"newest": newest.digest}
                try:
                    retriever.files.check()
                    if retriever.digest != digest:
                        answer["problem"] = "it has another export"
                    elif task:
                        with self._shard.turn:
                            retriever.take_part(_task_of(task, retriever.num_items), self._shard.at(line))
                        continue
                except WrittenInPlace as error:
                    answer["problem"] = str(error)
                line.send(answer, SILENT)

    def _refused(self, greeting: Mapping[str, Any]) -> str:
        """Why a front is not answered; empty if it is."""
        if not compare_digest(str(greeting.get("token")).encode(), self._token.encode()):
            return "it has another token; give both the same --token-file"
        if (other := greeting.get("logitmix")) != VERSION:
            return f"it is of logitmix {VERSION}, and this is {other!s:.40}"
        return ""


def _task_of(said: dict[str, Any], num_items: int) -> Task:
    similarity, hindexer = said["query"]
    masks = [None, *(Allowed(bits, num_items) for bits in said["may"]["bits"])]
    may = [masks[of] for of in said["may"]["of"]]
    query = Sides(tuple(similarity), None if hindexer is None else tuple(hindexer))
    return Task(**{**said, "query": query, "may": may, "options": Options(**said["options"])})
