"""Modules that the package does not know: their initial weights, their averages, and their mode."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from small_data import small_config, write_dataset
from torch import Tensor, nn

from logitmix.modules.initialize import initialized, reset_layers
from logitmix.modules.towers import Tower
from logitmix.trainer.loop import train
from logitmix.trainer.parallel.average import MovingAverage


class Foreign(nn.Module):
    """A layer of one's own kind, and what a constructor computes."""

    def __init__(self, add: Callable[[nn.Module], None] = lambda module: None) -> None:
        super().__init__()
        self.gru, self.output = nn.GRU(3, 3), nn.Linear(3, 3)
        self.register_buffer("mask", torch.full((3, 3), -torch.inf).triu(1), persistent=False)
        self.register_buffer("bounds", torch.tensor([1, torch.iinfo(torch.int64).max]))
        add(self)

    def reset_parameters(self, generator: torch.Generator) -> None:
        reset_layers(self, generator)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_weights_depend_on_the_generator_alone() -> None:
    torch.manual_seed(1)
    first = initialized(Foreign, generator(5))
    torch.manual_seed(2)
    before = torch.random.get_rng_state()
    again, other = (initialized(Foreign, generator(seed)) for seed in (5, 6))
    assert torch.equal(torch.random.get_rng_state(), before)
    for name, weight in first.state_dict().items():
        assert torch.equal(weight, again.get_parameter(name) if name != "bounds" else again.bounds)
    assert not torch.equal(first.gru.weight_ih_l0, other.gru.weight_ih_l0)
    assert not torch.equal(first.output.weight, other.output.weight)
    assert torch.equal(first.mask, torch.full((3, 3), -torch.inf).triu(1))


def parameter(value: Callable[[], Tensor]) -> Callable[[nn.Module], None]:
    return lambda module: module.register_parameter("scale", nn.Parameter(value()))


def buffer(value: Callable[[], Tensor]) -> Callable[[nn.Module], None]:
    return lambda module: module.register_buffer("scale", value())


@pytest.mark.parametrize(
    ("add", "named"),
    [
        (parameter(lambda: torch.empty(4)), "scale was not initialized"),
        (parameter(lambda: torch.zeros(3).new_empty(2)), "scale was not initialized"),
        (buffer(lambda: torch.empty(4)), "scale was not initialized"),
    ],
)
def test_what_nothing_has_filled_is_named(add: Callable[[nn.Module], None], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        initialized(lambda: Foreign(add), generator(0))
    assert not torch.are_deterministic_algorithms_enabled()


def test_an_average_has_the_buffers_of_the_latest_step() -> None:
    tower = nn.BatchNorm1d(2)
    average = MovingAverage(cast(Tower, tower), {}, 0.5)
    tower(torch.tensor([[1.0, 3.0], [2.0, 9.0]]))
    average.update(1)
    assert not torch.equal(tower.running_mean, torch.zeros(2))
    assert torch.equal(cast(nn.BatchNorm1d, average.tower).running_mean, tower.running_mean)


def test_modules_are_in_training_mode_in_training_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after an evaluation, so that an nn.Dropout of one's own does what it should."""
    asked: dict[str, set[bool]] = {"at_positions": set(), "queries": set()}
    for name, modes in asked.items():
        plain = getattr(Tower, name)

        def noted(self: Tower, *given: Any, plain: Any = plain, modes: set[bool] = modes, **named: Any) -> Any:
            modes.add(self.query_tower.encoder.training)
            return plain(self, *given, **named)

        monkeypatch.setattr(Tower, name, noted)
    train(small_config(write_dataset(tmp_path / "data"), {"train.precision": "fp32"}), tmp_path / "run")
    assert asked == {"at_positions": {True}, "queries": {False}}
