"""What the model refuses to be told."""

from typing import Any

import pytest
from small_data import require_limits

from logitmix.modules.config import (
    BCEConfig,
    DeepFMConfig,
    DotConfig,
    FuXiConfig,
    HIndexerConfig,
    HSTUConfig,
    LiGRConfig,
    LossConfig,
    MLPConfig,
    ModelConfig,
    MoLConfig,
    NeuMFConfig,
    PooledConfig,
    SASRecConfig,
    sees_times,
)
from logitmix.modules.schema import Feature, Schema

NAN = float("nan")


SECTIONS: dict[str, list[type]] = {
    "model.encoder": [LiGRConfig, FuXiConfig, PooledConfig],
    "model.similarity": [DotConfig, MoLConfig, MLPConfig, NeuMFConfig, DeepFMConfig],
    "model.hindexer": [HIndexerConfig],
    "model": [ModelConfig],
    "model.loss": [LossConfig],
}
WIDTHS = ("component_dim", "gate_hidden", "hidden", "gmf_dim", "mlp_dim", "final_hidden", "dim")
RATES = ("dropout", "history_dropout", "projection_dropout", "gate_dropout", "gate_input_dropout")
OF_IDS = ("item_id_dropout", "user_id_dropout", "wanted_dropout")
LIMITS: dict[str, tuple[list[float], list[float]]] = {
    "blocks": ([0, -1, 10**9], [1, 4]),
    "heads": ([0, -2], [1, 4]),
    "max_length": ([0, 10**9], [1, 2**16]),
    "expansion": ([0, 65], [1, 64]),
    **dict.fromkeys((*RATES, *OF_IDS), ([-0.1, 1.0, 1.5, NAN], [0.0, 0.99])),
    "temperature": ([0.0, -1.0, NAN], [1e-3, 20.0]),
    **dict.fromkeys(("query_components", "item_components"), ([0], [1])),
    **dict.fromkeys(WIDTHS, ([10**9], [4, 64])),
    "projection_hidden": ([-1, 10**9], [0, 1]),
    **dict.fromkeys(("mutual_information", "weight"), ([-0.1, NAN], [0.0, 3.0])),
    "negatives": ([-1, 10**9], [1, 2**22]),
    "in_batch": ([-1, 10**9], [0, 1]),
}
"""By field: values that are refused, and that are not."""


@pytest.mark.parametrize(
    ("section", "prefix", "field", "wrong", "right"),
    [
        (section, prefix, field, *LIMITS[field])
        for prefix, sections in SECTIONS.items()
        for section in sections
        for field in section.__dataclass_fields__
        if field in LIMITS
    ],
)
def test_what_cannot_work_is_refused_by_the_name_of_its_flag(
    section: type, prefix: str, field: str, wrong: list[float], right: list[float]
) -> None:
    require_limits(section, prefix, field, wrong + [0] * (field in WIDTHS and section != ModelConfig), right)


@pytest.mark.parametrize(
    ("dim", "heads", "said"),
    [
        (50, 1, r"model\.dim \(50\) must be divisible by 4, .*; set model\.dim to 48 or 52$"),
        (-8, 1, r"model\.dim \(-8\) must be .* set model\.dim to 4 or 8$"),
        (96, 5, r"model\.dim \(96\) must be divisible by model\.encoder\.heads \(5\); .*heads to 4 or 6$"),
        (64, 100, r"model\.dim \(64\) must be .*heads \(100\); set model\.encoder\.heads to 64 or 32$"),
    ],
)
def test_a_width_that_does_not_fit_names_two_that_do(dim: int, heads: int, said: str) -> None:
    with pytest.raises(ValueError, match=f"^{said}"):
        ModelConfig(dim=dim, encoder=HSTUConfig(heads=heads))


def test_which_encoders_see_times() -> None:
    plain = Schema.of_ids(3)
    dated = Schema((*plain.features, Feature("released", "item", "date", unit="ms")), plain.tables)
    assert all(sees_times(of, plain) for of in (HSTUConfig(times=True), FuXiConfig(times=True)))
    assert dated.unit == "ms"
    for encoder in (HSTUConfig(), SASRecConfig(), PooledConfig()):
        assert not sees_times(encoder, plain) and sees_times(encoder, dated)


@pytest.mark.parametrize(
    ("config", "settings", "said"),
    [
        (MoLConfig, {"query_components": 1, "user_component": True}, "similarity.user_component takes .* of 2 or more"),
        (BCEConfig, {"in_batch": 8}, "loss.in_batch takes .*kind softmax"),
        (BCEConfig, {"resample": 8}, "loss.resample takes .*kind softmax"),
        (LossConfig, {"share": "batch", "resample": 8}, "loss.resample takes"),
        (LossConfig, {"share": "position", "resample": 8}, "loss.resample takes"),
        (LossConfig, {"negatives": 8, "resample": 8}, "loss.resample is 8; it must be from 0 to 7"),
        (LossConfig, {"negatives": 0}, "loss.negatives 0, every item, takes"),
        (LossConfig, {"negatives": 0, "share": "sequence"}, "loss.negatives 0, every item, takes"),
        (LossConfig, {"negatives": 0, "share": "batch", "in_batch": 1}, "loss.negatives 0, every item, takes"),
    ],
)
def test_settings_that_do_not_fit_together(config: type, settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=rf"^model\.{said}"):
        config(**settings)


def test_settings_that_do() -> None:
    MoLConfig(query_components=2, user_component=True)
    assert LossConfig(negatives=9, in_batch=8, share="group", resample=8).resample == 8
    assert [LossConfig(negatives=N, share="batch").candidates(50) for N in (0, 20)] == [50, 20]
