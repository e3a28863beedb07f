"""What callers ask and how it is answered, and its reading: raw ids and features -> item indices, times, features."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from itertools import pairwise
from typing import Any, Literal, TypedDict, get_args

import torch

from logitmix.common.messages import prefixed
from logitmix.common.values import as_list, from_one, id_texts, whole
from logitmix.modules.features import recency_rows
from logitmix.modules.schema import RECENCY, RECENCY_FEATURE, RECENCY_VALUES, WANTED, require_kind
from logitmix.serving.columns import ACTIONS
from logitmix.serving.directory.format import Contents
from logitmix.serving.expression import Filters
from logitmix.serving.texts import FEW

STAGE_1, LEAST_OF_STAGE_1, SHARE_OF_STAGE_1 = 100_000, 10_000, 0.01
"""The most and the fewest items that stage 1 keeps unless told otherwise, and the share of all items between them: the
paper's k', of 10 million."""
MANY = 1024
"""Items of an answer for which stage 1 keeps the most. A power of 2, so that a request does not depend on the others of
its batch (batcher.Question.group)."""
UNKNOWN = -1
"""Instead of an item's index: an unknown item."""
_LISTS, _LONGEST = 32, 2**14
"""Lists of ids whose items are cached, and ids of one that is: clients send the same list again."""

MOST_EXPLAINED = 100

UnknownIds = Literal["skip", "unknown", "refuse"]


class Request(TypedDict, total=False):
    """One user, their features, and how to answer: the same object in Python, over HTTP and in a file of requests.
    Every entry may be missing, or None. An id is text or a whole number of 64 bits, and no float; arrays and tensors of
    these are lists as well. The entries from `k` on are those of `Options`."""

    history: Sequence[str | int]
    """Raw item ids, oldest first."""
    timestamps: Sequence[int]
    """The times of these actions, one whole number each, never decreasing, in the unit of the dataset's timestamps. A
    model that uses recency derives it from them, except for events that state their recency; without both, recency is
    unknown. For a model whose encoder sees times, all is at one time without them. Other models accept timestamps and
    ignore them, so clients can send every model the same request."""
    time: int
    """When the request is made, in the same unit and not before the last action; the default is that action's time.
    Used by models whose encoder sees times or whose items have dates; to these, the items' ages are unknown without
    both."""
    user: Mapping[str, Any]
    """Features of the user by name; the manifest's signature has their names and kinds."""
    events: Sequence[Mapping[str, Any]]
    """Features of the events, one mapping for each item of the history."""
    want: str | int | None
    """Which kind of action is to come after the history, for a model that knows it (model.wanted), which otherwise
    answers for any; other models ignore it."""
    allowed: Sequence[str | int]
    """Raw ids: if given, only these items are ranked; all of them by the similarity, unless they are more than the
    h-indexer keeps."""
    blocked: Sequence[str | int]
    """Raw ids of items to leave out. Unknown ids are ignored, here and in `allowed`."""
    where: str
    """A condition on the export's filterable columns, such as `price < 50 or category = shoes`: only items for which it
    is true are ranked, k' of them in stage 1."""
    limit: Mapping[str, int]
    """Most items of the answer that have the same value of a filterable column: `{"category": 3}`. Of the ranking,
    items that would be one too many are left out; those without a value are not."""
    k: int
    unknown: UnknownIds
    exclude_history: bool
    stage1: int
    explain: bool
    columns: bool
    boost_new: float


