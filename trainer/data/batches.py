"""Prepared dataset -> training batches and evaluation users.

The content of a global batch is a function of (seed, epoch, step); rank r of w takes a contiguous part of its
sequences. So the data position is one integer, and a run can resume with another number of ranks.

Axes: B sequences, T positions, packed, Q of these that have a target, G groups, N uniform negatives of a group and M
drawn from the batch's targets, L history positions, V unique items, X items in the corpus.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from logitmix.modules.batch import Batch, Packing
from logitmix.modules.config import MOST_NEGATIVES, ModelConfig, sees_times
from logitmix.modules.kinds.date import NO_DATE, TICKS
from logitmix.modules.noise import Noise, derive_key, random_bits
from logitmix.modules.schema import ITEM, USER, USER_FEATURE, WANTED, Schema
from logitmix.modules.values import Values
from logitmix.trainer.config import TrainConfig
from logitmix.trainer.data.columns import index_type, ranges, user_blocks
from logitmix.trainer.data.dataset import Dataset
from logitmix.trainer.data.lookups import Ints, columns_of, look_up, unique_inverse
from logitmix.trainer.data.negatives import ExplicitNegatives, with_explicit

SHIFTS = 2**15
"""Days by which dates of items and times are later in a step, chosen by it: so that models learn from ages alone, and
not that items of the last dates were never taken, which are the newest ones in serving."""

Split = Literal["validation", "test"]


@dataclass(frozen=True, eq=False)
class HeldOut:
    """The actions that training does not see, as places among the dataset's actions, one for each user."""

    train_end: Ints
    """The first action that is held out."""
    targets: Mapping[Split, Ints]
    """The target, ranked given all of the user's earlier actions; -1 if there is none."""
    places: Ints | None = None
    """The actions that may be targets, held out or not, in order; None: all."""

    @property
    def sequence_end(self) -> Ints:
        """The place after each user's last target that training sees [U]; the user's first place or less if there is
        none."""
        if self.places is None:
            return self.train_end
        return _place_before(self.places, self.train_end) + 1

    def trained(self, dataset: Dataset) -> NDArray[np.bool_]:
        """Which users training sees: those with a target that is not held out, and an action before it."""
        return self.sequence_end - dataset.offsets[:-1] >= 2

    def training_places(self, dataset: Dataset) -> Iterator[Ints]:
        """The actions that may be trained on, those of some users at a time."""
        for users, bounds in user_blocks(dataset.offsets):
            yield ranges(bounds[:-1], np.maximum(self.train_end[users] - bounds[:-1], 0))

    def training_counts(self, dataset: Dataset) -> Ints:
        """How many actions each item has that may be trained on [X]."""
        count_X = np.zeros(dataset.num_items, np.int64)
        for places in self.training_places(dataset):
            count_X += np.bincount(dataset.items_flat[places], minlength=dataset.num_items)
        return count_X


def require_trained(dataset: Dataset, held_out: HeldOut) -> NDArray[np.bool_]:
    """Which users training sees; ValueError if there is none."""
    trained_U = held_out.trained(dataset)
    if not trained_U.any():
        raise ValueError(
            f"{dataset.path}: no user has 2 actions, which one training position takes, beside those held out for "
            "validation and test"
            + (", the second of them a target" if held_out.places is not None else "")
            + (f"; raise data.items ({dataset.num_items})" if dataset.whole else "; prepare it again from more data")
        )
    return trained_U


def leave_one_out(dataset: Dataset, validation: bool = True, places: Ints | None = None) -> HeldOut:
    """A user's last target is that of the test, and the one before it that of validation, if there is a validation
    part. `places` as in HeldOut."""
    start, end = dataset.offsets[:-1], dataset.offsets[1:]
    last = end - 1 if places is None else _place_before(places, end)
    before = last - 1 if places is None else _place_before(places, last)
    # A user who has one target has none for validation; with two, both have a history, or neither is ranked.
    first = np.where(before < start, last, before)
    targets: dict[Split, Ints] = {"test": np.where(first > start, last, -1)}
    if validation:
        targets = {"validation": np.where(before > start, before, -1), **targets}
    train_end = first if validation else last
    # Without a target, all actions say what goes with what.
    return HeldOut(np.where(last < start, end, train_end), targets, places)


