"""The meeting of a job's ranks: all of one start of the job, and only if they agree.

torchrun keeps one store over its restarts, where dead processes have left entries, and each of its agents counts the
restarts by itself (pytorch #135712). So every process brings an id of its own, and rank 0 answers each with the name of
a new group. What follows is stored under that name, which no process of another start learns:

    facts/ID               the facts of the process with this id
    join/RANK              what the process that came last as this rank says of itself (Member)
    answer/ID              rank 0's answer to that process: the name of the group
    GROUP/here/RANK        the id of the process that has read it, which therefore is alive
    GROUP/verdict          by rank 0: {"refused": why, or "", "lost": whether a restart may help, "here": the ranks that
                           have come, "members": what each rank says of itself}
    GROUP/heard/RANK       where the job is refused: that the rank has read why

Values are text, or JSON whose unknown fields are ignored, for the ranks may be of different versions.
"""

import dataclasses
import hashlib
import json
import os
import secrets
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from logitmix.common.mappings import cut

POLL_SECONDS = 0.05
TELLS = 20.0
"""Seconds that ranks wait for those that have not come, once it is known that the job cannot begin."""
HEARS = 5.0
"""Seconds that ranks wait until all have read why: the first process to end may take the store along."""
NAMED = 3
"""Differences that are said with both values."""


class LostRank(RuntimeError):
    """Another rank is gone, or does not answer. The process should end without destructors, which may wait for it."""


@dataclass(frozen=True)
class Member:
    """What a process says of itself to the others."""

    id: str = ""
    host: str = ""
    network: str = ""
    """Equal for processes that reach each other over the loopback."""
    address: str = ""
    """Where gloo is to be reached; an interface's name where GLOO_SOCKET_IFNAME has one."""
    digest: str = ""
    """Of the facts that must be equal on all ranks."""
    failed: str = ""
    """Why this rank cannot take part."""
    mistake: bool = False
    """Whether that is a user's mistake, which a restart cannot mend."""

    @classmethod
    def here(cls, facts: Mapping[str, str], failed: str = "", mistake: bool = False) -> "Member":
        """Returns what this process says of itself."""
        digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
        host = socket.gethostname()
        return cls(secrets.token_hex(8), host, _network(), gloo_address(), digest, failed, mistake)

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> "Member":
        names = [field.name for field in dataclasses.fields(cls)]
        return cls(**{name: content[name] for name in names if name in content})


def meet(
    store: dist.Store, rank: int, world_size: int, own: Member, facts: Mapping[str, str], seconds: float
) -> tuple[str, dict[int, Member]]:
    """Returns the name of the group of all ranks, and what they say of themselves. Each waits `seconds` for the others
    at most.

    ValueError, the same on every rank, if their `facts` differ, if one has failed by a user's mistake, or if a host
    would announce an address that others cannot reach. LostRank if a rank does not come, or has failed otherwise.
    """
    store.set(f"facts/{own.id}", json.dumps(facts))
    lead = _Lead(store, world_size, own, seconds) if rank == 0 else None
    group = lead.gather() if lead else _follow(store, rank, own, seconds)
    of_group = dist.PrefixStore(group, store)
    if lead:
        of_group.set("verdict", json.dumps(lead.verdict()))
    verdict = json.loads(_get(of_group, "verdict", seconds + TELLS))
    if not verdict["refused"]:
        return group, {int(rank): Member.of(content) for rank, content in verdict["members"].items()}
    of_group.set(f"heard/{rank}", "")
    with suppress(RuntimeError):
        of_group.wait([f"heard/{other}" for other in verdict["here"]], timedelta(seconds=HEARS))
    raise (LostRank if verdict["lost"] else ValueError)(verdict["refused"])


def _follow(store: dist.Store, rank: int, own: Member, seconds: float) -> str:
    """Returns the name of the group, on every rank but 0."""
    store.set(f"join/{rank}", json.dumps(dataclasses.asdict(own)))
    try:
        group = _get(store, f"answer/{own.id}", seconds).decode()
    except dist.DistStoreError:
        raise LostRank(f"rank {rank} waited {seconds:g} s for rank 0, which never came") from None
    store.set(f"{group}/here/{rank}", own.id)
    return group