@dataclass(frozen=True)
class Options:
    """How a request is answered. ValueError that names the option for a value that is none of its values."""

    k: int = 10
    """Items of an answer, at least 1; fewer where fewer are left."""
    unknown: UnknownIds = "skip"
    """What happens to ids of a history that are not in the corpus: they are left out ("skip"), replaced with an unknown
    item ("unknown"), or an error ("refuse")."""
    exclude_history: bool | None = None
    """Whether all items of a history are left out of the ranking; by default as the model was evaluated."""
    stage1: int | None = None
    """Items that the h-indexer keeps for the similarity to rank, at least k; by default a hundredth of all, but from
    10,000 to 100,000, and for a k of 1,024 or more 100,000."""

    explain: bool = False
    """Whether each item of an answer says why it is there; for a k of at most 100."""
    columns: bool = False
    """Whether each item has its values of the filterable columns."""
    boost_new: float = 0.0
    """Added to the scores of items whose first action is in the last week of the dataset, or that have none, as the
    filterable column `new` says."""

    def __post_init__(self) -> None:
        for name in ("k", "stage1"):
            if (value := getattr(self, name)) is not None or name == "k":
                with prefixed(f"{name} "):
                    object.__setattr__(self, name, from_one(value))
        if self.stage1 is not None and self.stage1 < self.k:
            raise ValueError(f"stage1 is {self.stage1}; it must be at least k ({self.k})")
        if not isinstance(self.exclude_history, bool | None):
            raise ValueError(f"exclude_history is {self.exclude_history!r:.40}; it must be True, False or None")
        for name in ("explain", "columns"):
            if not isinstance(given := getattr(self, name), bool):
                raise ValueError(f"{name} is {given!r:.40}; it must be True or False")
        if self.explain and self.k > MOST_EXPLAINED:
            raise ValueError(f"explain is for at most {MOST_EXPLAINED} items, and k is {self.k}")
        boost: object = self.boost_new
        if isinstance(boost, bool) or not isinstance(boost, int | float) or not math.isfinite(boost):
            raise ValueError(f"boost_new is {boost!r:.40}; it must be a finite number")
        if self.unknown not in get_args(UnknownIds):
            raise ValueError(f"unknown is {self.unknown!r:.40}; it must be 'skip', 'unknown' or 'refuse'")

    def kept(self, num_items: int) -> int:
        """K: items that stage 1 keeps of so many."""
        if self.stage1 is not None:
            return self.stage1
        least = LEAST_OF_STAGE_1 if self.k < MANY else STAGE_1
        return max(self.k, min(STAGE_1, max(least, round(SHARE_OF_STAGE_1 * num_items))))


@dataclass(frozen=True)
class Question:
    """A request, and how it is answered."""

    request: Request
    options: Options = Options()

    @classmethod
    def of(cls, request: Request, defaults: Mapping[str, Any]) -> "Question":
        """Returns the question that a request asks.

        Args:
            request: The request, whose entries have not been checked yet.
            defaults: Options for a request that does not say; `stage1` becomes at least the request's `k`.

        Raises:
            ValueError: An option has a value that is none of its values.
        """
        given = {}
        if isinstance(request, Mapping):
            given = {name: of for name in OPTIONS if (of := request.get(name)) is not None}
        options = Options(**{**defaults, "stage1": None, **given})
        least = defaults.get("stage1")
        if least is not None and options.stage1 is None:
            options = replace(options, stage1=max(least, options.k))
        return cls(request, options)

    @property
    def group(self) -> tuple[object, ...]:
        """Questions of a group are answered by one call. Their k's differ by less than a factor of 2, so that a large
        one does not slow the others down."""
        return self.options.k.bit_length(), replace(self.options, k=1)


OPTIONS = tuple(option.name for option in fields(Options))
"""The entries of a request that say how it is answered."""


@dataclass(frozen=True)
class Asked:
    """A request in terms of item indices; UNKNOWN is an unknown item."""

    place: int
    """Number of the request."""
    items: list[int]
    user: Mapping[str, Any] = field(default_factory=dict)
    events: Sequence[Mapping[str, Any]] | None = None
    times: list[int] | None = None
    """Of the items (of the request, if there are none), and of the request."""
    blocked: list[int] = field(default_factory=list)
    allowed: list[int] | None = None
    where: list[str] = field(default_factory=list)
    """Conditions, all of which must hold."""
    limit: Mapping[str, int] = field(default_factory=dict)
    is_cold: bool = False
    """Whether nothing is known of the user, so that what is popular is the answer."""


