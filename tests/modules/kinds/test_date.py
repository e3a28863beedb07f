"""Dates of items against their formula, from whole numbers: the products of waves are functions of the age."""

from math import cos, pi

import pytest
import torch

from logitmix.modules.features import NO_TIME, FeatureEmbeddings, waves_of_times
from logitmix.modules.kinds.date import NO_DATE, PERIODS, TICKS
from logitmix.modules.schema import Feature
from logitmix.modules.values import Values

NOW = 1_900_000_000
AGES = [0, 1, 86_400, -3 * 86_400, 40 * 86_400 + 7, 30 * 365 * 86_400]
"""In seconds; an item may also come after the request."""


def of_age(seconds: int) -> float:
    return sum(cos(2 * pi * seconds / (86_400 * period)) for period in PERIODS) / len(PERIODS)


@pytest.mark.parametrize("unit", TICKS)
def test_products_are_functions_of_the_age_alone(unit: str) -> None:
    ticks = TICKS[unit] // 86_400
    now_R = torch.tensor([NOW, NOW + 12_345_678]) * ticks
    for now, wave in zip(now_R, waves_of_times(now_R, unit), strict=True):
        found = waves_of_times(now - torch.tensor(AGES) * ticks, unit) @ wave
        assert found.tolist() == pytest.approx([of_age(age) for age in AGES], abs=2e-6)


def test_a_missing_date_or_time_is_zero_and_any_other_of_length_one() -> None:
    times = waves_of_times(torch.tensor([NO_TIME, 0, NOW, NO_TIME + 1]), "s")
    assert not times[0].any() and times[1:].norm(dim=1).tolist() == pytest.approx([1, 1, 1])
    feature = Feature("released", "item", "date", unit="s")
    dates = feature.form.embed(feature, Values(torch.tensor([NO_DATE, 0.0, NOW / 86_400])), None)
    torch.testing.assert_close(dates, times[:3], rtol=0, atol=6e-3)
    assert torch.equal(dates[:2], times[:2])
    (embedded,) = FeatureEmbeddings([feature], {}, 8)({}, {"released": Values(torch.tensor([NO_DATE]))})
    assert embedded.shape == (1, 8)
