"""The door of serving: requests -> an export's best items for each. request.py reads what is asked, encoding.py makes
queries of it, and ranking.py finds their best items.

Axes: B histories.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NotRequired

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from typing_extensions import TypedDict  # pydantic reads no other before Python 3.12

from logitmix.common.messages import naming_urls
from logitmix.common.storage import fetch
from logitmix.modules.schema import WANTED, require_kind
from logitmix.serving.columns import ACTIONS, NEW, Column
from logitmix.serving.directory.format import Contents
from logitmix.serving.directory.reader import read
from logitmix.serving.encoding import Encoder, Histories, require_finite
from logitmix.serving.explain import Named, Why, explain
from logitmix.serving.expression import Allowed, Filters
from logitmix.serving.features import FeatureReader
from logitmix.serving.group import Group
from logitmix.serving.model import named, trained_tower
from logitmix.serving.ranking import Ranker, Task, each
from logitmix.serving.request import UNKNOWN, Asked, Options, Question, Request, RequestReader, UnknownIds, of_one
from logitmix.serving.topk import NOTHING, boosted, merge, rank_keys, split_keys

_FIRST, _GROWTH = 4, 16
"""How many times k items are looked at first where there are limits, and how many times more then."""
_QUERIES = 32
"""Histories ranked at once."""


@dataclass(frozen=True, eq=False)
class Retrieved:
    """The best items of each history, on the CPU."""

    items: Tensor
    """int64 [B, k]: item indices, highest score first, equal scores by rising index; -1 where none is left."""
    scores: Tensor
    """FP32 [B, k]: the similarity; -inf where no item is left."""


class Row(Named):
    """One line of a ranking for people to read."""

    rank: int
    """From 1."""
    score: float
    """The similarity, with the boost of what is new."""
    columns: NotRequired[dict[str, float | str]]
    """Its values of the filterable columns, without those that it lacks; where they are asked for."""
    why: NotRequired[Why]
    """Why it is there; where that is asked for."""


class Missing(TypedDict):
    """What of the items is out of reach, where shards rank them."""

    missing_shards: NotRequired[list[int]]
    """Shards that are out of reach, counted from 1."""
    missing_share: NotRequired[float]
    """Share of the items that is in them."""


class Answer(Missing):
    """The answer to one request: `items`, or the `error` that says why there are none."""

    items: NotRequired[list[Row]]
    """The best one first."""
    fallback: NotRequired[Literal["popular"]]
    """There where nothing is known of the user: the items are those with the most actions, and that number is their
    score."""
    error: NotRequired[str]
    """What is wrong with the request, in one line."""


class Retriever:
    """Answers with the trained model's top-k, from a serving directory."""

    def __init__(
        self,
        contents: Contents,
        device: str | torch.device = "cpu",
        group: Group | None = None,
        where: str = "",
        shared: Path | None = None,
    ) -> None:
        """`group` says which part of the items is ranked here, or who ranks them; all here by default. `where`: a
        condition on the items of all answers; ValueError if the export cannot have it. `shared`: a folder of processes
        that answer from the same exports on the CPU, where they share what they make of the items."""
        about = contents.about
        self.config, self.source, self.exclude_history = about.model, about.source, about.exclude_history
        self.raw_ids, self.titles, self._num_items = contents.raw_ids, contents.titles, about.num_items
        self.digest, self.delta = contents.digest, contents.delta
        self.files = contents.files
        weights = {name: of.to(device) for name, of in contents.weights.items()}
        self.tower = trained_tower(about.model, about.schema, weights)
        self.columns, self.kinds = contents.columns, about.filterable
        self.filters = Filters(contents.columns, about.num_items)
        self._reader = RequestReader(contents, self.filters, where)
        self._ranker = Ranker(contents, self.tower, group or Group(), shared)
        self.features = FeatureReader(about.schema, contents.vocabularies, contents.projections)
        tables = {name: of.to(torch.device(device)) for name, of in contents.tables.items()}
        self._encoder = Encoder(self.tower, tables, self.features, self._ranker.items)
        self._by_actions: tuple[Column, Tensor] | None = None
        """The column of actions, and the keys [X] of all items in its order."""

    @classmethod
    @naming_urls()
    def load(cls, path: str | Path, device: str | torch.device = "cpu", where: str = "") -> "Retriever":
        """Reads a serving directory. On the CPU rows and items stay in their files until they are used.

        Args:
            path: Path or URL of the serving directory.
            device: Where the model, its tables and the items go: cpu or cuda.
            where: A condition that the items of all answers fulfill (serving/expression.py).

        Raises:
            ValueError: There is no intact serving directory of this format version, or the device or the condition
                cannot be; the message names the path and what to do.
        """
        if not isinstance(path, str | Path):
            raise ValueError(f"the path is {path!r:.100}; it must be text or a Path")
        try:
            torch.empty(0, device=device)
        except (AssertionError, RuntimeError, TypeError):
            raise ValueError(f"there is no device {device} to retrieve on; cpu is always there") from None
        return cls(read(fetch(path)), device, where=where)

    @property
    def described(self) -> str:
        """What answers, for a line of a log."""
        return f"{self.num_items:,} items of {self.source.dataset}, step {self.source.step} of run {self.source.run}"

    @property
    def num_items(self) -> int:
        """X; the items after these in `raw_ids` were removed, and no answer has them."""
        return self._num_items

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
        unknown here. The h-indexer keeps `stage1` items (by default as Options.kept says), by products in INT8, which
        the similarity ranks. If there are no more items than that, or no h-indexer, the similarity ranks the whole
        corpus.

        Raises ValueError for an empty history, for a value that is not an item index, and for a k below 1 or above
        `stage1`; WrittenInPlace, an OSError, if a file of the export has been written to.
        """
        options = Options(k, exclude_history=exclude_history, stage1=stage1)
        if not isinstance(histories, Iterable):
            raise ValueError(f"the histories are {histories!r:.100}; they must be a list of lists of item indices")
        self.files.check()
        asked = [self._reader.checked(history, place) for place, history in enumerate(histories)]
        keys_BK = self._ranked(asked, options)
        return Retrieved(*split_keys(F.pad(keys_BK, (0, options.k - keys_BK.shape[1]), value=NOTHING)))

    def recommend(
        self,
        requests: Sequence[Request],
        k: int = 10,
        unknown: UnknownIds = "skip",
        exclude_history: bool | None = None,
        stage1: int | None = None,
    ) -> list[Answer]:
        """Answers requests, each as HTTP's /retrieve would.

        A request that cannot be answered has an `error` in place of `items`, and the others are answered. If nothing is
        known of the user (no item of the history, no feature), the answer is what is popular.

        Args:
            requests: What is asked. An entry of a request counts before the argument of the same name.
            k: Items of an answer; fewer if fewer are left.
            unknown: What happens to ids of a history that are not in the corpus, as in `Options`.
            exclude_history: Whether all items of a history are left out; by default as the model was evaluated.
            stage1: Items that the h-indexer keeps for the similarity to rank, as in `Options`.

        Returns:
            An answer to each request, in their order.

        Raises:
            ValueError: The requests are no list, or an argument has a value that is none of its values.
        """
        if isinstance(requests, str | bytes | Mapping) or not isinstance(requests, Iterable):
            raise ValueError(f"the requests are {requests!r:.100}; they must be a list of mappings, one for each user")
        return self.ask(requests, asdict(Options(k, unknown, exclude_history, stage1)))

    def ask(self, requests: Iterable[Request], defaults: Mapping[str, Any]) -> list[Answer]:
        """As `recommend`, with defaults for any of the options."""
        answers: dict[int, Answer] = {}
        questions: dict[int, Question] = {}
        for place, request in enumerate(requests):
            try:
                questions[place] = Question.of(request, defaults)
            except ValueError as error:
                answers[place] = {"error": f"the request: {error}"}
        answers |= zip(questions, self.answer(list(questions.values())), strict=True)
        return [answers[place] for place in sorted(answers)]

    @torch.inference_mode()
    def answer(self, questions: Sequence[Question]) -> list[Answer]:
        """The answer to each question. Those with the same options are ranked together."""
        groups: dict[tuple[object, ...], list[int]] = defaultdict(list)
        for place, question in enumerate(questions):
            groups[question.group].append(place)
        answers: dict[int, Answer] = {}
        for places in groups.values():
            answers |= zip(places, self._of_group([questions[place] for place in places]), strict=True)
        return [answers[place] for place in range(len(questions))]

    def _of_group(self, questions: Sequence[Question]) -> list[Answer]:
        """Answers to questions with the same options but for k. If one of them cannot be answered, each half is
        answered by itself."""
        try:
            return self._together(questions)
        except ValueError as error:
            if len(questions) == 1:
                return [{"error": of_one(str(error))}]
        half = len(questions) // 2
        return self._of_group(questions[:half]) + self._of_group(questions[half:])

    def _together(self, questions: Sequence[Question]) -> list[Answer]:
        """As `_of_group`. ValueError if one of them cannot be answered."""
        options = replace(questions[0].options, k=max(of.options.k for of in questions))
        asked = self._all_asked([of.request for of in questions], options.unknown)
        keys_BK = self._ranked(asked, options)
        rows, found = self._rows(keys_BK), split_keys(keys_BK)[0].tolist()
        if options.columns:
            for of_request, items in zip(rows, found, strict=True):
                for row, item in zip(of_request, items, strict=False):
                    row["columns"] = self.values(item)
        if options.explain:
            self._explain(rows, asked, found)
        answers = []
        for of, request, all_rows in zip(questions, asked, rows, strict=True):
            best = all_rows[: of.options.k]
            if not all(math.isfinite(row["score"]) for row in best):
                problem = "the request's scores are not finite: a number among its features is too large"
                answers.append(Answer(error=problem))
                continue
            answer: Answer = {"items": best}
            if request.is_cold:
                answer["fallback"] = "popular"
            answer.update(self.without(self._ranker.group.missed))  # type: ignore[typeddict-item]
            answers.append(answer)
        return answers

    def without(self, parts: Sequence[int]) -> Missing:
        """Says which parts of the items are missing, counted from 1, and their share of the items; nothing where no
        shards rank them."""
        if not self._ranker.group.asks_shards:
            return {}
        items = sum(self._ranker.items_of(part) for part in parts)
        return {"missing_shards": [part + 1 for part in parts], "missing_share": round(items / self.num_items, 6)}

    @torch.inference_mode()
    def rows(
        self,
        raw_history: Sequence[str | int],
        k: int,
        exclude_history: bool | None = None,
        stage1: int | None = None,
    ) -> list[Row]:
        """`retrieve` for one history of raw ids, for people to read: k rows, or fewer if fewer items are left."""
        options = Options(k, exclude_history=exclude_history, stage1=stage1)
        self.files.check()
        (rows,) = self._rows(self._ranked([self._reader.checked(self.indices_of(raw_history), 0)], options))
        return rows

    def _rows(self, keys_BK: Tensor) -> list[list[Row]]:
        found_BK, score_BK = split_keys(keys_BK)
        return [
            [
                Row(rank=rank, id=self.raw_ids[item], title=self._title(item), score=score)
                for rank, (item, score) in enumerate(zip(items, scores, strict=True), start=1)
                if item >= 0
            ]
            for items, scores in zip(found_BK.tolist(), score_BK.tolist(), strict=True)
        ]

    def _explain(self, rows: list[list[Row]], asked: list[Asked], found: list[list[int]]) -> None:
        """Says of each row why it is there."""
        sides = self._encoder.queries(asked).similarity if asked else ()
        for place, (of_request, request, items) in enumerate(zip(rows, asked, found, strict=True)):
            if request.is_cold:  # the model has no part in what is popular
                whys = [Why(components=[], similar=[]) for _ in of_request]
            else:
                query = tuple(part[place : place + 1] for part in sides)
                known = [item for item in request.items[-self.config.encoder.max_length :] if item != UNKNOWN]
                whys = explain(self.tower, self._ranker.items, query, items[: len(of_request)], known, self._named)
            for row, why in zip(of_request, whys, strict=True):
                row["why"] = why

    def _title(self, item: int) -> str | None:
        return self.titles[item] if self.titles else None

    def _named(self, item: int) -> Named:
        return {"id": self.raw_ids[item], "title": self._title(item)}

    def values(self, item: int) -> dict[str, float | str]:
        """Of the filterable columns, by name, without those that the item lacks."""
        found = {name: column.shown(item) for name, column in self.filters.columns.items()}
        return {name: value for name, value in found.items() if value is not None}

    def wanted_row(self, kind: str) -> tuple[str, int]:
        """The feature that says which kind of action is to come, and a kind's row in its table. ValueError if training
        saw none of that kind, or if the model has no such feature."""
        if not self.config.wanted:
            raise ValueError("--want is for models with model.wanted, which this one lacks; leave it out")
        require_kind("--want", kind, self._reader.wants)
        name = WANTED + self.config.wanted
        return name, self.features.rows(name, [kind])[0]

    @torch.inference_mode()
    def query_sides(self, requests: Sequence[Request], unknown: UnknownIds = "skip") -> dict[str, Tensor]:
        """What both stages take of the queries: similarity.0, … and hindexer.0, each FP32 [B, ...]. Its product
        with a vector of hindexer.faiss is the h-indexer's score, and with one of similarity.faiss the similarity.

        Raises ValueError, with the request's number, from 0, for one that is malformed or has nothing to encode.
        """
        asked = self._all_asked(requests, Options(unknown=unknown).unknown)
        for of in asked:
            if of.is_cold and not self.tower.schema.of("user"):
                raise ValueError(f"request {of.place} names no known item; give at least one")
        return named(self._encoder.queries(asked))

    @torch.inference_mode()
    def best(
        self,
        read: Histories,
        excluded: list[list[int]],
        options: Options,
        only: Allowed | None = None,
        limit: Mapping[str, int] = MappingProxyType({}),
        new: Allowed | None = None,
    ) -> Retrieved:
        """`retrieve` for histories that are read already. `excluded` has the items that each may not find, whatever the
        options say; all may find those of `only` alone, and `limit` is as of a request. `new`: those that have the
        boost. ValueError that names the history, from 0, for one that is not finite."""
        query = self._encoder.sides(read)
        require_finite(query, [f"history {place}" for place in range(len(excluded))])

        def ranked(rows: list[int], only: Allowed | None, most: int) -> Tensor:
            B, some = len(rows), each(query, lambda part: part[rows])
            out = [excluded[row] for row in rows]
            return self._ranker.rank(
                Task(self.digest, some, [None] * B, out, options, most, [only] * B, [False] * B)
            ).cpu()

        return Retrieved(*split_keys(self._walked([limit] * len(excluded), options, ranked, new, only)))

    def indices_of(self, raw_ids: Sequence[str | int]) -> list[int]:
        """Item indices of raw ids. Raises ValueError that names the ids that are not in the corpus, and for what is no
        list of ids, such as a single text."""
        return self._reader.known(raw_ids)

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Answers once from the items of this process alone: the first answer takes longer than all others."""
        if self.tower.hindexer is not None and self.num_items > Options().kept(self.num_items):
            _ = self._ranker.corpus  # which is made here; a shard without items has none
        self.raw_ids.places([])
        task = self._task([self._reader.checked([0], 0)], Options(1), None, 1)
        self.stage_2(task, self.stage_1(task))

    @torch.inference_mode()
    def stage_1(self, task: Task) -> Tensor | None:
        """Returns what `Ranker.stage_1` finds among the items of this process alone."""
        return self._ranker.stage_1(task)

    @torch.inference_mode()
    def stage_2(self, task: Task, keys_BN: Tensor | None) -> Tensor:
        """Returns what `Ranker.stage_2` finds among the items of this process alone."""
        return self._ranker.stage_2(task, keys_BN)

    def _all_asked(self, requests: Sequence[Request], unknown: UnknownIds) -> list[Asked]:
        """The requests, numbered from 0. ValueError, with the number, for one that cannot be answered."""
        self.files.check()
        return [self._reader.read(request, place, unknown) for place, request in enumerate(requests)]

    def _ranked(self, asked: list[Asked], options: Options) -> Tensor:
        """Keys [B, k] of the best items for each request, or fewer than k if there are fewer items; on the CPU."""

        def ranked(rows: list[int], only: Allowed | None, most: int) -> Tensor:
            keys_BK = torch.full((len(rows), min(most, self.num_items)), NOTHING)
            warm = [place for place, row in enumerate(rows) if not asked[row].is_cold]
            for start in range(0, len(warm), _QUERIES):
                places = warm[start : start + _QUERIES]
                some = [asked[rows[place]] for place in places]
                keys_BK[places] = self._ranker.rank(self._task(some, options, only, most)).cpu()
            for place in set(range(len(rows))).difference(warm):
                popular_N = self._popular(asked[rows[place]], only)[: keys_BK.shape[1]]
                keys_BK[place, : len(popular_N)] = popular_N
            return keys_BK

        new = self.new_items() if options.boost_new else None
        return self._walked([of.limit for of in asked], options, ranked, new)

    def _popular(self, asked: Asked, only: Allowed | None) -> Tensor:
        """Keys [N] of the items that a request may find, those with the most actions first."""
        column = self.filters.columns[ACTIONS]
        if self._by_actions is None or self._by_actions[0] is not column:
            keys_X = rank_keys(column.values.nan_to_num(0.0).float(), torch.arange(self.num_items))
            self._by_actions = column, keys_X.sort(descending=True).values
        keys_X = self._by_actions[1]
        # Requests may also name items that were removed, which come after the others.
        may_X = np.full(len(self.raw_ids), asked.allowed is None)
        may_X[asked.allowed or []] = True
        may_X[asked.blocked] = False
        may_X = may_X[: self.num_items]
        if (may := self._may_find(asked, only)) is not None:
            may_X &= may.mask
        return keys_X[torch.from_numpy(may_X)[split_keys(keys_X)[0]]]

    def new_items(self) -> Allowed:
        """The items that are new, or of which nothing is known, by the column `new`. ValueError without one."""
        column = self.filters.columns.get(NEW)
        if column is None or column.kind != "number":
            raise ValueError("boost_new needs an export that says what is new: logitmix export --filterable new")
        return self.filters.allowed(f"{NEW} is null or {NEW} != 0")

    def _walked(
        self,
        limits: Sequence[Mapping[str, int]],
        options: Options,
        ranked: Callable[[list[int], Allowed | None, int], Tensor],
        new: Allowed | None = None,
        only: Allowed | None = None,
    ) -> Tensor:
        """Keys [B, k] of the best items within the limits, or fewer than k if there are fewer items; those of `new`
        have the boost. `ranked` has the best keys of some rows among some items, without limits, as many as it is told.
        More of the ranking is looked at where its first part does not suffice, and the whole at last: what is left is
        the same."""
        k = options.k

        def best(rows: list[int], most: int) -> Tensor:
            # Each part has stages of its own, and its best are among the best of both, whatever is added.
            if new is None:
                return ranked(rows, only, most)
            old_BK, new_BK = (ranked(rows, of if only is None else of & only, most) for of in (new.others, new))
            return merge(old_BK, boosted(new_BK, options.boost_new), min(most, self.num_items))

        self._ranker.group.missed, rows = (), list(range(len(limits)))
        if not any(limits):
            return best(rows, k)
        best_BK, most = torch.full((len(limits), min(k, self.num_items)), NOTHING), _FIRST * k
        while rows:
            short = []
            for row, keys_M in zip(rows, best(rows, most), strict=True):
                keys_N = keys_M[keys_M != NOTHING]
                kept = keys_N[self.filters.within(split_keys(keys_N)[0].numpy(), limits[row])][:k]
                best_BK[row, : len(kept)] = kept
                if len(kept) < k and len(keys_N) == most:
                    short.append(row)
            rows, most = short, _GROWTH * most
        return best_BK

    def _task(self, asked: list[Asked], options: Options, only: Allowed | None, most: int) -> Task:
        query = self._encoder.queries(asked)
        require_finite(query, [f"request {of.place}" for of in asked])
        exclude_history = self.exclude_history if options.exclude_history is None else options.exclude_history
        excluded = [of.blocked + (of.items if exclude_history else []) for of in asked]
        may = [self._may_find(of, only) for of in asked]
        task = Task(self.digest, query, [of.allowed for of in asked], excluded, options, most, may)
        return replace(task, few=self._ranker.few(task))

    def _may_find(self, asked: Asked, only: Allowed | None) -> Allowed | None:
        """Returns the items that a request's conditions and `only` allow; None if they allow all."""
        may = self.filters.allowed(*asked.where) if asked.where else None
        return may if only is None else only if may is None else may & only
