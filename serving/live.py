"""The export in a directory while it answers: a new one published in its place takes over, and deltas are applied."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event, Lock, Thread
from typing import Any

import torch

from logitmix.common.files import file_stamp
from logitmix.common.storage import fetch, is_copy
from logitmix.serving.attributes import Changes, read_changes, with_changes
from logitmix.serving.columns import ACTIONS, Kind
from logitmix.serving.directory.delta import all_applied, chain, stamps
from logitmix.serving.directory.format import Contents
from logitmix.serving.directory.reader import read, stamp
from logitmix.serving.group import Group
from logitmix.serving.retriever import Missing, Retriever

SEARCH_SECONDS = 1.0
"""Most time of a search."""
MOST_FOUND = 10_000
"""Items that a search finds before it ends, where the one with most actions comes first."""
POLL_SECONDS = 1.0
"""Time between two looks at the manifest."""
STAMP_SECONDS = 1.0
"""Time between two looks at the file of attributes."""
STORE_SECONDS = 10.0
"""Time between two looks at the store of an export that is at a URL."""
_WINDOW = 2**13
"""Items searched before other threads get a turn, and the clock is looked at."""


class LiveExport:
    """The Retriever of a serving directory, always that of the last intact export there, with the deltas that follow
    it. The items may be those of shards, or this process one of them (cluster.py)."""

    def __init__(
        self,
        directory: Path,
        say: Callable[[str], object],
        group: Group | None = None,
        deltas: Path | None = None,
        where: str = "",
        attributes: Path | None = None,
        shared: Path | None = None,
    ) -> None:
        """`say` is told of new exports, and of deltas, which come to the folder `deltas`; `where` and `shared` are as
        in the Retriever. The values in the file `attributes` take the place of those of filterable columns. Raises
        ValueError if there is no intact export, or no such folder or file."""
        self._directory, self.say, self._group, self._deltas = directory, say, group or Group(), deltas
        self._where, self._shared = where, shared
        if attributes and not attributes.is_file():
            raise ValueError(f"there is no file {attributes}; make it, or give another --attributes")
        self._attributes, self._turn = attributes, Lock()
        self._seen_attributes: tuple[int, int, int] | None = None
        self._changes, self._kinds = Changes(), dict[str, Kind]()
        self._applied_to: Retriever | None = None
        self.changed, self.refused_attributes = "", ""
        """What the file of attributes changes, and why it is not used as it is now."""
        if deltas and not deltas.is_dir():
            raise ValueError(f"there is no folder {deltas}; make it, or give another --deltas")
        self.refused = ""
        """Why there are deltas that are not applied, in one line."""
        self._said = dict[str, str]()
        """The last line of trouble, by what it is about."""
        self._base: tuple[object, Contents] | None = None
        self._made: tuple[Contents, Retriever] | None = None
        fetch(directory)
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="export")
        self._seen = self._there()
        self._next: Retriever = self._reader.submit(self._read).result()
        """Answers as soon as all who share the items have its export."""
        self.retriever: Retriever = self._next
        self._group.look_after(self.retriever.digest)
        self._say_refused()
        self._ended = Event()
        if attributes:
            Thread(target=self._watch_attributes, name="attributes", daemon=True).start()
        if is_copy(directory):
            # A daemon: whoever waits for the store, or for a process that writes this copy, must not keep this process.
            Thread(target=self._fetch, name="store", daemon=True).start()

    def refresh(self) -> bool:
        """Loads the export that was published since the last call, and applies the deltas that came; whether another
        one answers now. A broken one is reported, and the old one goes on, as it does until all shards that there are
        have the new one."""
        self._look_at_files()
        self._group.look_after(self.retriever.digest)
        there, before = self._there(), self.retriever
        # A directory is not there for a moment while it is published.
        if there[0] is not None and there != self._seen:
            try:
                self._next = self._reader.submit(self._read).result()
            except Exception as error:  # whatever is wrong with the new export, the old one can answer
                if there == self._there():  # otherwise it was replaced while it was read
                    self._seen = there
                    self.say(f"the new export is not used: {' '.join(str(error).split())}")
                return False
            self._seen = there
            self._say_refused()
        if self._next is before or not self._group.all_have(self._next.digest):
            return False
        self.retriever = self._next
        said = f"delta {self.retriever.delta} is applied" if self.retriever.delta else "new export"
        self.say(f"{said}: {self.retriever.described}")
        return True

    def _there(self) -> tuple[object, object]:
        """Differs when there is another export, or another delta."""
        return stamp(self._directory), stamps(self._deltas) if self._deltas else ()

    def _say_refused(self) -> None:
        self._say_once("deltas", self.refused and f"not all deltas are applied: {self.refused}")

    def _look_at_files(self) -> None:
        """Says once that the export cannot answer any more, because somebody writes into its files."""
        problem = ""
        try:
            self.retriever.files.check()
        except OSError as error:
            problem = str(error)
        self._say_once("files", problem)

    def _say_once(self, about: str, trouble: str) -> None:
        """Says a line of trouble, unless it was the last one about this; none if it is empty."""
        if trouble and trouble != self._said.get(about):
            self.say(trouble)
        self._said[about] = trouble

    def release(self) -> None:
        """Ends what looks at the store."""
        self._ended.set()

    @property
    def refusal(self) -> str:
        """Why nothing is answered now; empty if it is."""
        return self._group.refusal

    @property
    def missing(self) -> Missing:
        """What of the items is out of reach now."""
        return self.retriever.without(self._group.missing)

    def _fetch(self) -> None:
        """Fetches what has changed of an export at a URL, again and again until the end. Where that fails, the old one
        goes on, and a line says so once."""
        while not self._ended.wait(STORE_SECONDS):
            problem = ""
            try:
                fetch(self._directory)
            except Exception as error:  # whatever is wrong, it may be over at the next look
                problem = f"no new export can be fetched: {' '.join((str(error) or type(error).__name__).split())}"
            if not self._ended.is_set():
                self._say_once("store", problem)

    def _read(self) -> Retriever:
        try:
            contents = self._contents()
            if self._made and self._made[0] is contents:
                return self._made[1]
            retriever = Retriever(contents, group=self._group, where=self._where, shared=self._shared)
            retriever.warm_up()
            if self._attributes:
                self._change(retriever)
            self._made = contents, retriever
        except Exception as error:
            raise ValueError(str(error) or type(error).__name__) from error
        return retriever

    def _watch_attributes(self) -> None:
        """Every process does this by itself."""
        while not self._ended.wait(STAMP_SECONDS):
            self.look_at_attributes()

    def look_at_attributes(self) -> None:
        """Takes over the file of attributes, if it or the export is another one than at the last look."""
        assert self._attributes is not None
        if self._applied_to is not self.retriever or file_stamp(self._attributes) not in (self._seen_attributes, None):
            self._change(self.retriever)

    def _change(self, retriever: Retriever) -> None:
        """Gives a retriever the values in the file of attributes; those from before, if it is not as it must be."""
        assert self._attributes is not None
        with self._turn:
            self._applied_to, self._seen_attributes = retriever, file_stamp(self._attributes)
            before = self.changed, self.refused_attributes
            try:
                self._changes = read_changes(self._attributes, retriever.columns)
                self._kinds, self.refused_attributes = retriever.kinds, ""
            except ValueError as error:
                self.refused_attributes = " ".join(str(error).split())
            # What was valid for a former export may not be for this one.
            same = {name for name, kind in retriever.kinds.items() if self._kinds.get(name) == kind}
            changes = {of: {name: row[name] for name in row.keys() & same} for of, row in self._changes.items()}
            columns, self.changed = with_changes(retriever.columns, retriever.raw_ids, changes)
            retriever.filters.change(columns)
        if self.refused_attributes and self.refused_attributes != before[1]:
            self.say(f"the attributes stay as they were: {self.refused_attributes}")
        elif not self.refused_attributes and (self.changed, "") != before:
            self.say(f"attributes: {self.changed}")

    def _contents(self) -> Contents:
        """The export in the directory with the deltas that follow it. What was read is not read again."""
        there = stamp(self._directory)
        if self._base and self._base[0] == there:
            contents = self._base[1]
        else:
            contents = read(self._directory, self._group.rank, self._group.size)
        if self._deltas:
            found, refused = chain(self._deltas, contents.digest, contents.delta or None)
            contents, problem = all_applied(contents, found)
            self.refused = problem or refused
        self._base = there, contents
        return contents


def search(retriever: Retriever, query: str, limit: int) -> dict[str, Any]:
    """`items` that have each word of the query in their id or title, as {"id": raw id, "title": title, "columns":
    {name: value}}, first the one whose id the query is, then those with most actions, if there is such a column; all
    items for an empty query. At most `limit`, of the first MOST_FOUND, and what a second suffices for; whether there
    may be `more`, and the kinds of all `columns`."""
    retriever.files.check()
    deadline, count = time.monotonic() + SEARCH_SECONDS, retriever.num_items
    ids, titles, words = retriever.raw_ids, retriever.titles, query.split()
    exact, actions = ids.find(query), retriever.filters.columns.get(ACTIONS)
    places, searched = list[int](), 0 if words else count
    while searched < count and len(places) <= max(limit, MOST_FOUND) and time.monotonic() < deadline:
        stop = min(searched + _WINDOW, count)
        found = set(range(searched, stop))
        for word in words:
            found &= {item for of in (ids, titles) if of for item in of.containing(word, searched, stop)}
        places += sorted(found)
        searched = stop
    place_N = torch.tensor(places, dtype=torch.int64) if words else torch.arange(count)
    if actions is not None and actions.kind == "number":
        place_N = place_N[actions.values[place_N].nan_to_num(-1).argsort(descending=True, stable=True)]
    places = place_N[: limit + 1].tolist()
    if exact is not None and exact < count:
        places = [exact, *(place for place in places if place != exact)]
    shown = [
        {"id": ids[item], "title": titles[item] if titles else None, "columns": retriever.values(item)}
        for item in places[:limit]
    ]
    return {"items": shown, "more": searched < count or len(places) > limit, "columns": retriever.kinds}
