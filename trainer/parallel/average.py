"""The moving average of a model's weights, which is evaluated and exported in their place (train.ema)."""

import copy
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.distributed._shard.sharded_tensor import ShardedTensor

from logitmix.modules.towers import Tower
from logitmix.trainer.parallel.optimizer import with_shards

EVERY_STEP, INTERVAL = 100, 10
"""All rows of the tables are averaged, so after the first 100 steps that is done in every tenth one."""


class MovingAverage:
    """The exponential moving average of the tower's parameters and of this rank's shards of the tables, in FP32; the
    tower's buffers are those of the latest step.

    With the weights θ_s after step s, from 1, it is a_s = d_s a_(s-1) + (1 - d_s) θ_s, where d_s is (s - 1) / (s + 8)
    or the configured decay, whichever is less. So nothing of the initial weights is in it, and at first the mean age of
    what is in it is about a tenth of all steps. Where only every tenth step computes it, it does so with d_s to the
    power of 10.
    """

    def __init__(self, tower: Tower, tables: Mapping[str, ShardedTensor], decay: float) -> None:
        """Averages these weights, by reference, once `update` is called."""
        self.decay = decay
        self.tower = copy.deepcopy(tower).requires_grad_(False)
        self.tables = {
            name: with_shards(table, [each.float().clone() for each in _held(table)]) for name, table in tables.items()
        }
        self._buffers = [*zip(self.tower.buffers(), tower.buffers(), strict=True)]
        self._pairs: list[tuple[Tensor, Tensor]] = [*zip(self.tower.parameters(), tower.parameters(), strict=True)]
        for name, table in tables.items():
            self._pairs += zip(_held(self.tables[name]), _held(table), strict=True)

    @torch.no_grad()
    def update(self, steps: int) -> None:
        """Averages the weights. To be called after each step that moved the weights; `steps` counts them."""
        interval = 1 if steps <= EVERY_STEP else INTERVAL
        if steps % interval:
            return
        decay = min(self.decay, (steps - 1) / (steps + 8)) ** interval
        averages, weights = map(list, zip(*self._pairs, strict=True))
        torch._foreach_mul_(averages, decay)
        torch._foreach_add_(averages, weights, alpha=1 - decay)
        for copied, buffer in self._buffers:
            copied.copy_(buffer)


def _held(table: ShardedTensor) -> list[Tensor]:
    return [shard.tensor.detach() for shard in table.local_shards()]
