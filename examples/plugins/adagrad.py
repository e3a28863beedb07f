"""A table optimizer: Adagrad, with one sum of squares for each number of a row.

logitmix train demo-mol --import adagrad.py --tables.optimizer adagrad --tables.lr 0.05
"""

from collections.abc import Mapping

from torch import Tensor

from logitmix.trainer.config import TABLE_OPTIMIZERS, TableSettings
from logitmix.trainer.parallel.optimizer import TableOptimizer


class Adagrad(TableOptimizer):
    states = ("sum_of_squares",)

    def update(
        self,
        row_RC: Tensor,
        gradient_RC: Tensor,
        state: Mapping[str, Tensor],
        step: int,
        lr: float,
        settings: TableSettings,
    ) -> None:
        sum_RC = state["sum_of_squares"].add_(gradient_RC.square())
        row_RC.sub_(lr * gradient_RC / (sum_RC.sqrt() + settings.eps))


TABLE_OPTIMIZERS["adagrad"] = Adagrad()
