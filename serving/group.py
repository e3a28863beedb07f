"""Which part of an export's items this process ranks, and who ranks the others."""

from collections.abc import Sequence


class ShardsLost(ConnectionError):
    """Shards without which no answer is given do not answer."""


class Group:
    """This process ranks one part of the items, which is all of them by default."""

    asks_shards = False
    """Whether others rank the items, whom `best` asks (cluster.py)."""
    refusal = ""
    """Why there are no answers now; empty if there are."""
    missing: Sequence[int] = ()
    """The parts of the items, from 0, that are out of reach now."""
    missed: Sequence[int] = ()
    """The parts that the last answer lacks; who asks for one begins with none."""

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        """Makes the group of a process that ranks part number `rank` of `size` parts of the items."""
        self.rank, self.size = rank, size

    def part(self, whole: range) -> range:
        """Of the numbers of all shards, those whose items this process ranks."""
        return part_of(whole, self.rank, self.size)

    def look_after(self, digest: str) -> None:
        """Sees which parts are there, with which exports; `digest` is that of the export that answers."""

    def all_have(self, digest: str) -> bool:
        """Returns whether all parts can answer from this export."""
        return True


def part_of(whole: range, part: int, parts: int) -> range:
    """Returns one of `parts` consecutive parts, of nearly equal lengths; empty ones where there are more parts than
    numbers."""
    return whole[len(whole) * part // parts : len(whole) * (part + 1) // parts]