class _Lead:
    """Rank 0, which gathers the others."""

    def __init__(self, store: dist.Store, world_size: int, own: Member, seconds: float) -> None:
        self.store, self.world_size, self.seconds = store, world_size, seconds
        self.name = secrets.token_hex(8)
        self.group = dist.PrefixStore(self.name, store)
        self.members = {0: own}
        self.here = {0}
        """The ranks that are known to be alive."""
        self.lost = False

    def gather(self) -> str:
        """Waits for all ranks, or for TELLS once it is clear that the job cannot begin; returns the group's name."""
        until = time.monotonic() + self.seconds
        while time.monotonic() < until:
            for rank in set(range(self.world_size)) - self.here:
                self._look_for(rank)
            if self._why():
                until = min(until, time.monotonic() + TELLS)
            if len(self.here) == self.world_size and not self._replaced():
                break
            time.sleep(POLL_SECONDS)
        return self.name

    def verdict(self) -> dict[str, Any]:
        """Returns what all ranks are told: whether the job can begin."""
        absent, refused = sorted(set(range(self.world_size)) - self.here), self._why()
        if absent and not refused:
            self.lost = True
            refused = f"rank 0 waited {self.seconds:g} s for the others: {ranks_named(absent)} never came"
        members = {rank: dataclasses.asdict(of) for rank, of in self.members.items()}
        return {"refused": refused, "lost": self.lost, "here": sorted(self.here), "members": members}

    def _look_for(self, rank: int) -> None:
        if not self.store.check([f"join/{rank}"]):
            return
        came = self._member(rank)
        if rank not in self.members or self.members[rank].id != came.id:
            self.members[rank] = came
            self.store.set(f"answer/{came.id}", self.name)
        # A process of an earlier start does not read the answer.
        if self.group.check([f"here/{rank}"]) and self.group.get(f"here/{rank}").decode() == came.id:
            self.here.add(rank)

    def _member(self, rank: int) -> Member:
        """Returns the process that came last as this rank."""
        return Member.of(json.loads(self.store.get(f"join/{rank}")))

    def _replaced(self) -> bool:
        """Returns whether another process has come as one of the ranks since; then that one is waited for."""
        others = range(1, self.world_size)
        replaced = {rank for rank in others if self._member(rank).id != self.members[rank].id}
        self.here -= replaced
        return bool(replaced)

    def _why(self) -> str:
        """Returns why the job cannot begin, so far as is known."""
        here = {rank: self.members[rank] for rank in sorted(self.here)}
        for rank, member in here.items():
            if member.failed:
                self.lost = not member.mistake
                return f"rank {rank} (on {member.host}) failed: {member.failed}"
        own = self.members[0]
        if other := next((member for member in here.values() if member.digest != own.digest), None):
            like = [rank for rank, member in here.items() if member.digest == other.digest]
            facts = (json.loads(self.store.get(f"facts/{member.id}")) for member in (own, other))
            return differing(*facts, f"rank 0 (on {own.host})", f"{ranks_named(like)} (on {other.host})")
        return unreachable(here)


def differing(first: Mapping[str, str], other: Mapping[str, str], *where: str) -> str:
    """Returns one line that names what differs, with both values of the first few."""
    names = [name for name in {**first, **other} if first.get(name) != other.get(name)]
    values = ([cut(of.get(name, "absent"), 80) for of in (first, other)] for name in names)
    said = [
        f"{name} is {one} on {where[0]} and {two} on {where[1]}" for name, (one, two) in zip(names, values, strict=True)
    ]
    if len(said) > NAMED:
        said[NAMED:] = [f"and {len(said) - NAMED} more"]
    return f"the ranks differ: {'; '.join(said)}; start all of them with the same settings, dataset and code"


def unreachable(members: Mapping[int, Member]) -> str:
    """Returns what to say if a host announces its loopback to another host; else nothing."""
    if len({member.network for member in members.values()}) < 2:
        return ""
    for rank, member in members.items():
        if member.address == "lo" or member.address.startswith(("127.", "::1")):
            peer, other = next(of for of in members.items() if of[1].network != member.network)
            return (
                f"rank {rank} (on {member.host}) would be reached at {member.address}, the loopback of its host, and "
                f"rank {peer} (on {other.host}) at {other.address}; {_REMEDY}"
            )
    return ""


def unconnected(rank: int, members: Mapping[int, Member]) -> str:
    """Returns what to say where all ranks have met, and this one cannot connect to another."""
    own, elsewhere = members[rank], {of.address: of for of in members.values() if of.network != members[rank].network}
    others = ", ".join(f"{address} ({of.host})" for address, of in list(elsewhere.items())[:NAMED])
    where = f"; the others listen at {others}" if others else ""
    return f"this rank listens at {own.address} ({own.host}){where}; {_REMEDY}"


_REMEDY = (
    "on each host set GLOO_SOCKET_IFNAME to the network interface at which the other hosts reach it, such as eth0 "
    "(`ip address` lists them)"
)


def gloo_address() -> str:
    """Returns where gloo listens: the interface that GLOO_SOCKET_IFNAME names, or what the host's name resolves to; if
    that is no address of this host, the loopback."""
    if interface := os.environ.get("GLOO_SOCKET_IFNAME"):
        return interface
    with suppress(OSError, UnicodeError):
        for family, kind, _, _, address in socket.getaddrinfo(socket.gethostname(), 0, type=socket.SOCK_STREAM):
            with suppress(OSError), socket.socket(family, kind) as probe:
                probe.bind(address)
                return str(address[0])
    return "127.0.0.1"


def ranks_named(ranks: Sequence[int]) -> str:
    """Returns `rank 3`, or `ranks 3, 4, 5`."""
    shown = ", ".join(map(str, ranks[:8])) + (f", … ({len(ranks)} in all)" if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"


def _network() -> str:
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/net')}"
    except OSError:
        return socket.gethostname()


def _get(store: dist.Store, key: str, seconds: float) -> bytes:
    store.wait([key], timedelta(seconds=seconds))
    return store.get(key)
