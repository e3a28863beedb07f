"""`serve run logitmix.serving.cluster:build`: an export over several machines, on Ray Serve. For each shard there is a
deployment that ranks a part of the items. The front answers over HTTP: it encodes requests, asks all shards and merges
what they find. Any shard may be gone, and come back: Ray Serve starts it again.

For each batch the front calls the shards twice. Stage 1 returns the keys (topk.py) of a shard's candidates. Those that
are among the best k' of all shards go back to it, and stage 2 returns the keys of its best items. So a shard keeps
nothing between the calls.

Axes: B queries, N keys of each.
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from threading import Lock, Thread
from typing import TYPE_CHECKING, Any, Literal

import torch
from fastapi import FastAPI
from torch import Tensor

from logitmix.common.mappings import from_mapping, require
from logitmix.common.plugins import load_plugins
from logitmix.common.storage import path_of
from logitmix.serving.group import Group, ShardsLost
from logitmix.serving.live import POLL_SECONDS, LiveExport
from logitmix.serving.ranking import Task, at_least
from logitmix.serving.retriever import Retriever
from logitmix.serving.server import make_app, say_of
from logitmix.serving.settings import Settings
from logitmix.serving.topk import least_key
from logitmix.serving.workers import say

if TYPE_CHECKING:
    from ray.serve import Application
    from ray.serve.handle import DeploymentHandle


@dataclass(frozen=True, kw_only=True)
class Arguments(Settings):
    """What the configuration of the application has as `args`."""

    directory: str
    """Serving directory, at an absolute path that all nodes have or at a URL."""
    shards: int
    """Parts into which the items are divided, each with a deployment of its own."""
    allow_partial: bool = False
    """Answer without the items of shards that are missing, and say so; 503 otherwise."""
    shard_seconds: float = 5.0
    """Seconds for a shard to answer, after which it is missing."""
    cpus: float = 1.0
    """Cores of each shard, and of the front; the configuration's `deployments` may say otherwise."""
    plugins: tuple[str, ...] = ()
    """Plugins that the export needs, as `logitmix --import` takes them."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.shards >= 1, "shards", self.shards, "at least 1")
        require(self.shard_seconds > 0, "shard_seconds", self.shard_seconds, "above 0")
        require(self.cpus >= 0, "cpus", self.cpus, "at least 0")

    def export(self, group: Group, who: str) -> LiveExport:
        """Reads the export. ValueError if there is no intact one."""
        load_plugins(self.plugins, "plugins")
        saying = partial(say_of, say, who)
        return LiveExport(path_of(self.directory), saying, group, self.deltas_path, *self.conditions)


class Shard:
    """Ranks a part of the items for fronts."""

    def __init__(self, arguments: Arguments, number: int) -> None:
        self._turn = Lock()
        self._export = arguments.export(Group(number, arguments.shards), f"shard {number + 1}/{arguments.shards}")
        self._former = self._export.retriever
        Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while True:
            time.sleep(POLL_SECONDS)
            self.look()

    def look(self) -> None:
        """Reads an export that was published since the last look."""
        answering = self._export.retriever
        if self._export.refresh():
            self._former = answering

    def _of(self, digest: str) -> Retriever:
        """Returns the retriever of the export with this digest: the last one, or the one before for a front that has
        not read the last one yet. ValueError for any other, and OSError if a file of it has been written to."""
        for retriever in (self._export.retriever, self._former):
            if retriever.digest == digest:
                retriever.files.check()
                return retriever
        raise ValueError("it has another export")

    async def status(self, digest: str) -> tuple[str, str]:
        """Returns the digest of the export that was read last, and why there are no answers from the one with the given
        digest; "" if there are."""
        newest, problem = self._export.retriever.digest, ""
        try:
            self._of(digest)
        except (OSError, ValueError) as error:
            problem = str(error)
        return newest, problem

    async def rank(self, stage: Literal["stage_1", "stage_2"], task: Task, *keys_BN: Tensor | None) -> Tensor | None:
        """Returns what a stage of the Ranker, "stage_1" or "stage_2", finds among this shard's part of the items."""

        def ranked() -> Tensor | None:
            with self._turn:
                found: Tensor | None = getattr(self._of(task.digest), stage)(task, *keys_BN)
                return found

        return await asyncio.to_thread(ranked)


