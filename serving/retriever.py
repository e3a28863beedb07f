"""History -> query -> h-indexer over the corpus -> similarity over what it keeps -> top-k (overall flow, section 2.2).

Axes: B histories, T their positions, packed, N items of a chunk, X items in the corpus, K items that stage 1 keeps
(the paper's k'), D encoder width.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from copy import copy, deepcopy
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, TypedDict

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from logitmix.common.storage import fetched, naming_urls
from logitmix.common.values import as_list, from_one, id_texts, whole
from logitmix.modules.batch import Packing
from logitmix.modules.config import sees_times
from logitmix.modules.features import Features, Values, recency_rows
from logitmix.modules.schema import ITEM, RECENCY, RECENCY_FEATURE, RECENCY_VALUES
from logitmix.modules.similarity.base import NUMBERS
from logitmix.modules.stage1 import Int8Corpus, hindexer_topk
from logitmix.modules.towers import Sides
from logitmix.serving.features import FeatureReader
from logitmix.serving.format import Contents, read
from logitmix.serving.group import Group, part_of
from logitmix.serving.items import ItemInputs, Items
from logitmix.serving.model import CORPUS, named, scales_of, stored_items, trained_tower
from logitmix.serving.pieces import Pieces, fetch_rows
from logitmix.serving.texts import FEW
from logitmix.serving.topk import NOTHING, least_key, merge, rank_keys, split_keys

STAGE_1 = 100_000
"""Items that stage 1 keeps unless told otherwise; the paper's k'."""
UNKNOWN = -1
"""Instead of an item's index: an unknown item."""
_BIT = (1 << np.arange(8)).astype(np.uint8)
_QUERIES = 32
"""Histories ranked at once."""
_LISTS, _LONGEST = 32, 2**14
"""Lists of ids whose items are cached, and ids of one that is: clients send the same list again."""


@dataclass(frozen=True, eq=False)
class Retrieved:
    """The best items of each history, on the CPU."""

    items: Tensor
    """int64 [B, k]: item indices, highest score first, equal scores by rising index; -1 where none is left."""
    scores: Tensor
    """FP32 [B, k]: the similarity; -inf where no item is left."""


class Request(TypedDict, total=False):
    """One user and their features; every entry may be missing, or None. An id is text or a whole number of 64 bits, and
    no float; arrays and tensors of these are lists as well."""

    history: Sequence[str | int]
    """Raw item ids, oldest first."""
    timestamps: Sequence[int]
    """The times of these actions, one whole number each, never decreasing, in the unit of the dataset's timestamps. A
    model that uses recency derives it from them, except for events that state their recency; without both, recency is
    unknown. For a model whose encoder sees times, all is at one time without them. Other models accept timestamps and
    ignore them, so clients can send every model the same request."""
    time: int
    """When the request is made, in the same unit and not before the last action; the default is that action's time.
    Only a model whose encoder sees times uses it, and only beside timestamps."""
    user: Mapping[str, Any]
    """Features of the user by name; the manifest's signature has their names and kinds."""
    events: Sequence[Mapping[str, Any]]
    """Features of the events, one mapping for each item of the history."""
    allowed: Sequence[str | int]
    """Raw ids: if given, only these items are ranked; all of them by the similarity, unless they are more than the
    h-indexer keeps."""
    blocked: Sequence[str | int]
    """Raw ids of items to leave out. Unknown ids are ignored, here and in `allowed`."""


class Row(TypedDict):
    """One line of a ranking for people to read: the raw id, and the title if the dataset has titles."""

    rank: int
    id: str
    title: str | None
    score: float


