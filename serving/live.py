"""The export in a directory while it answers: a new one published in its place takes over."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import TypedDict

from logitmix.serving.format import MANIFEST
from logitmix.serving.retriever import Retriever

SEARCH_SECONDS = 1.0
"""Most time of a search."""
_WINDOW = 2**13
"""Items searched before other threads get a turn, and the clock is looked at."""


class Found(TypedDict):
    """The result of a search for items."""

    items: list[dict[str, str | None]]
    """Raw ids ("id") and titles ("title")."""
    more: bool
    """Whether there may be others."""


class LiveExport:
    """The Retriever of a serving directory, always that of the last intact export there."""

    def __init__(self, directory: Path, say: Callable[[str], object]) -> None:
        """`say` is told of new exports. Raises ValueError if there is no intact one."""
        self._directory, self._say = directory, say
        self._seen = self._stamp()
        self.retriever = self._load()

    def refresh(self) -> bool:
        """Loads the export that was published since the last call; whether there is one. A broken one is reported, and
        the old one goes on."""
        stamp = self._stamp()
        # A directory is not there for a moment while it is published.
        if stamp is None or stamp == self._seen:
            return False
        try:
            retriever = self._load()
        except Exception as error:  # whatever is wrong with the new export, the old one can answer
            if stamp == self._stamp():  # otherwise it was replaced while it was read
                self._seen = stamp
                self._say(f"the new export is not used: {' '.join(str(error).split())}")
            return False
        self._seen, self.retriever = stamp, retriever
        self._say(f"new export: {described(retriever)}")
        return True

    def _load(self) -> Retriever:
        retriever = Retriever.load(self._directory)
        # The first answer takes longer than all others.
        retriever.retrieve([[0]], 1)
        return retriever

    def _stamp(self) -> tuple[int, int, int] | None:
        """Another one for each manifest; None if there is none."""
        try:
            status = (self._directory / MANIFEST).stat()
        except OSError:
            return None
        return status.st_ino, status.st_mtime_ns, status.st_size


def described(retriever: Retriever) -> str:
    source = retriever.source
    return f"{retriever.num_items:,} items of {source.dataset}, step {source.step} of run {source.run}"


def search(retriever: Retriever, query: str, limit: int) -> Found:
    """Items with the query in their id or title, first the one whose id it is; all items for an empty query. At most
    `limit`, and what a second suffices for."""
    ids, titles, deadline = retriever.raw_ids, retriever.titles, time.monotonic() + SEARCH_SECONDS
    exact = ids.find(query)
    places = {} if exact is None else {exact: None}
    searched = 0
    while searched < len(ids) and len(places) <= limit and time.monotonic() < deadline:
        stop = min(searched + _WINDOW, len(ids))
        found = set(range(searched, min(stop, searched + limit + 1)))
        if query:
            found = {item for texts in (ids, titles) if texts for item in texts.containing(query, searched, stop)}
        places |= dict.fromkeys(sorted(found))
        searched = stop
    shown = [{"id": ids[item], "title": titles[item] if titles else None} for item in list(places)[:limit]]
    return {"items": shown, "more": searched < len(ids) or len(places) > limit}
