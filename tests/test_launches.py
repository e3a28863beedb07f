"""What a training step of each recipe asks of a GPU, counted without one, keeps to its budget."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks import launches
from logitmix.trainer.config import with_settings

BUDGETS: dict[tuple[str, int, int], tuple[int, int, int, int, int]] = {
    ("amazon-dot", 128, 1): (31, 51, 91, 4, 15),
    ("amazon-dot", 128, 8): (43, 52, 93, 4, 15),
    ("auto", 128, 1): (31, 47, 90, 4, 14),
    ("auto", 128, 8): (43, 48, 92, 4, 14),
    ("auto-mol", 128, 1): (31, 126, 137, 5, 15),
    ("auto-mol", 128, 8): (41, 127, 139, 5, 15),
    ("demo-mol", 128, 1): (31, 78, 147, 5, 15),
    ("demo-mol", 32, 8): (43, 79, 149, 5, 15),
    ("ml-1m-dot", 128, 1): (31, 47, 90, 4, 14),
    ("ml-1m-dot", 32, 8): (43, 48, 92, 4, 14),
    ("ml-1m-hstu", 128, 1): (31, 77, 130, 5, 14),
    ("ml-1m-hstu", 16, 8): (41, 78, 132, 5, 14),
    ("ml-1m-hstu-mol", 128, 1): (31, 156, 177, 5, 15),
    ("ml-1m-hstu-mol", 16, 8): (42, 157, 177, 5, 15),
    ("ml-1m-mol", 128, 1): (31, 78, 147, 5, 15),
    ("ml-1m-mol", 32, 8): (43, 79, 149, 5, 15),
}
"""By recipe, global batch and ranks: kernels launched in the exchange of rows, forward, backward and the dense
optimizer, and copies from the host."""
GOAL = 265
"""Launches of a step of the first recipes with 128 sequences; 11 of them are for the device to leave a step out."""


def test_each_recipe_has_its_budgets() -> None:
    assert set(BUDGETS) == set(launches.cases())


@pytest.mark.long
@pytest.mark.parametrize("case", BUDGETS, ids=str)
def test_a_step_keeps_to_its_budget(case: tuple[str, int, int]) -> None:
    counts = launches.counted(launches.cases()[case], case[2])
    *phases, copies = BUDGETS[case]
    found = [counts.launches[phase] for phase in ("all_to_all", "forward", "backward", "optimizer")]
    assert all(of <= budget for of, budget in zip(found, phases, strict=True)), found
    assert counts.copies.total() <= copies
    assert not counts.blocking and not counts.waits, counts.sources
    assert sum(found) == counts.launches.total()
    if case in (("ml-1m-mol", 128, 1), ("ml-1m-dot", 128, 1)):
        assert sum(found) <= GOAL


@pytest.mark.long
@pytest.mark.parametrize("recipe", ["ml-1m-dot", "ml-1m-mol"])
def test_in_batch_negatives_take_no_more_launches(recipe: str) -> None:
    case = recipe, 128, 1
    counts = launches.counted(with_settings(launches.cases()[case], {"model.loss.in_batch": 64}), 1)
    assert counts.launches.total() <= sum(BUDGETS[case][:-1])
    assert not counts.blocking and not counts.waits, counts.sources


def counted(step: Callable[[Tensor], object]) -> Any:
    """Of something that is done with a tensor [8, 4] on the GPU."""
    with launches.as_if_on_a_gpu():
        x = torch.ones(8, 4, device=launches.GPU)
        launches.METER.counts, launches.METER.on = launches.Counts(), True
        try:
            step(x)
        finally:
            launches.METER.on = False
    return launches.METER.counts


@pytest.mark.parametrize(
    ("step", "total"),
    {
        "a view": (lambda x: x.t().reshape(2, 16)[1:].detach(), (1, 0, 0, 0)),
        "memory": (lambda x: torch.empty_like(x), (0, 0, 0, 0)),
        "a chain": (lambda x: ((x + 1).sum(), x.mul_(2)), (3, 0, 0, 0)),
        "a pageable copy": (lambda x: x + torch.ones(4).to(x.device), (1, 1, 1, 0)),
        "a pinned copy": (lambda x: x + torch.ones(4).pin_memory().to(x.device, non_blocking=True), (1, 1, 0, 0)),
        "a pageable copy that is told not to wait": (
            lambda x: torch.ones(4).to(x.device, non_blocking=True),
            (0, 1, 1, 0),
        ),
        "a pinned copy that waits": (lambda x: torch.ones(4).pin_memory().to(x.device), (0, 1, 1, 0)),
        "a new tensor of the host's numbers": (lambda x: torch.tensor([1.0, 2.0], device=x.device), (0, 1, 1, 0)),
        "a number": (lambda x: x.sum().item(), (1, 0, 0, 1)),
        "a choice": (lambda x: bool(x.sum() > 0), (2, 0, 0, 1)),
        "a list": (lambda x: x.tolist(), (0, 0, 0, 1)),
        "to the host": (lambda x: x.cpu(), (0, 0, 0, 1)),
        "into the host's memory": (lambda x: torch.empty(8, 4).copy_(x), (0, 0, 0, 1)),
        "a mask": (lambda x: x[x > 0], (2, 0, 0, 1)),
        "places of a mask": (lambda x: (x > 0).nonzero(), (1, 0, 0, 1)),
        "a set": (lambda x: x.flatten().unique(), (0, 0, 0, 1)),
        "repeats of the device's numbers": (lambda x: x[0].long().repeat_interleave(x[0].long()), (3, 0, 0, 1)),
    }.values(),
)
def test_what_is_counted(step: Callable[[Tensor], object], total: tuple[int, ...]) -> None:
    assert counted(step).total == total


def test_autocast_casts_as_on_cuda() -> None:
    """The input and, once for both uses, the weight; the norm is FP32."""

    def step(x: Tensor) -> None:
        weight = torch.ones(4, 4, device=x.device, requires_grad=True)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            for _ in range(2):
                assert F.linear(x, weight).dtype == torch.bfloat16
            assert F.layer_norm(x.bfloat16(), (4,)).dtype == torch.float32

    sources = counted(step).sources
    casts = sum(number for (*_, what), number in sources.items() if what == "_to_copy")
    assert casts == 2 + 1 + 2


def test_a_tensor_left_on_the_host_is_an_error() -> None:
    with pytest.raises(AssertionError, match="mul has tensors on the GPU and on the host"):
        counted(lambda x: x * torch.ones(4))


def test_multi_tensor_operations_are_divided_as_in_torch() -> None:
    divided = launches.multi_tensor_launches
    assert divided([], 4) == divided([0], 4) == 0
    # 36 tensors of four lists, or 320 blocks of 65,536 numbers, are one launch.
    assert [divided([1] * count, 4) for count in (1, 36, 37, 73)] == [1, 1, 2, 3]
    assert [divided([65536 * blocks], 1) for blocks in (1, 320, 321, 640, 641)] == [1, 1, 2, 2, 3]
