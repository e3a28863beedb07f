"""What the processes of tests leave behind, as Linux's /proc tells it; elsewhere nothing is found."""

import os
from contextlib import suppress
from pathlib import Path

HELPERS = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")
"""Processes that Python starts once and keeps until their parent ends, as their command lines name them."""


def living(mark: str) -> dict[int, str]:
    """The command lines of this process's descendants, and of the processes that have `mark`, "NAME=VALUE", in the
    environment that they were started with, whoever their parent is now. Without zombies, which hold nothing but an
    entry in their parent's table, and without this process's own HELPERS."""
    parents, commands = dict[int, int](), dict[int, str]()
    marked = set[int]()
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
            if mark.encode() in (entry / "environ").read_bytes().split(b"\0"):
                marked.add(int(entry.name))
        except OSError:
            continue  # It has ended meanwhile, or is another user's.
        if fields[0] not in "ZX":
            parents[int(entry.name)], commands[int(entry.name)] = int(fields[1]), command
    for pid, command in commands.items():
        if parents[pid] == os.getpid() and any(name in command for name in HELPERS):
            marked.discard(pid)
        elif _descends(pid, parents):
            marked.add(pid)
    return {pid: commands[pid] for pid in sorted(marked - {os.getpid()}) if pid in commands}


def listening(pid: int) -> list[str]:
    """The TCP addresses, as in /proc/net, on which a process listens."""
    links = set()
    for descriptor in Path(f"/proc/{pid}/fd").glob("*"):
        with suppress(OSError):
            links.add(os.readlink(descriptor))
    if not links:
        return []
    tables = [Path(f"/proc/net/{name}").read_text() for name in ("tcp", "tcp6")]
    rows = [line.split() for table in tables for line in table.splitlines()]
    return [row[1] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in links]


def _descends(pid: int, parents: dict[int, int]) -> bool:
    while (pid := parents.get(pid, 0)) not in (0, os.getpid()):
        pass
    return pid > 0
