"""`logitmix doctor`: each finding where what it looks for is there, and where it is not."""

import json
import logging
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
import torch
import two_ranks

from logitmix.common import compiled
from logitmix.common import versions as versions_module
from logitmix.common.driver import DRIVER, STAND_IN
from logitmix.common.plugins import Plugin
from logitmix.trainer import cli
from logitmix.trainer.commands import doctor
from logitmix.trainer.quiet import quietly

SETUP = (Path(__file__).parents[3] / "setup.py").read_text()


def test_a_machine_that_passes_the_tests_is_sound(tmp_path: Path) -> None:
    """Two ranks are started and meet."""
    report = json.loads(two_ranks.command(["doctor", "--json"], tmp_path))  # with exit status 0
    states = {finding["subject"]: finding["state"] for finding in report["findings"]}
    assert report["broken"] == [] and states["libraries"] == states["ranks"] == states["Python"] == "ok"
    assert {"compiled C", "plugins", "GPUs", *doctor.OPTIONAL} <= states.keys()


def finding(subject: str) -> doctor.Finding:
    return next(found for found in doctor.examine() if found.subject == subject)


def test_every_compiled_part_is_looked_for() -> None:
    parts = [*compiled.PARTS, STAND_IN]
    assert SETUP.count('"logitmix.') - 1 == len(parts) and all(f'"{part}"' in SETUP for part in parts)


def test_a_part_that_was_not_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "compiled_library", lambda module: None if "_mol" in module else object())
    found = finding("compiled C")
    assert found.state == "slow" and found.said == "not built: MoL's loss, MoL's scores; plain torch does it"


def test_each_broken_plugin_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "plugins", lambda: [Plugin("own", "1.2", "")])
    monkeypatch.setattr(doctor, "run_ranks", lambda words, count: 0)
    for lines, found in (
        ([], [("ok", "own 1.2")]),
        (["the first is broken", "the second"], [("broken", "the first is broken"), ("broken", "the second")]),
    ):
        monkeypatch.setattr(doctor, "load_installed", lambda lines=lines: lines)
        assert [(of.state, of.said) for of in doctor.examine() if of.subject == "plugins"] == found


@pytest.mark.parametrize(
    ("versions", "state", "said"),
    [
        ({"torch": "2.13.0+cpu", "torchrec": "1.8.0", "fbgemm-gpu-cpu": "1.8.0"}, "ok", "fbgemm-gpu-cpu 1.8.0"),
        ({"torch": "2.11.0+cu130", "torchrec": "1.6.1", "fbgemm-gpu": "1.6.0"}, "ok", "torch 2.11.0+cu130"),
        ({"torch": "2.13.0", "torchrec": "1.6.1", "fbgemm-gpu": "1.8.0"}, "broken", "not a matching set, which are"),
        ({"torch": "2.13.0"}, "absent", "no torchrec: train, evaluate"),
    ],
)
def test_libraries(versions: dict[str, str], state: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if name not in versions:
            raise PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(versions_module, "version", version)
    found = finding("libraries")
    assert found.state == state and said in found.said


def test_a_library_that_does_not_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchrec", None)
    found = finding("libraries")
    assert found.state == "broken" and "torchrec does not load: import of torchrec halted" in found.said


def test_a_command_without_the_driver(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """It is looked for before the command's module may load FBGEMM, and one line says that it is missing."""
    done = []

    def load(name: str) -> None:
        done.append(name)
        raise OSError("Could not load this library") from OSError(f"{DRIVER}: cannot open shared object file")

    monkeypatch.setattr(cli, "has_driver", lambda: done.append("driver"))
    monkeypatch.setattr(cli.importlib, "import_module", load)
    with pytest.raises(SystemExit):
        cli.main(["plan", "demo-mol"])
    assert done == ["driver", "logitmix.trainer.commands.plan"]
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"logitmix: no NVIDIA driver here ({DRIVER}), which fbgemm-gpu needs")


def test_what_fbgemm_logs_and_raises_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    with quietly():
        logging.error("Could not load the library 'fbgemm_gpu_py.so'!")
        logging.error("another error")
    logging.error("Could not load the library, outside")
    assert caplog.messages == ["another error", "Could not load the library, outside"]


@pytest.mark.parametrize(
    ("driver", "cuda", "count", "state", "said"),
    [
        (False, "13.0", 0, "ok", "none, and no NVIDIA driver here (libnvidia-ml.so.1): everything runs on the CPU"),
        (True, None, 0, "broken", "torch is a CPU build"),
        (True, "13.0", 0, "broken", "torch finds no GPU"),
        (True, "13.0", 2, "ok", "2 with CUDA 13.0: A card"),
    ],
)
def test_gpus_and_ranks(
    driver: bool, cuda: str | None, count: int, state: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor.shutil, "which", lambda name: driver or None)
    monkeypatch.setattr(doctor, "triton_is_installed", lambda: True)
    monkeypatch.setattr(doctor, "has_driver", lambda: driver)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "A card")
    monkeypatch.setattr(doctor, "run_ranks", lambda words, count: 3)
    found = {of.subject: of for of in doctor.examine()}
    assert found["GPUs"].state == state and said in found["GPUs"].said
    # Ranks meet unless GPUs are broken.
    assert ("ranks" in found) == (state != "broken")
    assert "ranks" not in found or "did not meet, see above (exit status 3)" in found["ranks"].said
