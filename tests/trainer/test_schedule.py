from math import cos, pi

import pytest

from logitmix.trainer.schedule import SCHEDULES, constant, cosine, learning_rate_factor, linear, wsd


def test_a_schedule_starts_at_the_configured_rate_and_stays_within_it() -> None:
    for schedule in SCHEDULES.values():
        factors = [schedule(step / 50) for step in range(50)]
        assert factors[0] == 1 and all(0 < factor <= 1 for factor in factors)


def test_schedules_as_they_are_defined() -> None:
    quarters = (0, 0.25, 0.5, 0.75)
    assert [constant(passed) for passed in quarters] == [1, 1, 1, 1]
    assert [cosine(passed) for passed in quarters] == [pytest.approx((1 + cos(pi * each)) / 2) for each in quarters]
    assert [linear(passed) for passed in quarters] == [1, 0.75, 0.5, 0.25]
    assert [wsd(passed) for passed in (0, 0.5, 0.8, 0.85, 0.95)] == pytest.approx([1, 1, 1, 0.75, 0.25])


@pytest.mark.parametrize("warmup_steps", [0, 1, 4, 100])
def test_the_warm_up_rises_linearly_from_zero(warmup_steps: int) -> None:
    factors = [learning_rate_factor("constant", warmup_steps, step, 50) for step in range(1, 51)]
    assert factors == [min(1.0, step / max(1, warmup_steps)) for step in range(1, 51)]


def test_a_schedule_runs_over_the_steps_after_the_warm_up() -> None:
    factors = [learning_rate_factor("cosine", 4, step, 10) for step in range(1, 11)]
    assert factors == [0.25, 0.5, 0.75, 1.0, *(cosine(step / 6) for step in range(6))]
    # All of it warm-up.
    assert learning_rate_factor("cosine", 4, 4, 4) == 1


def test_a_schedule_ends_with_the_time_if_that_ends_before_the_steps() -> None:
    factors = [learning_rate_factor("linear", 2, 6, 10, of_time) for of_time in (0.0, 0.375, 0.5, 1.0, 1.1)]
    assert factors == [0.625, 0.625, 0.5, 0.0, 0.0]
    assert learning_rate_factor("linear", 2, 2, 10, 0.9) == 1
