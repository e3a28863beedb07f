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
    ("dim", "near"), [(50, "48 or 52"), (3, "4 or 8"), (0, "4 or 8"), (-8, "4 or 8"), (66, "64 or 68")]
)
def test_a_width_that_fbgemm_cannot_take_names_two_that_it_can(dim: int, near: str) -> None:
    message = (
        rf"^model\.dim \({dim}\) must be divisible by 4, as FBGEMM's embedding rows are; set model\.dim to {near}$"
    )
    with pytest.raises(ValueError, match=message):
        ModelConfig(dim=dim)
    for value in near.split(" or "):
        assert ModelConfig(dim=int(value)).dim == int(value)


@pytest.mark.parametrize("encoder", [SASRecConfig, HSTUConfig])
@pytest.mark.parametrize(
    ("dim", "heads", "near"), [(96, 5, "4 or 6"), (64, 3, "2 or 4"), (4, 9, "4 or 2"), (64, 100, "64 or 32")]
)
def test_heads_that_do_not_divide_the_width_name_two_that_do(
    dim: int, heads: int, near: str, encoder: type[SASRecConfig | HSTUConfig]
) -> None:
    problem = rf"^model\.dim \({dim}\) must be divisible by model\.encoder\.heads \({heads}\); "
    with pytest.raises(ValueError, match=problem + rf"set model\.encoder\.heads to {near}$"):
        ModelConfig(dim=dim, encoder=encoder(heads=heads))
    for value in near.split(" or "):
        ModelConfig(dim=dim, encoder=encoder(heads=int(value)))


def test_a_component_of_the_user_leaves_one_for_the_history() -> None:
    message = (
        "^model.similarity.query_components is 1, and with model.similarity.user_component the last one is the use"
    )
    with pytest.raises(ValueError, match=message):
        MoLConfig(query_components=1, user_component=True)
    MoLConfig(query_components=2, user_component=True)


def test_which_encoders_see_times() -> None:
    plain = Schema.of_ids(3)
    dated = Schema((*plain.features, Feature("released", "item", "date", unit="ms")), plain.tables)
    assert all(sees_times(of, plain) for of in (HSTUConfig(times=True), FuXiConfig(times=True)))
    assert dated.unit == "ms"
    for encoder in (HSTUConfig(), SASRecConfig(), PooledConfig()):
        assert not sees_times(encoder, plain) and sees_times(encoder, dated)


def test_the_correction_of_negatives_from_the_batch_is_one_of_softmax() -> None:
    with pytest.raises(ValueError, match=r"^model\.loss\.in_batch is 8, .* model\.loss\.kind is bce; set model\.loss"):
        BCEConfig(in_batch=8)
    assert LossConfig(in_batch=8).in_batch == 8


@pytest.mark.parametrize("settings", [{}, {"share": "sequence"}, {"share": "batch", "in_batch": 1}])
def test_every_item_is_for_the_whole_batch(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"^model\.loss\.negatives is 0, .*; set model\.loss\.share to batch and"):
        LossConfig(negatives=0, **settings)
    assert [LossConfig(negatives=N, share="batch").candidates(50) for N in (0, 20)] == [50, 20]