class RequestReader:
    """Reads requests to an export: what they must have, and the items that their ids name."""

    def __init__(self, contents: Contents, filters: Filters, where: str = "") -> None:
        """`where`: a condition on the items of all answers. ValueError if there can be none such."""
        self._filters, self._where = filters, [where] if where.strip() else []
        if self._where:
            filters.allowed(*self._where)
        self._raw_ids, self._about = contents.raw_ids, contents.about
        self._places_of_list = lru_cache(_LISTS)(contents.raw_ids.places)
        # A dataset may have a feature of this name that means something else.
        has_recency = RECENCY_FEATURE in contents.about.schema.features
        self._wanted = contents.about.model.wanted
        self.wants = [of for of in contents.vocabularies[WANTED + self._wanted] if of] if self._wanted else []
        self.derives_recency = has_recency and tuple(contents.vocabularies[RECENCY]) == RECENCY_VALUES

    def read(self, request: Request, place: int, unknown: UnknownIds) -> Asked:
        """A request. ValueError, with its number, if it cannot be answered; values of features are not read here."""
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
        if self.derives_recency and _list(request, "timestamps", place):
            recency = recency_rows(torch.tensor(times[:-1]), torch.zeros(1, dtype=torch.int64)).tolist()
            unstated = zip(recency, events or [{}] * len(history), strict=True)
            events = [{RECENCY: RECENCY_VALUES[row], **event} for row, event in unstated]
        if self._wanted and history:
            events = self._with_next(events or [{}] * len(history))
        want = self._want(request, place) if self._wanted else None
        with prefixed(f"request {place}: "):
            items = self.known(history) if unknown == "refuse" else self._places(history)
        kept = [at for at, item in enumerate(items) if item != UNKNOWN or unknown == "unknown"]
        known_events = [events[at] for at in kept] if events else None
        if known_events and want is not None:
            known_events[-1] = {**known_events[-1], WANTED + self._wanted: want}
        counts = self._filters.columns.get(ACTIONS)
        has_counts = counts is not None and counts.kind == "number"
        knows_nothing = not kept and not user
        if knows_nothing and not has_counts and not self._about.schema.of("user"):
            raise ValueError(
                f"request {place} names no known item, and the export has no column {ACTIONS!r}, which says what is "
                f"popular; give an item, or export with --filterable {ACTIONS}"
            )
        return Asked(
            place,
            [items[at] for at in kept],
            user,
            known_events,
            [*([times[at] for at in kept] or times[-1:]), times[-1]] if times else None,
            self._some(_ids(request, "blocked", place)),
            None if request.get("allowed") is None else self._some(_ids(request, "allowed", place)),
            self._conditions(request, place),
            self._limit(request, place),
            knows_nothing and has_counts,
        )

    def _want(self, request: Request, place: int) -> str | None:
        """What action is to come. ValueError, with the request's number, for what training saw no action of."""
        if request.get("want") is None:
            return None
        with prefixed(f"request {place}: want "):
            (want,) = id_texts([request["want"]])
        require_kind(f"request {place}: want", want, self.wants)
        return want

    def _with_next(self, events: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """The events, each with the value that the next one has."""
        name = self._wanted
        own = any(of.name == name for of in self._about.schema.of("event"))
        after = [*(of.get(name) for of in events[1:]), None]
        return [
            {key: of for key, of in event.items() if own or key != name} | {WANTED + name: value}
            for event, value in zip(events, after, strict=True)
        ]

    def _limit(self, request: Request, place: int) -> dict[str, int]:
        with prefixed(f"request {place}: "):
            return self._filters.require_limit(request.get("limit") or {})

    def _conditions(self, request: Request, place: int) -> list[str]:
        """On the items that a request may find. ValueError, with its number, for what is no condition."""
        given: Any = request.get("where")
        if given is None or given == "":
            return self._where
        if not isinstance(given, str):
            raise ValueError(f"request {place}: where is {given!r:.40}; it must be text, such as 'price < 50'")
        with prefixed(f"request {place}: "):
            self._filters.allowed(*self._where, given)
        return [*self._where, given]

    def known(self, raw_ids: Sequence[str | int]) -> list[int]:
        """Item indices of raw ids. Raises ValueError that names the ids that are not in the corpus, and for what is no
        list of ids, such as a single text."""
        with prefixed("the list of ids "):
            texts = id_texts(as_list(raw_ids))
        places = self._places(texts)
        unknown = list(dict.fromkeys(text for text, place in zip(texts, places, strict=True) if place == UNKNOWN))
        if unknown:
            shown = ", ".join(map(repr, unknown[:10])) + (", …" if len(unknown) > 10 else "")
            raise ValueError(
                f"no item of {self._about.source.dataset} has the id {shown}; give raw ids of its "
                f"{self._about.num_items} items, such as {self._raw_ids[0]!r}"
            )
        return list(places)

    def checked(self, history: Sequence[int], place: int) -> Asked:
        """A history of item indices. ValueError, with its number, for anything else, and for an empty one."""
        last = len(self._raw_ids) - 1
        try:
            items = [whole(item) for item in as_list(history)]
        except ValueError as error:
            raise ValueError(
                f"history {place} is no list of item indices: it or one {error}; item indices go from 0 to {last}"
            ) from None
        if not items:
            raise ValueError(f"history {place} is empty; give at least one item")
        for item in items:
            if not 0 <= item <= last:
                raise ValueError(f"history {place} holds {item}; item indices go from 0 to {last}")
        return Asked(place, items, where=self._where)

    def _some(self, texts: list[str]) -> list[int]:
        """Item indices of those ids that are in the corpus."""
        return [item for item in self._places(texts) if item != UNKNOWN]

    def _places(self, texts: list[str]) -> list[int]:
        """Item indices, UNKNOWN where no item has the id."""
        if len(texts) < FEW:
            return [UNKNOWN if (item := self._raw_ids.find(text)) is None else item for text in texts]
        return self._places_of_list(tuple(texts)) if len(texts) <= _LONGEST else self._raw_ids.places(texts)


def of_one(problem: str) -> str:
    """What is wrong with a request, for who gave one alone and knows nothing of its number."""
    return problem.replace("request 0", "the request", 1)


def _list(request: Request, entry: str, place: int, of: Callable[[Any], list[Any]] = as_list) -> list[Any]:
    """An entry as a list, made by `of`. ValueError, with the request's number, for anything else, such as one text."""
    found: Any = request.get(entry)
    if found is None:
        return []
    if isinstance(found, set | frozenset) and entry in ("history", "timestamps", "events"):
        raise ValueError(f"request {place}: {entry} is a set, which has no order; it must be a list")
    with prefixed(f"request {place}: {entry} "):
        return of(found)


def _ids(request: Request, entry: str, place: int) -> list[str]:
    """An entry as the texts of its ids."""
    return _list(request, entry, place, lambda found: id_texts(as_list(found)))


def _times(request: Request, length: int, place: int) -> list[int]:
    """The times of the items of a request's history, and that of the request, at which all are without timestamps;
    empty without both. ValueError, with the request's number, for invalid times or another number of them."""
    timestamps, time = _list(request, "timestamps", place), request.get("time")
    if timestamps and len(timestamps) != length:
        raise ValueError(f"request {place} has {len(timestamps)} timestamps for {length} items of its history")
    with prefixed(f"request {place}: one of its timestamps "):
        times = [whole(of) for of in timestamps]
    for before, after in pairwise(times):
        if after < before:
            raise ValueError(
                f"request {place}: its timestamps fall, from {before} to {after}; they must be oldest first"
            )
    with prefixed(f"request {place}: its time "):
        now = times[-1:] if time is None else [whole(time)]
    if times and now < times[-1:]:
        raise ValueError(f"request {place}: its time is {now[0]}; its last action was at {times[-1]}")
    return (times or length * now) + now
