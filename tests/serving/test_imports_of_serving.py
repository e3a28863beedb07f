"""What an installation may lack: the Retriever needs torch, safetensors and numpy; all else is named in one line."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from small_models import LENGTH, export_small, random_histories, small_model

from logitmix.serving.retriever import Retriever

HIDING = """
import sys, warnings

class Hiding:
    def __init__(self, finder):
        self.finder = finder

    def __getattr__(self, name):
        return getattr(self.finder, name)

    def find_spec(self, name, path=None, target=None):
        hidden = {{name.partition(".")[0], ".".join(name.split(".")[:2])}} & {hidden}
        return None if hidden else self.finder.find_spec(name, path, target)

sys.meta_path[:] = map(Hiding, sys.meta_path)
"""
COMMAND_LINE = {"pyarrow", "rich", "tomli_w", "tyro"}
TRAINING = {"torchrec", "fbgemm_gpu", "tensorboard", "torchx"}
SERVER = {"fastapi", "fastapi_swagger", "prometheus_client", "pydantic", "starlette", "uvicorn"}
"""What `pip install logitmix` and its extras bring beyond what the Retriever needs."""


def python(words: str, hidden: set[str], *arguments: str) -> subprocess.CompletedProcess[str]:
    script = HIDING.format(hidden=hidden) + words
    return subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True)


RETRIEVE = """
import json, torch
from logitmix.serving.retriever import Retriever

warnings.simplefilter("error")
for path in sys.argv[2:]:
    print(Retriever.load(path).retrieve(json.loads(sys.argv[1]), 3).items.tolist())
assert not torch.distributed.is_initialized()
"""
OTHERS = {"docstring_parser", "fsspec", "matplotlib", "packaging", "requests", "yaml"}
OTHERS |= {"logitmix.trainer", "logitmix.comm", "logitmix.launch"}


def test_the_retriever_answers_with_torch_safetensors_and_numpy(tmp_path: Path) -> None:
    served = [export_small(small_model(kind, 50), tmp_path / kind) for kind in ("dot", "mlp", "mol")]
    histories = random_histories(50, [LENGTH, 1])
    result = python(RETRIEVE, COMMAND_LINE | TRAINING | SERVER | OTHERS, json.dumps(histories), *map(str, served))
    assert (result.returncode, result.stderr) == (0, "")
    found = [json.loads(line) for line in result.stdout.splitlines()]
    assert found == [Retriever.load(path).retrieve(histories, 3).items.tolist() for path in served]


def test_the_server_needs_no_training_and_no_arrow() -> None:
    """The Dockerfile's image for serving has none of these."""
    words = "warnings.simplefilter('ignore'); import logitmix.serving.server, logitmix.trainer.commands.serve"
    result = python(words, TRAINING | {"pyarrow"})
    assert (result.returncode, result.stderr) == (0, "")


def test_what_is_hidden_cannot_be_imported() -> None:
    result = python("import logitmix.trainer.loop", {"logitmix.trainer"})
    assert "ModuleNotFoundError: No module named 'logitmix.trainer'" in result.stderr


@pytest.mark.parametrize(
    ("hidden", "command", "said"),
    [
        (COMMAND_LINE, "prepare demo", "prepare needs tyro: pip install 'logitmix[train]'"),
        (TRAINING - {"tensorboard"}, "train demo-mol --run RUN", "train needs torchrec: pip install 'logitmix[train]'"),
        (SERVER, "serve nowhere", "serve needs starlette: pip install 'logitmix[serve]'"),
    ],
)
def test_what_is_missing_is_named_in_one_line(hidden: set[str], command: str, said: str, tmp_path: Path) -> None:
    words = (
        "import runpy; warnings.simplefilter('ignore'); "
        "sys.argv[0] = 'logitmix'; runpy.run_module('logitmix.trainer.cli', run_name='__main__')"
    )
    result = python(words, hidden, *command.replace("RUN", str(tmp_path / "run")).split())
    # What train is about to do is said before anything is imported.
    lines = [line for line in result.stderr.splitlines() if not line.startswith("training ")]
    assert (result.returncode, result.stdout, lines) == (1, "", [f"logitmix: {said}"])
    assert not (tmp_path / "run").exists()