class Retriever:
    """Answers with the trained model's top-k, from a serving directory."""

    def __init__(
        self, contents: Contents, on: Sequence[str | torch.device] = ("cpu",), group: Group | None = None
    ) -> None:
        """The shards of items are divided among the processes of the group, and each part among the devices that it
        names in `on`. The first device also encodes the queries."""
        about = contents.about
        self.config, self.source, self.exclude_history = about.model, about.source, about.exclude_history
        self.raw_ids, self.titles, self.digest = contents.raw_ids, contents.titles, contents.digest
        self.files = contents.files
        self._items_of_list = lru_cache(_LISTS)(contents.raw_ids.places)
        self._about, self._group, shards = about, group or Group(), contents.shards
        everywhere = [torch.device(of) for of in on]
        weights = {name: of.to(everywhere[0]) for name, of in contents.weights.items()}
        self.tower = trained_tower(about.model, about.schema, weights)
        self._tables = _moved(contents.tables, everywhere[0])
        numbers, size = range(len(shards)), self._group.size
        own = part_of(numbers, self._group.rank, size)
        self._parts = [part_of(own, number, len(everywhere)) for number in range(len(everywhere))]
        # Other processes' shards stay in their files, from which rows of histories are read.
        device_of = {number: torch.device("cpu") for number in numbers}
        for part, device in zip(self._parts, everywhere, strict=True):
            device_of |= dict.fromkeys(part, device)
        devices = set(device_of.values())
        towers = {of: self.tower if of == everywhere[0] else deepcopy(self.tower).to(of) for of in devices}
        tables = {of: _moved(contents.tables, of) for of in devices}
        self._shards = [{name: of.to(device_of[n]) for name, of in shard.items()} for n, shard in enumerate(shards)]
        items = [
            Items.of_tensors([shard], about.item_cache, towers[device], tables[device])
            for shard, device in zip(self._shards, device_of.values(), strict=True)
        ]
        self._items = Items.joined(items, everywhere[0], own)
        self._largest_part = max(len(self._items.of_shards(part_of(numbers, rank, size))) for rank in range(size))
        self._reader = FeatureReader(about.schema, contents.vocabularies)
        # A dataset may have a feature of this name that means something else.
        has_recency = RECENCY_FEATURE in about.schema.features
        self._derives_recency = has_recency and tuple(contents.vocabularies[RECENCY]) == RECENCY_VALUES
        self._unknown_1D = self._item_inputs([{}], ["an unknown item"]).embed(self.tower, self._tables).vector_RD

    @classmethod
    @naming_urls()
    def load(
        cls,
        path: str | Path,
        device: str | torch.device | Sequence[str | torch.device] = "cpu",
        group: "dist.ProcessGroup | None" = None,
    ) -> "Retriever":
        """Reads a serving directory, at a path or a URL; the model, its tables and the items go to `device`, cpu or
        cuda. On the CPU rows and items stay in their files until they are used. Several devices share the items, file
        by file, and the answers are those of one.

        The processes of a `group` of torch.distributed that has gloo share the items likewise, each with the devices
        that it names. All of them make the same calls, with the same requests, and get the same answers; or rank 0
        makes them, the others `follow`, and rank 0 ends with `release`. They read one directory. Rank 0 alone encodes
        the requests, and so reads the rows of their histories from the files of all parts.

        Raises ValueError, naming the path and what to do, if there is no intact serving directory of this format
        version, and for a device that does not exist; all processes raise what one finds.
        """
        if not isinstance(path, str | Path):
            raise ValueError(f"the path is {path!r:.100}; it must be text or a Path")
        of_ranks = Group(group)
        found: list[Contents] = []

        def reading() -> str:
            found.append(read(fetched(path), of_ranks.rank, of_ranks.size))
            return found[0].digest

        devices = of_ranks.all(lambda: _devices(device))[of_ranks.rank]
        if len(set(of_ranks.all(reading))) > 1:
            raise ValueError(f"the processes find different exports at {path}; they must share one file system")
        return cls(found[0], devices, of_ranks)

    @cached_property
    def _corpora(self) -> list[tuple[int, Int8Corpus]]:
        """For each device, its first item and the h-indexer's vectors of its items; made when they are first needed."""
        corpora, scale = [], scales_of(self._shards[0]).corpus
        assert scale is not None
        for part in self._parts:
            if part:
                blocks = [(self._shards[number][CORPUS], len(self._items.shards[number])) for number in part]
                corpora.append((self._items.of_shards(part).start, Int8Corpus.joined(blocks, scale)))
        return corpora

    @property
    def num_items(self) -> int:
        """X."""
        return len(self.raw_ids)

    @torch.inference_mode()
    def retrieve(
        self,
        histories: Sequence[Sequence[int]],
        k: int,
        exclude_history: bool | None = None,
        stage1: int | None = None,
    ) -> Retrieved:
        """The k best items [B, k] after each of B histories (item indices, oldest first).

        The last L items of a history are encoded (the model's L). `exclude_history` leaves all items of the history out
        of the ranking; the default is how the model was evaluated. Features of users and events, including recency, are
        unknown here. The h-indexer keeps `stage1` items (by default 100,000, or k if that is more), by products in
        INT8, which the similarity ranks. If there are no more items than that, or no h-indexer, the similarity ranks
        the whole corpus.

        Raises ValueError for an empty history, for a value that is not an item index, and for a k below 1 or above
        `stage1`; WrittenInPlace, an OSError, if a file of the export has been written to.
        """
        k, kept, exclude_history = self._arguments(k, stage1, exclude_history)
        if not isinstance(histories, Iterable):
            raise ValueError(f"the histories are {histories!r:.100}; they must be a list of lists of item indices")
        self.files.check()
        checked = [_Asked(place, self._checked(history, place)) for place, history in enumerate(histories)]
        return self._retrieve(checked, k, kept, exclude_history)

    @torch.inference_mode()
    def recommend(
        self,
        requests: Sequence[Request],
        k: int,
        unknown: Literal["skip", "unknown", "refuse"] = "skip",
        exclude_history: bool | None = None,
        stage1: int | None = None,
        first: int = 0,
    ) -> list[list[Row]]:
        """The k best items for each request (fewer if fewer are left), for people and programs to read.

        `unknown` says what happens to ids of the history that are not in the corpus: they are left out ("skip"),
        replaced with an unknown item ("unknown"), or an error ("refuse"). A request without a history is answered from
        its user's features, if the model has any. The rest is as in `retrieve`.

        Raises ValueError, with the request's number counted from `first`, for a request that cannot be answered.
        """
        k, kept, exclude_history = self._arguments(k, stage1, exclude_history)
        asked = self._all_asked(requests, unknown, first)
        found = self._retrieve(asked, min(k, self.num_items), kept, exclude_history)
        return [self._shown(*ranking) for ranking in zip(found.items.tolist(), found.scores.tolist(), strict=True)]

    @torch.inference_mode()
    def query_sides(
        self, requests: Sequence[Request], unknown: Literal["skip", "unknown", "refuse"] = "skip"
    ) -> dict[str, Tensor]:
        """What both stages take of the queries: similarity.0, … and hindexer.0, each FP32 [B, ...]. Its product
        with a vector of hindexer.faiss is the h-indexer's score, and with one of similarity.faiss the similarity.

        Raises ValueError as `recommend` does.
        """
        return named(self._queries(self._all_asked(requests, unknown)))

    @torch.inference_mode()
    def problems(
        self, requests: Sequence[Request], unknown: Literal["skip", "unknown", "refuse"] = "skip"
    ) -> list[str | None]:
        """Why `recommend` refuses each request when it is alone, and so number 0; None if it does not."""
        problems: list[str | None] = [None] * len(requests)
        read: dict[int, _Asked] = {}
        for place, request in enumerate(requests):
            try:
                asked = self._asked(request, 0, unknown)
                self._values([asked], self._encoded([asked]))
            except ValueError as error:
                problems[place] = str(error)
            else:
                read[place] = asked
        if read:
            for place, finite in zip(read, _finite(self._queries(list(read.values()))), strict=True):
                problems[place] = None if finite else _too_large("request 0")
        return problems

    def _retrieve(self, asked: list["_Asked"], k: int, kept: int, exclude_history: bool) -> Retrieved:
        best_BK = torch.full((len(asked), k), NOTHING)
        for start in range(0, len(asked), _QUERIES):
            keys_BK = self._rank(asked[start : start + _QUERIES], min(k, self.num_items), kept, exclude_history)
            best_BK[start : start + _QUERIES, : keys_BK.shape[1]] = keys_BK.cpu()
        return Retrieved(*split_keys(best_BK))

    def indices_of(self, raw_ids: Sequence[str | int]) -> list[int]:
        """Item indices of raw ids. Raises ValueError that names the ids that are not in the corpus, and for what is no
        list of ids, such as a single text."""
        try:
            texts = id_texts(as_list(raw_ids))
        except ValueError as error:
            raise ValueError(f"the list of ids {error}") from None
        places = self._places(texts)
        unknown = list(dict.fromkeys(text for text, place in zip(texts, places, strict=True) if place == UNKNOWN))
        if unknown:
            shown = ", ".join(map(repr, unknown[:10])) + (", …" if len(unknown) > 10 else "")
            raise ValueError(
                f"no item of {self.source.dataset} has the id {shown}; give raw ids of its {self.num_items} items, "
                f"such as {self.raw_ids[0]!r}"
            )
        return list(places)

    def rows(
        self,
        raw_history: Sequence[str | int],
        k: int,
        exclude_history: bool | None = None,
        stage1: int | None = None,
    ) -> list[Row]:
        """`retrieve` for one history of raw ids, for people to read: k rows, or fewer if fewer items are left."""
        k, _, _ = self._arguments(k, stage1, exclude_history)
        found = self.retrieve([self.indices_of(raw_history)], min(k, self.num_items), exclude_history, stage1)
        return self._shown(found.items[0].tolist(), found.scores[0].tolist())

    def _shown(self, items: list[int], scores: list[float]) -> list[Row]:
        return [
            Row(rank=rank, id=self.raw_ids[item], title=self.titles[item] if self.titles else None, score=score)
            for rank, (item, score) in enumerate(zip(items, scores, strict=True), start=1)
            if item >= 0
        ]

    @torch.inference_mode()
    def new_items(self, records: Mapping[str, Mapping[str, Any]]) -> dict[str, Tensor]:
        """The tensors of a shard of this export for untrained items, from the raw values of their features by name, for
        each raw id. Raises ValueError that names the item."""
        names = [f"item {raw_id!r}" for raw_id in records]
        inputs, tower, about = self._item_inputs(list(records.values()), names), self.tower, self._about
        embedded, scales = inputs.embed(tower, self._tables), scales_of(self._shards[0])
        for name, finite in zip(names, _finite(tower.item_sides(embedded)), strict=True):
            if not finite:
                raise ValueError(_too_large(name))
        stored = stored_items(tower, embedded, about.precision, about.item_cache, scales)
        return stored if about.item_cache else stored | inputs.tensors(tower.schema)

    def _item_inputs(self, records: Sequence[Mapping[str, Any]], names: Sequence[str]) -> ItemInputs:
        unknown_R = torch.zeros(len(records), dtype=torch.int64)
        return ItemInputs(self._tables[ITEM].fetch(unknown_R), self._reader.read("item", records, names))

    def _arguments(self, k: int, stage1: int | None, exclude_history: bool | None) -> tuple[int, int, bool]:
        """Checked: k, the number of items that stage 1 keeps, and whether histories are left out."""
        found = {"k": k, "stage1": stage1}
        for name, value in found.items():
            try:
                found[name] = None if value is None and name == "stage1" else from_one(value)
            except ValueError as error:
                raise ValueError(f"{name} {error}") from None
        k, kept = found["k"] or 0, found["stage1"]
        if kept is not None and kept < k:
            raise ValueError(f"stage1 is {kept}; it must be at least k ({k})")
        if not isinstance(exclude_history, bool | None):
            raise ValueError(f"exclude_history is {exclude_history!r:.40}; it must be True, False or None")
        excluded = self.exclude_history if exclude_history is None else exclude_history
        return k, max(STAGE_1, k) if kept is None else kept, excluded

    def _all_asked(self, requests: Sequence[Request], unknown: str, first: int = 0) -> list["_Asked"]:
        if unknown not in ("skip", "unknown", "refuse"):
            raise ValueError(f"unknown is {unknown!r:.40}; it must be 'skip', 'unknown' or 'refuse'")
        self.files.check()
        if isinstance(requests, str | bytes | Mapping) or not isinstance(requests, Iterable):
            raise ValueError(f"the requests are {requests!r:.100}; they must be a list of mappings, one for each user")
        return [self._asked(request, place, unknown) for place, request in enumerate(requests, first)]

    def _asked(self, request: Request, place: int, unknown: str) -> "_Asked":
        if not isinstance(request, Mapping):
            raise ValueError(f"request {place} is {request!r:.100}; it must be a mapping, such as {{'history': [...]}}")
        if strange := sorted(set(request) - set(Request.__annotations__), key=str):
            there = ", ".join(Request.__annotations__)
            raise ValueError(f"request {place} has the entry {strange[0]!r}; there are: {there}")
        history, events = _ids(request, "history", place), _list(request, "events", place)
        user: Any = {} if request.get("user") is None else request["user"]
        for found in (user, *events):
            if not isinstance(found, Mapping):
                raise ValueError(f"request {place}: user or an event is {found!r}; it must be a mapping of features")
        if events and len(events) != len(history):
            raise ValueError(f"request {place} has {len(events)} events for {len(history)} items of its history")
        times = _times(request, len(history), place)
        if times and self._derives_recency:
            recency = recency_rows(torch.tensor(times[:-1]), torch.zeros(1, dtype=torch.int64)).tolist()
            unstated = zip(recency, events or [{}] * len(history), strict=True)
            events = [{RECENCY: RECENCY_VALUES[row], **event} for row, event in unstated]
        try:
            items = self.indices_of(history) if unknown == "refuse" else self._places(history)
        except ValueError as error:
            raise ValueError(f"request {place}: {error}") from None
        kept = [at for at, item in enumerate(items) if item != UNKNOWN or unknown == "unknown"]
        if not kept and not self.tower.schema.of("user"):
            raise ValueError(f"request {place} names no known item; give at least one")
        return _Asked(
            place,
            [items[at] for at in kept],
            user,
            [events[at] for at in kept] if events else None,
            [*(times[at] for at in kept), times[-1]] if times and kept else None,
            self._known(_ids(request, "blocked", place)),
            None if request.get("allowed") is None else self._known(_ids(request, "allowed", place)),
        )

    def _known(self, texts: list[str]) -> list[int]:
        return [item for item in self._places(texts) if item != UNKNOWN]

    def _places(self, texts: list[str]) -> list[int]:
        """Item indices, UNKNOWN where no item has the id."""
        if len(texts) < FEW:
            return [UNKNOWN if (item := self.raw_ids.find(text)) is None else item for text in texts]
        return self._items_of_list(tuple(texts)) if len(texts) <= _LONGEST else self.raw_ids.places(texts)

    def _checked(self, history: Sequence[int], place: int) -> list[int]:
        try:
            items = [whole(item) for item in as_list(history)]
        except ValueError as error:
            raise ValueError(
                f"history {place} is no list of item indices: it or one {error}; item indices go from 0 to "
                f"{self.num_items - 1}"
            ) from None
        if not items:
            raise ValueError(f"history {place} is empty; give at least one item")
        for item in items:
            if not 0 <= item < self.num_items:
                raise ValueError(f"history {place} holds {item}; item indices go from 0 to {self.num_items - 1}")
        return items

    def _rank(self, asked: list["_Asked"], k: int, kept: int, exclude_history: bool) -> Tensor:
        """Keys [B, k] of the best items for each request."""
        with self._group.turn:
            task = self._group.first(lambda: self._task(asked, k, kept, exclude_history))
            with self._group.in_step():
                return self._best(task)

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Answers once from the items of this process alone: the first answer takes longer than all others."""
        if self.tower.hindexer is not None and self.num_items > STAGE_1:
            assert self._corpora is not None
        self.raw_ids.places([])
        alone = copy(self)
        alone._group = Group()
        alone.retrieve([[0]], 1)

    def follow(self) -> None:
        """On every rank but 0: takes its part in rank 0's answers, until rank 0 calls `release`."""
        while (task := self._group.next()) is not None:
            self.take_part(task)

    def release(self) -> None:
        """On rank 0: lets the others return from `follow`."""
        with self._group.turn:
            self._group.first(lambda: None)

    @torch.inference_mode()
    def take_part(self, task: "Task") -> None:
        """In the answer of rank 0 to some requests."""
        self._best(task)

    def _task(self, asked: list["_Asked"], k: int, kept: int, exclude_history: bool) -> "Task":
        query = self._queries(asked)
        for of, finite in zip(asked, _finite(query), strict=True):
            if not finite:
                raise ValueError(_too_large(f"request {of.place}"))
        excluded = [of.blocked + (of.items if exclude_history else []) for of in asked]
        if self._group.size > 1:
            query = _each(query, Tensor.cpu)
        return Task(self.digest, query, [of.allowed for of in asked], excluded, k, kept)

    def _best(self, task: "Task") -> Tensor:
        """Keys [B, k] of the best items of all processes."""
        device, own, k, kept = self._items.device, self._items.own, task.k, task.kept
        query = _each(task.query, lambda part: part.to(device))
        two_stages = query.hindexer is not None and kept < self.num_items
        few = [of is not None and (not two_stages or len(of) <= kept) for of in task.allowed]
        best_BK = torch.full((len(few), k), NOTHING, device=device)
        if rows := [row for row, are in enumerate(few) if are]:
            candidates = [sorted(set(task.allowed[row] or ()) - set(task.excluded[row])) for row in rows]
            here = [torch.tensor([item for item in of if item in own], dtype=torch.int64) for of in candidates]
            best_BK[rows] = self._best_of(_of_rows(query, rows), _padded(here).to(device), k)
        if rows := [row for row, are in enumerate(few) if not are]:
            of_rows, without = _of_rows(query, rows), [task.excluded[row] for row in rows]
            if two_stages:
                assert of_rows.hindexer is not None
                allowed = [task.allowed[row] for row in rows]
                best_BK[rows] = self._best_of(of_rows, self._stage_1(of_rows.hindexer[0], kept, allowed, without), k)
            else:
                best_BK[rows] = self._best_of_all(of_rows, without, k)
        if self._group.size == 1:
            return best_BK
        return self._group.gather(best_BK, k).topk(k).values

    def _best_of(self, query: Sides, index_BK: Tensor, k: int) -> Tensor:
        """Keys [B, k] of the best of each query's candidates, which are as in Items.scores."""
        score_BK = self._items.scores(query.similarity, index_BK)
        keys_BK = rank_keys(score_BK, index_BK).masked_fill(index_BK < 0, NOTHING)
        return merge(torch.full((len(keys_BK), k), NOTHING, device=keys_BK.device), keys_BK, k)

    def _stage_1(
        self, query_BH: Tensor, kept: int, allowed: list[list[int] | None], without: list[list[int]]
    ) -> Tensor:
        """Indices [B, <= kept] of those of the h-indexer's best items that are this process's, as Items.scores takes
        them. `allowed` and `without` have the only items that each query may find, and those that it may not."""
        device, keys = self._items.device, []
        for (start, corpus), bits in zip(self._corpora, self._may_find(allowed, without), strict=True):
            found = hindexer_topk(query_BH.to(corpus.blocks.device), corpus, kept, bits)
            if len(self._corpora) == self._group.size == 1:
                return found.items_BK
            of_part = rank_keys(found.scores_BK, found.items_BK + start)
            keys.append(of_part.masked_fill(found.items_BK < 0, NOTHING).to(device))
        # In the order of the items, as they are on each device.
        own_BN = torch.cat([torch.empty(len(query_BH), 0, dtype=torch.int64, device=device), *keys], dim=1)
        if len(keys) > 1:
            own_BN = _at_least(least_key(own_BN, kept), own_BN)
        every_BN = self._group.gather(own_BN, min(kept, self._largest_part))
        return split_keys(_at_least(least_key(every_BN, kept), own_BN))[0]

    def _best_of_all(self, query: Sides, without: list[list[int]], k: int) -> Tensor:
        """Keys [B, k] of the best items; `without` has the items to leave out for each query."""
        excluded = _Excluded(without, self._items.device)
        best_BK = torch.full((len(without), k), NOTHING, device=self._items.device)
        similarity = self.tower.similarity
        chunk = max(1, NUMBERS[self._items.device.type] // (len(without) * similarity.pair_numbers))
        for index_N, score_BN in self._items.all_scores(query.similarity, chunk):
            keys_BN = rank_keys(score_BN, index_N)
            excluded.erase(keys_BN, int(index_N[0]))
            best_BK = merge(best_BK, keys_BN, k)
        return best_BK

    def _may_find(self, allowed: list[list[int] | None], without: list[list[int]]) -> list[Tensor | None]:
        """For each device, bits of the items that each query may find, as `hindexer_topk` takes them; None if all may
        find all."""
        if not any(without) and all(of is None for of in allowed):
            return [None] * len(self._corpora)
        rows: list[list[np.ndarray]] = [[] for _ in self._corpora]
        for only, out in zip(allowed, without, strict=True):
            for of_part, (start, corpus) in zip(rows, self._corpora, strict=True):
                of_part.append(_bits(only, out, start, corpus.num_items))
        return [
            torch.from_numpy(np.stack(of_part)).to(corpus.blocks.device)
            for of_part, (_, corpus) in zip(rows, self._corpora, strict=True)
        ]

    def _queries(self, asked: list["_Asked"]) -> Sides:
        device, encoded = self._items.device, self._encoded(asked)
        values = self._values(asked, encoded)
        item_T = torch.tensor([item for items in encoded for item in items])
        vector_TD = self._items.rows(item_T.clamp(min=0))
        vector_TD[(item_T == UNKNOWN).to(device)] = self._unknown_1D
        times = _packed_times(asked, encoded) if sees_times(self.config.encoder) else ()
        packing = Packing(torch.tensor([len(items) for items in encoded]), 0, *times).to(device)
        rows, values = fetch_rows(self._tables, self.tower.schema, values)
        features = Features(values=values).to(device)
        return self.tower.query_sides(self.tower.queries(vector_TD, packing, rows, features))

    def _encoded(self, asked: list["_Asked"]) -> list[list[int]]:
        """The last L items of each history; an unknown item replaces an empty one."""
        return [of.items[-self.config.encoder.max_length :] or [UNKNOWN] for of in asked]

    def _values(self, asked: list["_Asked"], encoded: list[list[int]]) -> dict[str, Values]:
        """Features of the users, and of the events of the encoded items."""
        L = self.config.encoder.max_length
        events = [of.events[-L:] if of.events else [{}] * len(items) for of, items in zip(asked, encoded, strict=True)]
        values = self._reader.read("user", [of.user for of in asked], [f"request {of.place}" for of in asked])
        names = [f"request {of.place}, an event" for of, items in zip(asked, encoded, strict=True) for _ in items]
        return values | self._reader.read("event", [event for of_history in events for event in of_history], names)


@dataclass(frozen=True)
class _Asked:
    """A request in terms of item indices; UNKNOWN is an unknown item."""

    place: int
    """Number of the request."""
    items: list[int]
    user: Mapping[str, Any] = field(default_factory=dict)
    events: Sequence[Mapping[str, Any]] | None = None
    times: list[int] | None = None
    """Of the items, and of the request."""
    blocked: list[int] = field(default_factory=list)
    allowed: list[int] | None = None


@dataclass(frozen=True)
class Task:
    """What rank 0 of a group asks of all: some requests, encoded."""

    digest: str
    """Of the export that answers."""
    query: Sides
    allowed: list[list[int] | None]
    excluded: list[list[int]]
    k: int
    kept: int


def _of_rows(query: Sides, rows: list[int]) -> Sides:
    return _each(query, lambda part: part[rows])


def _each(query: Sides, change: Callable[[Tensor], Tensor]) -> Sides:
    hindexer = None if query.hindexer is None else tuple(map(change, query.hindexer))
    return Sides(tuple(map(change, query.similarity)), hindexer)


def _finite(sides: Sides) -> list[bool]:
    """Which queries or items are finite; the numbers among their features may be too large for that."""
    parts = [*sides.similarity, *(sides.hindexer or ())]
    finite: list[bool] = torch.stack([part.isfinite().flatten(1).all(1) for part in parts]).all(0).tolist()
    return finite


def _too_large(name: str) -> str:
    return f"{name}: a number among its features is too large"


def _list(request: Request, entry: str, place: int, of: Callable[[Any], list[Any]] = as_list) -> list[Any]:
    """An entry as a list, made by `of`. ValueError, with the request's number, for anything else, such as one text."""
    found: Any = request.get(entry)
    if isinstance(found, Set) and entry not in ("allowed", "blocked"):
        raise ValueError(f"request {place}: {entry} is a set, which has no order; it must be a list")
    try:
        return [] if found is None else of(found)
    except ValueError as error:
        raise ValueError(f"request {place}: {entry} {error}") from None


def _ids(request: Request, entry: str, place: int) -> list[str]:
    """An entry as the texts of its ids."""
    return _list(request, entry, place, lambda found: id_texts(as_list(found)))


def _times(request: Request, length: int, place: int) -> list[int]:
    """The times of the items of a request's history, and that of the request; empty without timestamps. ValueError,
    with the request's number, for invalid times or another number of them."""
    timestamps, time = _list(request, "timestamps", place), request.get("time")
    if timestamps and len(timestamps) != length:
        raise ValueError(f"request {place} has {len(timestamps)} timestamps for {length} items of its history")
    try:
        times = [whole(of) for of in timestamps]
    except ValueError as error:
        raise ValueError(f"request {place}: one of its timestamps {error}") from None
    for before, after in pairwise(times):
        if after < before:
            raise ValueError(
                f"request {place}: its timestamps fall, from {before} to {after}; they must be oldest first"
            )
    try:
        now = times[-1:] if time is None else [whole(time)]
    except ValueError as error:
        raise ValueError(f"request {place}: its time {error}") from None
    if times and now < times[-1:]:
        raise ValueError(f"request {place}: its time is {now[0]}; its last action was at {times[-1]}")
    return times and times + now


def _packed_times(asked: list[_Asked], encoded: list[list[int]]) -> tuple[Tensor, Tensor]:
    """When the encoded actions were, and when the queries after them are asked, int64 [T]."""
    times = [(of.times or [0] * (len(items) + 1))[-len(items) - 1 :] for of, items in zip(asked, encoded, strict=True)]
    time_T, asked_T = ([time for of in times for time in of[part]] for part in (slice(-1), slice(1, None)))
    return torch.tensor(time_T, dtype=torch.int64), torch.tensor(asked_T, dtype=torch.int64)


class _Excluded:
    """Items to leave out for each history."""

    def __init__(self, histories: list[list[int]], device: torch.device) -> None:
        lengths = torch.tensor([len(history) for history in histories], dtype=torch.int64)
        items = torch.tensor([item for history in histories for item in history], dtype=torch.int64)
        # UNKNOWN is no item's index, so it excludes nothing.
        self.row_T = torch.repeat_interleave(lengths).to(device)
        self.item_T = items.to(device)

    def erase(self, keys_BN: Tensor, start: int) -> None:
        """Sets the keys of excluded items to NOTHING, where column 0 is item `start`."""
        inside_T = (self.item_T >= start) & (self.item_T < start + keys_BN.shape[1])
        keys_BN[self.row_T[inside_T], self.item_T[inside_T] - start] = NOTHING


def _bits(only: list[int] | None, without: list[int], start: int, count: int) -> np.ndarray:
    """uint8 [count / 8], the lowest bit first: which of the items from `start` on are among `only` (None: all) and not
    among `without`. Takes time for these and not for every item, of which there are many."""

    def places(items: list[int]) -> np.ndarray:
        place = np.array(items, np.int64) - start
        return place[(place >= 0) & (place < count)]

    bits = np.full(-(-count // 8), 255 if only is None else 0, np.uint8)
    place = places(only or [])
    np.bitwise_or.at(bits, place >> 3, _BIT[place & 7])
    place = places(without)
    np.bitwise_and.at(bits, place >> 3, ~_BIT[place & 7])
    if count % 8:
        bits[-1] &= (1 << count % 8) - 1
    return bits


def _padded(candidates: list[Tensor], nothing: int = -1) -> Tensor:
    """[B, K] of rows of any lengths, with `nothing` after the last of each."""
    return pad_sequence(candidates, True, nothing)


def _at_least(least_B: Tensor, keys_BN: Tensor) -> Tensor:
    """The keys [B, K] that are not below these, in their order, and NOTHING after the last of each row."""
    return _padded([keys_N[keys_N >= least] for keys_N, least in zip(keys_BN, least_B, strict=True)], NOTHING)


def _devices(named: str | torch.device | Sequence[str | torch.device]) -> list[str | torch.device]:
    """As a list. ValueError for one that does not exist."""
    devices = list(named) if isinstance(named, Sequence) and not isinstance(named, str | bytes) else [named]
    if not devices:
        raise ValueError("there are no devices to retrieve on; cpu is always there")
    for name in devices:
        try:
            of = torch.device(name)
            there = of.type == "cpu" or (of.type == "cuda" and (of.index or 0) < torch.cuda.device_count())
        except (RuntimeError, TypeError):  # it is no name of a device
            there = False
        if not there:
            raise ValueError(f"there is no device {name} to retrieve on; cpu is always there")
    return devices


def _moved(tables: Mapping[str, Pieces], device: torch.device) -> dict[str, Pieces]:
    return {name: Pieces([piece.to(device) for piece in of.pieces]) for name, of in tables.items()}