def split_by_time(dataset: Dataset, share: float, validation: bool = True, places: Ints | None = None) -> HeldOut:
    """The latest `share` of all actions is for the test, and as much before it for validation; actions at equal times
    stay together, in the later part. A user's target is the first one in a part, if the user has an earlier action.
    Without `validation` only the test part is held out. `places` as in HeldOut."""
    start, end = dataset.offsets[:-1], dataset.offsets[1:]
    before, test = (_first_since(dataset, time) for time in starts_of_parts(dataset, share))

    def first_target(since_U: Ints, until_U: Ints) -> Ints:
        place_U = since_U
        if places is not None:
            place_U = np.append(places, len(dataset.items_flat))[np.searchsorted(places, since_U)]
        return np.where((start < place_U) & (place_U < until_U), place_U, -1)

    targets: dict[Split, Ints] = {"test": first_target(test, end)}
    if validation:
        targets = {"validation": first_target(before, test), **targets}
    for split, found in targets.items():
        if not (found >= 0).any():
            what = "an action" if places is None else "a target"
            raise ValueError(
                f"{dataset.path}: data.split is time and data.held_out {share}, but no user has {what} in the "
                f"{split} part and an action before it; give another data.held_out, or data.split leave-one-out"
            )
    return HeldOut(before if validation else test, targets, places)


def _place_before(places: Ints, end_U: Ints) -> Ints:
    """The last of some sorted places before each place; -1 if there is none."""
    return np.insert(places, 0, -1)[np.searchsorted(places, end_U)]


def starts_of_parts(dataset: Dataset, share: float) -> tuple[int, int]:
    """The times from which on a split by time has actions in its validation part and in its test part."""
    at = [int(len(dataset.items_flat) * (1 - parts * share)) for parts in (2, 1)]
    validation, test = np.partition(dataset.timestamps_flat, at)[at]
    return int(validation), int(test)


def _first_since(dataset: Dataset, time: int) -> Ints:
    """For each user, the place of the first action at that time or later; the end of the user's actions if there is
    none."""
    first_U = dataset.offsets[1:].copy()
    for users, bounds in user_blocks(dataset.offsets):
        before = np.concatenate([[0], np.cumsum(dataset.timestamps_flat[bounds[0] : bounds[-1]] < time)])
        first_U[users] = bounds[:-1] + np.diff(before[bounds - bounds[0]])
    return first_U


