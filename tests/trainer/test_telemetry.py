from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from logitmix.trainer.config import Config
from logitmix.trainer.run import RunProgress
from logitmix.trainer.telemetry import Telemetry


@pytest.mark.parametrize("has_bf16", [True, False])
def test_a_run_says_that_it_computes_in_fp32_after_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], has_bf16: bool
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": has_bf16})
    model = SimpleNamespace(config=Config(), ranks=SimpleNamespace(rank=0, device=torch.device("cpu")))
    with Telemetry(tmp_path, model, RunProgress(), 1):
        pass
    assert ("no BF16 arithmetic" in capsys.readouterr().err) is not has_bf16
