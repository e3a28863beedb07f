from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from logitmix.trainer.config import Config
from logitmix.trainer.plan import TablePlan
from logitmix.trainer.run import RunProgress
from logitmix.trainer.telemetry import Telemetry


@pytest.mark.parametrize("has_bf16", [True, False])
def test_a_run_says_that_it_computes_in_fp32_after_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], has_bf16: bool
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": has_bf16})
    ranks = SimpleNamespace(rank=0, device=torch.device("cpu"))
    plan = {"item": TablePlan(7, 4, "row_wise", "sgd", "fp32", False, 112, ())}
    model = SimpleNamespace(config=Config(), ranks=ranks, plan=plan)
    with Telemetry(tmp_path, model, RunProgress(), 1):
        pass
    said = capsys.readouterr().err
    assert ("no BF16 arithmetic" in said) is not has_bf16
    assert "table item  7 x 4  row_wise" in said