class TrainingBatches:
    """Batches of a rank, addressed by step: step s of the run is batch s % steps of epoch s // steps.

    A sequence is a user's last actions up to the last target, as many as the encoder takes; with a stride, every window
    of a longer history that has a target. Its positions are the actions but for the last one, and the target of a
    position is the action after it, if that may be one."""

    def __init__(
        self,
        dataset: Dataset,
        schema: Schema,
        model: ModelConfig,
        train: TrainConfig,
        held_out: HeldOut,
        *,
        explicit: ExplicitNegatives | None = None,
        weights: NDArray[np.float32] | None = None,
        first_U: NDArray[np.bool_] | None = None,
        pooled: Collection[str] = (),
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        """Finds the sequences that are trained on.

        With `model.item_id_dropout` and features of items, no item whose actions are all held out is a sampled
        negative: features, which are to rank it, would learn that it is never taken. Without, such items are negatives,
        and ids rank them behind others.

        Args:
            dataset: What is trained on.
            schema: The dataset's features that the batches should have.
            model: Its loss, wanted, rates of dropped ids, and the encoder's max_length and times are used.
            train: Its seed, batch_size and stride are used.
            held_out: The actions that are not trained on.
            explicit: Negatives that take the place of up to half of the sampled ones.
            weights: Those of the actions as targets [actions].
            first_U: Users whose last sequences begin each epoch [U].
            pooled: The tables whose bags the owner ranks pool.
            rank: The rank that trains on the batches.
            world_size: The number of ranks.

        Raises:
            ValueError: If no user has two actions, which a training position needs, besides those held out; if the
                negatives are all items, and these are too many; and for `explicit` negatives with in_batch or 0
                negatives.
        """
        loss = model.loss
        if not loss.negatives and dataset.num_items > MOST_NEGATIVES:
            raise ValueError(
                f"{dataset.path} has {dataset.num_items:,} items, and model.loss.negatives is 0, which is all of them; "
                f"there may be {MOST_NEGATIVES:,}: set it to a number such as 2048"
            )
        if explicit and not loss.negatives:
            raise ValueError(
                "model.loss.negatives is 0: all items are negatives of each target already; set it (of a run that is "
                "trained first, start.model.loss.negatives) to a number such as 128, or leave data.negatives out"
            )
        if explicit and loss.in_batch:
            raise ValueError(
                f"model.loss.in_batch is {loss.in_batch}, whose correction (logQ) is for negatives that are drawn, not "
                "for those of data.negatives; set model.loss.in_batch to 0, or leave data.negatives out"
            )
        self.dataset, self.schema, self.model, self.loss, self.seed = dataset, schema, model, loss, train.seed
        self.batch_size, self.rank, self.world_size = train.batch_size, rank, world_size
        self.explicit, self.weights, self.pooled, self.places = explicit, weights, pooled, held_out.places
        trained_U = require_trained(dataset, held_out)
        self.columns = columns_of(dataset, schema, trained_U)
        users, longest, stride = np.flatnonzero(trained_U), model.encoder.max_length, train.stride
        end = held_out.sequence_end[users]
        positions = end - dataset.offsets[users] - 1
        which, behind = _windows(positions, longest, stride)
        length_S = np.minimum(positions[which] - behind, longest)
        # The targets of a sequence are consecutive among all places that may be targets.
        first_S, last_S = end[which] - behind - length_S, end[which] - behind
        if self.places is not None:
            first_S, last_S = (np.searchsorted(self.places, of) for of in (first_S, last_S))
            has_S = last_S > first_S
            which, behind, length_S, first_S, last_S = (of[has_S] for of in (which, behind, length_S, first_S, last_S))
        # Of each sequence: its user, the place after its last action, its positions, its first target and how many.
        # Each rank has these of its own, so they are small.
        small = self._index = index_type(len(dataset.items_flat) + 1)
        self.user_S, self.end_S = users[which].astype(small), (end[which] - behind).astype(small)
        self.length_S, self.first_S = length_S.astype(small), first_S.astype(small)
        self.targets_S = (last_S - first_S).astype(small)
        # With a stride, a user has several: new actions are in the last one.
        self._first_S = None if first_U is None else first_U[self.user_S] & (behind == 0)
        self.said_of_left_out = ""
        """What to say of actions before the users' sequences, if there are any."""
        longer = positions[positions > longest]
        if len(longer) and not stride:
            self.said_of_left_out = (
                f"{len(longer):,} users have more actions than {longest} (model.encoder.max_length): their "
                f"{int((longer - longest).sum()):,} earlier ones are not trained on; with --train.stride, all are"
            )
        by_features = model.item_id_dropout > 0 and schema.of("item")
        unseen = np.flatnonzero(held_out.training_counts(dataset) == 0) if by_features else np.zeros(0, np.int64)
        self.num_drawable = dataset.num_items - len(unseen)
        self._drawable_before = unseen - np.arange(len(unseen))
        """How many items may be negatives that come before each one that may not."""
        self.log_q_X = self._log_q() if loss.in_batch else None
        self._order = lru_cache(maxsize=1)(self._shuffled)
        """The order of the sequences in an epoch. Two threads may ask for different epochs."""
        self.steps_per_epoch = -(-len(self.user_S) // self.batch_size)

    def users_of(self, step: int) -> Ints:
        """The users of the sequences of a step's global batch, over all ranks."""
        return self.user_S[self._sequences(step)].astype(np.int64)

    @property
    def steps_of_first(self) -> int:
        """Steps at the beginning of an epoch that have all sequences of `first_U`."""
        return 0 if self._first_S is None else -(-int(self._first_S.sum()) // self.batch_size)

    def _sequences(self, step: int) -> np.ndarray:
        epoch, index = divmod(step, self.steps_per_epoch)
        return self._order(epoch)[index * self.batch_size : (index + 1) * self.batch_size]

    def at(self, step: int, rank: int | None = None) -> Batch:
        """Returns the part of a step's global batch that a rank trains on, with its tensors on the CPU. The rank is
        that of this process unless `rank` names another."""
        epoch, index = divmod(step, self.steps_per_epoch)
        sequences = self._sequences(step)
        bounds, bounds_Q = (np.append(0, np.cumsum(of[sequences])) for of in (self.length_S, self.targets_S))
        # All ranks have about equally many positions.
        rank = self.rank if rank is None else rank
        cuts = np.array([rank, rank + 1]) * bounds[-1] / self.world_size
        first, last = np.searchsorted((bounds[:-1] + bounds[1:]) / 2, cuts).tolist()
        group_B = self._groups(bounds_Q)
        key = (self.seed, epoch, index + 1)
        negatives = self._negatives(key, sequences, bounds_Q, group_B, slice(first, last))
        weight_Q = self._weights(sequences, slice(bounds_Q[first], bounds_Q[last]))
        of_part = bounds_Q[first : last + 1] - bounds_Q[first]
        sequences = sequences[first:last]
        users, lengths = (of[sequences].astype(np.int64) for of in (self.user_S, self.length_S))
        inputs = ranges(self.end_S[sequences] - 1 - lengths, lengths)
        items, targets = self.dataset.items_flat, self.targets_S[sequences]
        place_Q, position_Q = self._place(ranges(self.first_S[sequences], targets)), None
        if self.places is not None:
            before_B = self.end_S[sequences] - lengths - (bounds[first:last] - bounds[first])
            position_Q = torch.from_numpy(place_Q - np.repeat(before_B, targets))
        bounds_G = self._bounds(of_part, group_B[first:last])
        if self.explicit:
            found_E = self._explicit(place_Q, np.repeat(users, targets))
            negatives, bounds_G = with_explicit(negatives, bounds_G, *found_E)
        named = np.concatenate([items[inputs], items[place_Q], negatives.ravel()])
        unique, inverse = unique_inverse(named, self.dataset.num_items)
        row_V = self._without("item_id_dropout", unique, unique, ITEM, step)
        instead = {}
        if USER_FEATURE in self.schema.features:
            own_B = self.columns["user"][USER].values[users]
            instead[USER] = self._without("user_id_dropout", users, own_B, USER, step)
        if self.model.wanted:
            wanted = WANTED + self.model.wanted
            next_T = self.columns["event"][wanted].values[inputs]
            instead[wanted] = self._without("wanted_dropout", inputs, next_T, wanted, step)
        found = look_up(self.columns, self.schema, row_V, unique, users, inputs, self.pooled, instead)
        seen = sees_times(self.model.encoder, self.schema)
        times = action_times(self.dataset.timestamps_flat, inputs) if seen else ()
        if self.schema.unit:
            shift = derive_key("ages", self.seed, step) % SHIFTS
            time_T, asked_T = (of + shift * TICKS[self.schema.unit] for of in times)
            times = time_T, asked_T
            values = dict(found.features.values)
            for name in (feature.name for feature in self.schema.features if feature.form.dated):
                date_V = values[name].values
                values[name] = Values(torch.where(date_V == NO_DATE, date_V, date_V + shift))
            found = replace(found, features=replace(found.features, values=values))
        input_T, target_Q, negative = np.split(inverse, [len(inputs), len(inputs) + len(place_Q)])
        return Batch(
            ids=found.ids,
            id_V=torch.from_numpy(unique),
            features=found.features,
            packing=Packing(torch.from_numpy(lengths), int(bounds[first]), *times),
            input_T=torch.from_numpy(input_T),
            target_T=torch.from_numpy(target_Q),
            negatives_GN=torch.from_numpy(negative.reshape(negatives.shape)),
            bounds=bounds_G,
            noise=Noise(derive_key("dropout", self.seed, step)),
            total_targets=int(bounds_Q[-1]),
            log_q_V=None if self.log_q_X is None else torch.from_numpy(self.log_q_X[unique]),
            position_Q=position_Q,
            weight_Q=weight_Q,
        )

    def _explicit(self, place_Q: Ints, user_Q: Ints) -> tuple[Ints, Ints]:
        """The explicit negatives of some targets, as of ExplicitNegatives."""
        assert self.explicit
        return self.explicit.of(place_Q, self.dataset.offsets[user_Q], (self.loss.negatives + 1) // 2)

    def said_of_explicit(self) -> str:
        """How many explicit negatives an epoch has; empty if none were asked for."""
        if not self.explicit:
            return ""
        negatives = having = 0
        for start in range(0, len(self.user_S), 2**14):
            part = slice(start, start + 2**14)
            place_Q = self._place(ranges(self.first_S[part], self.targets_S[part]))
            row_E, _ = self._explicit(place_Q, np.repeat(self.user_S[part], self.targets_S[part]))
            negatives, having = negatives + len(row_E), having + len(np.unique(row_E))
        return self.explicit.said(negatives, having, int(self.targets_S.sum()))

    def _weights(self, sequences: np.ndarray, part: slice) -> torch.Tensor | None:
        """The weights of some of the targets of a global batch's sequences, by the mean of all; zeros if all are."""
        if self.weights is None:
            return None
        all_Q = self.weights[self._place(ranges(self.first_S[sequences], self.targets_S[sequences]))].astype(np.float64)
        return torch.from_numpy((all_Q[part] / (all_Q.mean() or 1.0)).astype(np.float32))

    def _place(self, target: Ints) -> Ints:
        """Places among the dataset's actions, of places among the targets."""
        return target if self.places is None else self.places[target]

    def _groups(self, bounds: Ints) -> Ints:
        """The number of each sequence's group, for sequences with targets between `bounds` of a global batch's; in
        order, from 0."""
        match self.loss.share:
            case "batch":
                return np.zeros(len(bounds) - 1, np.int64)
            case "group":
                begun = bounds[:-1] // self.loss.group_positions
                return np.cumsum(np.diff(begun, prepend=begun[:1]) > 0)
            case _:
                return np.arange(len(bounds) - 1)

    def _bounds(self, bounds: Ints, group_B: Ints) -> list[int]:
        """Where the groups of some sequences begin and end among their targets; `bounds` and `group_B` are those of
        these sequences."""
        if self.loss.share == "batch":
            return [0, int(bounds[-1])]
        if self.loss.share == "position":
            return list(range(int(bounds[-1]) + 1))
        begins = np.flatnonzero(np.diff(group_B, prepend=-1))
        return [*bounds[begins].tolist(), int(bounds[-1])]

    def _negatives(self, key: tuple[int, ...], sequences: np.ndarray, bounds: Ints, group_B: Ints, part: slice) -> Ints:
        """Negatives [G, N + M] of the groups of `part` of a global batch's `sequences`, whose targets are between
        `bounds`, in the groups `group_B`; the key names the batch."""
        if not self.loss.negatives:
            return self._drawable(np.arange(self.num_drawable))[None]
        uniform_GN = self._drawable(self._draw(key, bounds, group_B, part, self.num_drawable, self.loss.negatives))
        if not self.loss.in_batch:
            return uniform_GN
        target_GM = self._draw((*key, 1), bounds, group_B, part, int(bounds[-1]), self.loss.in_batch)
        sequence_GM = np.searchsorted(bounds, target_GM, side="right") - 1
        place_GM = self._place((self.first_S[sequences] - bounds[:-1])[sequence_GM] + target_GM)
        return np.concatenate([uniform_GN, self.dataset.items_flat[place_GM]], axis=1)

    def _drawable(self, number_GN: Ints) -> Ints:
        """The items that may be negatives, by their numbers among these."""
        return number_GN + np.searchsorted(self._drawable_before, number_GN, side="right")

    def _draw(self, key: tuple[int, ...], bounds: Ints, group_B: Ints, part: slice, below: int, count: int) -> Ints:
        """Random numbers below a bound [G, count] for the groups of `part` of a global batch's sequences."""
        if self.loss.share == "position":
            # One key per sequence: there are many numbers, and a rank need not draw those of others.
            places, lengths = range(part.start, part.stop), np.diff(bounds)
            own = [np.random.default_rng([*key, at]).integers(0, below, (lengths[at], count)) for at in places]
            return np.concatenate([np.zeros((0, count), np.int64), *own])
        # A rank without sequences needs no negatives, but one set for the whole batch has no parts.
        wanted = np.zeros(1, np.int64) if self.loss.share == "batch" else np.unique(group_B[part])
        return _random(key, below, (int(group_B[-1]) + 1, count))[wanted]

    def _log_q(self) -> NDArray[np.float32]:
        """For each item [X], the log of the probability that a negative is that item. N of N + M are uniform; M are
        targets, which an epoch has as often as there are sequences that have them."""
        items = self.dataset.items_flat if self.places is None else self.dataset.items_flat[self.places]
        change = np.zeros(len(items) + 1, np.int16)
        np.add.at(change, self.first_S, 1)
        np.subtract.at(change, self.first_S + self.targets_S, 1)
        times = np.cumsum(change[:-1], dtype=np.int16, out=change[:-1])
        count_X = np.zeros(self.dataset.num_items, np.int64)
        for least in range(1, times.max() + 1):
            count_X += np.bincount(items[times >= least], minlength=len(count_X))
        N, M = self.loss.negatives, self.loss.in_batch
        q_X = (N / self.num_drawable + M * count_X / count_X.sum()) / (N + M)
        return np.log(q_X).astype(np.float32)

    def _without(self, name: str, ids_R: Ints, row_R: Ints, table: str, step: int) -> Ints:
        """Returns the rows of a table that a step uses. Those that are dropped at the rate of the setting `name`,
        chosen by their ids, are replaced by the row of unknown values."""
        if (rate := getattr(self.model, name)) == 0:
            return row_R
        key = derive_key(name, self.seed, step)
        bits_R = random_bits(key, torch.from_numpy(ids_R), torch.zeros(1, dtype=torch.int64))[:, 0].numpy()
        dropped = bits_R.astype(np.int64) + 2**31 < rate * 2**32
        return np.where(dropped, self.schema.table(table).unknown, row_R)

    def _shuffled(self, epoch: int) -> np.ndarray:
        order_S = np.random.default_rng([self.seed, epoch]).permutation(len(self.user_S)).astype(self._index)
        return order_S if self._first_S is None else order_S[np.argsort(~self._first_S[order_S], kind="stable")]


@lru_cache(maxsize=2)
def _random(key: tuple[int, ...], below: int, shape: tuple[int, int]) -> Ints:
    """Returns the random numbers below `below` that all ranks draw for a batch. They are kept, for a process that makes
    the parts of several ranks."""
    return np.random.default_rng(key).integers(0, below, shape)


def _windows(positions_U: Ints, longest: int, stride: int) -> tuple[Ints, Ints]:
    """The windows of histories with so many positions, each of `longest` positions: the place of its history among
    these, and how many positions it ends before the last one. Those of a history end `stride` positions apart, from its
    end back to the first one that has its first position, which may be shorter; without a stride there is the last one
    alone."""
    if not stride:
        return np.arange(len(positions_U)), np.zeros(len(positions_U), np.int64)
    count_U = 1 - (-np.maximum(positions_U - longest, 0) // stride)
    return np.repeat(np.arange(len(count_U)), count_U), stride * ranges(np.zeros_like(count_U), count_U)


def action_times(times: NDArray[np.integer], place_T: Ints) -> tuple[torch.Tensor, torch.Tensor]:
    """The times [T] of the actions at these places, and those of the actions after them, int64: when the queries that
    they answer are asked. The last action of all stands for one after it."""
    time_T, asked_T = (torch.from_numpy(times.take(place_T + of, mode="clip").astype(np.int64)) for of in (0, 1))
    return time_T, asked_T


@dataclass(frozen=True, eq=False)
class RankingUsers:
    """Users to rank the corpus for. The items of user u before the target are items[first[u] : place[u]], oldest first,
    and items[place[u]] is the target."""

    items: NDArray[np.integer]
    timestamps: NDArray[np.integer]
    user: Ints
    """Their indices."""
    first: Ints
    place: Ints
    max_length: int
    """L: the last L actions of a history are encoded."""
    at_last_action: bool = False
    """Whether the query is asked at the time of the history's last action; else at the target's."""
    asked_U: Ints | None = None
    """The times of the targets, where not all are at their `place`; any item then stands for those that are not."""

    def __len__(self) -> int:
        return len(self.place)

    @property
    def target(self) -> Ints:
        return self.items.take(self.place, mode="clip").astype(np.int64)

    @property
    def seen_lengths(self) -> Ints:
        return self.place - self.first

    @property
    def seen(self) -> Ints:
        """The whole histories, user after user."""
        return self.items[ranges(self.first, self.seen_lengths)].astype(np.int64)

    @property
    def lengths(self) -> Ints:
        return np.minimum(self.seen_lengths, self.max_length)

    @property
    def encoded(self) -> Ints:
        """Places of the histories' encoded actions, user after user."""
        return ranges(self.place - self.lengths, self.lengths)

    @property
    def history(self) -> Ints:
        """The items of these actions."""
        return self.items[self.encoded].astype(np.int64)

    @property
    def times(self) -> tuple[torch.Tensor, torch.Tensor]:
        """`action_times` of these actions."""
        time_T, asked_T = action_times(self.timestamps, self.encoded)
        last_U = self.lengths.cumsum() - 1
        if self.at_last_action:
            asked_T[last_U] = time_T[last_U]
        elif self.asked_U is not None:
            asked_T[last_U] = torch.from_numpy(self.asked_U)
        return time_T, asked_T

    def of(self, index: slice | Ints) -> "RankingUsers":
        """Some of the users."""
        asked_U = None if self.asked_U is None else self.asked_U[index]
        return replace(self, user=self.user[index], first=self.first[index], place=self.place[index], asked_U=asked_U)

    def batches(self, size: int) -> Iterator["RankingUsers"]:
        """Consecutive users, `size` at a time."""
        for start in range(0, len(self), size):
            yield self.of(slice(start, start + size))

    def sample(self, count: int, seed: int) -> "RankingUsers":
        """`count` users chosen by the seed, in their order; all if there are no more, or if it is 0."""
        if count == 0 or count >= len(self):
            return self
        return self.of(np.sort(np.random.default_rng(seed).choice(len(self), count, replace=False)))

    def repeats(self) -> NDArray[np.bool_]:
        """Whether each user's target is in their history [U]."""
        repeats = np.zeros(len(self), bool)
        for start in range(0, len(self), 2**14):
            part = self.of(slice(start, start + 2**14))
            user = np.repeat(np.arange(len(part)), part.seen_lengths)
            repeats[start + user[part.seen == part.target[user]]] = True
        return repeats


def ranking_users(dataset: Dataset, split: Split, max_length: int, held_out: HeldOut | None = None) -> RankingUsers:
    """Every user with a target of that split and a history before it, in order of index. Without `held_out` it is
    leave-one-out."""
    place = (held_out or leave_one_out(dataset)).targets[split]
    users = np.flatnonzero(place >= 0)
    return RankingUsers(
        dataset.items_flat, dataset.timestamps_flat, users, dataset.offsets[users], place[users], max_length
    )
