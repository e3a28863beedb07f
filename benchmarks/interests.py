"""Where should a mixture of logits win? Users with disjoint interests, on equal CPU seconds.

    python -m benchmarks.interests [--widths 16,32,64,128] [--mol 16,64] [--seconds 60]

Each of 1,000 users has some of 128 interests; an interest is eight items, and no two share one. Training sees three
quarters of a user's items, and one of the others is the target: a model that has found the interests has it among the
items that are left. Tables of users and of items are trained by Adam with the full softmax, for a dot product of a
width, and for MoL 4x4x32 over tables of a width: from random ones, and from those of a dot product that was trained for
a quarter of the time. A row has the best of twenty evaluations.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import tyro
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from benchmarks.measure import machine
from logitmix.modules.config import DotConfig, MoLConfig, SimilarityConfig
from logitmix.modules.similarity.build import build_similarity

USERS, INTERESTS, ITEMS, BATCH = 1000, 128, 8, 100
DOT = DotConfig()
MOL = MoLConfig(query_components=4, item_components=4, gate_hidden=32, projection_hidden=0)


@dataclass(frozen=True)
class Options:
    widths: tuple[int, ...] = (16, 32, 64, 128)
    """Of dot products."""
    mol: tuple[int, ...] = (16, 64)
    """Of the tables under MoL."""
    interests: int = 8
    """Of a user."""
    seconds: float = 60.0
    """CPU seconds of an arm's training."""
    seed: int = 0


def main(options: Options) -> None:
    torch.set_num_threads(1)
    table = Table("model", "steps", "HR@10", f"HR@{left(options)}", "loss")
    for width in options.widths:
        table.add_row(f"dot product, D = {width}", *trained(options, width, [DOT] * 20))
    for width in options.mol:
        table.add_row(f"MoL, D = {width}", *trained(options, width, [MOL] * 20))
        table.add_row(f"MoL, D = {width}, from a dot product", *trained(options, width, [DOT] * 5 + [MOL] * 15))
    Console(width=100).print(table)
    print(f"{options.seconds:g} CPU seconds an arm, 1 thread; {machine()}.")


def left(options: Options) -> int:
    """How many of a user's items training does not see."""
    return options.interests * ITEMS // 4


def trained(options: Options, width: int, parts: Sequence[SimilarityConfig]) -> tuple[str, ...]:
    """A row: after equal parts of the time with these similarities, which take over the tables from one another."""
    generator = torch.Generator().manual_seed(options.seed)
    own_UI = torch.rand(USERS, INTERESTS, generator=generator).argsort(1)[:, : options.interests]
    item_UN = (own_UI[:, :, None] * ITEMS + torch.arange(ITEMS)).flatten(1)
    item_UN = item_UN.gather(1, torch.rand(item_UN.shape, generator=generator).argsort(1))
    unseen = left(options)
    target_U1, seen_UN = item_UN[:, :1], item_UN[:, unseen:]
    tables = [nn.Parameter(torch.randn(rows, width, generator=generator) * 0.1) for rows in (USERS, INTERESTS * ITEMS)]

    def scores(user_B: Tensor) -> Tensor:
        query = similarity.query(tables[0][user_B], user_B)
        return similarity.all_pairs(query, similarity.item(tables[1], torch.arange(len(tables[1]))))

    @torch.no_grad()
    def hits() -> tuple[float, float]:
        ranks = []
        for user_B in torch.arange(USERS).split(BATCH):
            score_BX, target_B1 = scores(user_B), target_U1[user_B]
            score_BX.scatter_(1, seen_UN[user_B], -torch.inf)
            ranks.append((score_BX >= score_BX.gather(1, target_B1)).sum(1))
        rank_U = torch.cat(ranks)
        return float((rank_U <= unseen).float().mean()), float((rank_U <= 10).float().mean())

    steps, spent = 0, 0.0
    for part, config in enumerate(parts):
        if part == 0 or config != parts[part - 1]:
            found, similarity = [], build_similarity(width, config)
            similarity.reset_parameters(generator)
            optimizer = torch.optim.Adam([*tables, *similarity.parameters()], lr=0.01)
        while spent < options.seconds * (part + 1) / len(parts):
            began = time.process_time()
            user_B = torch.randperm(USERS, generator=generator)[:BATCH]
            loss = -scores(user_B).log_softmax(1).gather(1, seen_UN[user_B]).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            spent, steps = spent + time.process_time() - began, steps + 1
        found.append((*hits(), float(loss.detach())))
    most, ten, last = max(found)
    return str(steps), f"{ten:.3f}", f"{most:.3f}", f"{last:.2f}"


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