class Shards(Group):
    """The shards, as a front sees them, which has no items of its own."""

    asks_shards = True

    def __init__(
        self, shards: "Sequence[DeploymentHandle]", say: Callable[[str], object], seconds: float, allow_partial: bool
    ) -> None:
        """Makes a group of shards.

        Args:
            shards: Handles of the shards' deployments, in the order of their parts.
            say: What is told of shards that go missing and come back.
            seconds: How long a shard may take for a stage of an answer.
            allow_partial: Whether there are answers without the items of shards that are missing.
        """
        super().__init__(size=len(shards))
        self._shards, self._say, self._seconds, self._allow_partial = shards, say, seconds, allow_partial
        self._newest = [""] * len(shards)
        """By shard, the digest of the export that it read last."""
        self._problems = [""] * len(shards)
        """By shard, why its items are missing."""

    def part(self, whole: range) -> range:
        return whole[:0]

    @property
    def missing(self) -> list[int]:  # type: ignore[override]
        return [number for number, problem in enumerate(self._problems) if problem]

    @property
    def refusal(self) -> str:  # type: ignore[override]
        missing = self.missing
        if self._allow_partial and len(missing) < self.size:
            return ""
        return "; ".join(f"{self._name(number)} is missing: {self._problems[number]}" for number in missing)

    def best(self, task: Task, kept: int | None, k: int) -> Tensor:
        """Returns keys [B, k] of the best items of all shards, or of those that answer if that is allowed. Raises
        ShardsLost otherwise.

        Args:
            task: What is asked.
            kept: How many items stage 1 keeps; None if it is not asked.
            k: The number of items.
        """
        keys: dict[int, Any] = dict.fromkeys({*range(self.size)}.difference(self.missing))
        if kept:
            keys = self._ranked(dict.fromkeys(keys, ("stage_1", task)))
            least_B = least_key(torch.cat([*keys.values()], dim=1), kept)
            keys = {number: at_least(least_B, keys_BN) for number, keys_BN in keys.items()}
        best = self._ranked({number: ("stage_2", task, of) for number, of in keys.items()})
        self.missed = sorted({*self.missed, *range(self.size)}.difference(best))
        found_BN = torch.cat([*best.values()], dim=1)
        return found_BN.topk(min(k, found_BN.shape[1])).values

    def look_after(self, digest: str) -> None:
        for number, (newest, problem) in self._ask("status", dict.fromkeys(range(self.size), (digest,))).items():
            self._newest[number] = newest
            self._note(number, problem)

    def all_have(self, digest: str) -> bool:
        return all(newest == digest or problem for newest, problem in zip(self._newest, self._problems, strict=True))

    def _ranked(self, asked: Mapping[int, tuple[Any, ...]]) -> dict[int, Tensor]:
        """Returns what shards answer, by shard. Raises ShardsLost if there is no answer without a missing one."""
        if refusal := self.refusal:
            raise ShardsLost(refusal)
        found = self._ask("rank", asked)
        # Meanwhile a shard that did not answer may be there again.
        if not found or (len(found) < self.size and not self._allow_partial):
            raise ShardsLost(self.refusal or "a shard was missing for a moment; ask again")
        return found

    def _ask(self, method: str, asked: Mapping[int, tuple[Any, ...]]) -> dict[int, Any]:
        """Calls a method of shards at once; returns, by shard, what comes of it. Those that do not answer in time are
        missing until they do."""
        until, found = time.monotonic() + self._seconds, dict[int, Any]()
        calls = {number: getattr(self._shards[number], method).remote(*given) for number, given in asked.items()}
        for number, call in calls.items():
            try:
                found[number] = call.result(timeout_s=max(0.0, until - time.monotonic()))
            except TimeoutError:
                call.cancel()
                self._note(number, f"no answer within {self._seconds:g} s")
            except Exception as error:  # of the shard, or of Ray Serve where it has ended
                cause = getattr(error, "cause", None) or error
                self._note(number, " ".join(str(cause).split())[:200] or type(cause).__name__)
        return found

    def _note(self, number: int, problem: str) -> None:
        if problem != self._problems[number]:
            self._say(f"{self._name(number)} {f'is missing: {problem}' if problem else 'answers'}")
        self._problems[number] = problem

    def _name(self, number: int) -> str:
        return f"shard {number + 1}/{self.size}"


class Front:
    """Answers over HTTP."""

    def __init__(self, arguments: Arguments, *shards: "DeploymentHandle") -> None:
        self._settings = arguments
        group = Shards(shards, say, arguments.shard_seconds, arguments.allow_partial)
        # Shards are asked, and Ray Serve lets no one wait for them in its event loop.
        with ThreadPoolExecutor(1) as thread:
            self._export = thread.submit(arguments.export, group, "front").result()

    def __serve_build_asgi_app__(self) -> FastAPI:
        return make_app(self._export, self._settings)


def build(args: dict[str, Any]) -> "Application":
    """Returns the application that the configuration of Ray Serve names as `import_path`. `args`: fields of
    `Arguments`."""
    arguments = from_mapping(Arguments, args, "args")
    from ray import serve

    options = {"ray_actor_options": {"num_cpus": arguments.cpus}, "max_ongoing_requests": 1024}
    shards = [
        serve.deployment(Shard, name=f"shard-{number + 1}", **options).bind(arguments, number)
        for number in range(arguments.shards)
    ]
    return serve.deployment(serve.ingress()(Front), name="front", **options).bind(arguments, *shards)
