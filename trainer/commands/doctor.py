"""`logitmix doctor`: what this machine has, and what is missing or does not work."""

import dataclasses
import importlib
import json
import platform
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Literal

from logitmix.common.compiled import PARTS, missing_parts, triton_is_installed
from logitmix.common.driver import DRIVER, has_driver, why_it_does_not_load
from logitmix.common.mappings import first_line
from logitmix.common.plugins import load_installed, plugins
from logitmix.common.versions import versions
from logitmix.launch.processes import end_lost, launched, run_ranks
from logitmix.trainer.commands.options import JSONOption
from logitmix.trainer.commands.words import parse

State = Literal["ok", "slow", "absent", "broken"]
"""slow: it works, but would be faster. absent: some commands cannot run. broken: something that is there does not
work."""
MATCHING = {"2.11": "1.6", "2.13": "1.8"}
"""Versions of torchrec and FBGEMM that have been run, by torch's."""
OPTIONAL = {
    "tensorboard": ("tensorboard", "train writes curves for it", "tensorboard"),
    "MLflow": ("mlflow", "train --train.loggers mlflow", "mlflow"),
    "W&B": ("wandb", "train --train.loggers wandb", "wandb"),
    "torchx": ("torchx", "it starts jobs on clusters", "torchx"),
    "server": ("fastapi fastapi_swagger uvicorn prometheus_client", "serve", "'logitmix[serve]'"),
    "faiss": ("faiss", "export --faiss", "faiss-cpu"),
    "ONNX": ("onnx onnxscript", "export --onnx", "onnx onnxscript"),
    "S3": ("s3fs", "URLs that begin with s3://", "s3fs"),
}
"""Modules that not all need, what for, and the packages that pip installs."""
INSTALL = "docs/install.md"
SECONDS = 60


@dataclass(frozen=True)
class Finding:
    subject: str
    state: State
    said: str
    remedy: str = ""


@dataclass(frozen=True)
class Arguments(JSONOption):
    """What this machine has, and what is missing or does not work. Exit status 1 if something does not work."""


def run(words: list[str]) -> None:
    arguments = parse(Arguments, "doctor", words)
    if launched():
        meet()
        return
    findings = []
    for finding in examine():
        findings.append(finding)
        if not arguments.json:
            remedy = f" ({finding.remedy})" if finding.remedy else ""
            print(f"{finding.state:<6}  {finding.subject:<11}  {finding.said}{remedy}", flush=True)
    broken = [finding.subject for finding in findings if finding.state == "broken"]
    if arguments.json:
        print(json.dumps({"broken": broken, "findings": [dataclasses.asdict(finding) for finding in findings]}))
    if broken:
        raise SystemExit(1)


def examine() -> Iterator[Finding]:
    """The findings, one by one, because some take seconds."""
    yield Finding("Python", "ok", f"{platform.python_version()} on {platform.system()} {platform.machine()}")
    yield (libraries := _libraries())
    yield _compiled_parts()
    yield from _plugins()
    yield (gpus := _gpus())
    if libraries.state == "ok" and gpus.state != "broken":
        yield _ranks()
    for subject, (modules, used, packages) in OPTIONAL.items():
        if missing := [module for module in modules.split() if find_spec(module) is None]:
            yield Finding(subject, "absent", f"no {', '.join(missing)}: {used}", f"pip install {packages}")
        else:
            yield Finding(subject, "ok", modules)


def meet() -> None:
    """In each rank that `_ranks` starts: they meet, and add their numbers up. Raises LostRank if they cannot, and
    RuntimeError for a wrong sum."""
    import torch
    import torch.distributed as dist

    from logitmix.comm.process_group import process_group

    with process_group("auto", SECONDS, lost=end_lost) as ranks:
        number = torch.tensor([ranks.rank + 1.0], device=ranks.device)
        dist.all_reduce(number, group=ranks.group)
        if number.item() != ranks.world_size * (ranks.world_size + 1) / 2:
            raise RuntimeError(f"{ranks.world_size} ranks added 1, 2, … up to {number.item():g}")


def _libraries() -> Finding:
    """torch, torchrec and FBGEMM, which only work as a matching set."""
    subject, found = "libraries", versions()
    found.pop("logitmix", None)
    for name in ("torch", "torchrec"):
        if name not in found:
            return Finding(subject, "absent", f"no {name}: train, evaluate, compare, plan and export", INSTALL)
    said = ", ".join(f"{name} {number}" for name, number in found.items())
    for name in ("torch", "fbgemm_gpu", "torchrec"):
        try:
            importlib.import_module(name)
        except Exception as error:  # whatever a library that does not fit raises
            why = why_it_does_not_load(error) or first_line(error)
            return Finding(subject, "broken", f"{said}: {name} does not load: {why}", INSTALL)
    torch_version, *others = (".".join(number.split(".")[:2]) for number in found.values())
    if others != [MATCHING.get(torch_version)] * 2:
        sets = ", ".join(f"torch {torch} with torchrec and FBGEMM {number}" for torch, number in MATCHING.items())
        return Finding(subject, "broken", f"{said}: not a matching set, which are {sets}", INSTALL)
    return Finding(subject, "ok", said)


def _compiled_parts() -> Finding:
    if missing := missing_parts():
        said = f"not built: {', '.join(missing)}; plain torch does it"
        return Finding("compiled C", "slow", said, "install a C compiler, then logitmix again")
    return Finding("compiled C", "ok", ", ".join(PARTS.values()))


def _plugins() -> Iterator[Finding]:
    """A finding for each installed plugin that cannot be imported; if all can be, one that names them."""
    lines = load_installed()
    for line in lines:
        yield Finding("plugins", "broken", line)
    if not lines:
        names = ", ".join(f"{plugin.name} {plugin.version}" for plugin in plugins())
        yield Finding("plugins", "ok", names or "none")


def _gpus() -> Finding:
    import torch

    if torch.cuda.is_available():
        said = f"{torch.cuda.device_count()} with CUDA {torch.version.cuda}: {torch.cuda.get_device_name(0)}"
        if not triton_is_installed():
            return Finding("GPUs", "slow", f"{said}; no triton, so plain torch does what its kernels do", INSTALL)
        return Finding("GPUs", "ok", said)
    if shutil.which("nvidia-smi"):
        why = "torch is a CPU build" if torch.version.cuda is None else "torch finds no GPU"
        return Finding("GPUs", "broken", f"there is an NVIDIA driver, but {why}", INSTALL)
    lacks = f", and no NVIDIA driver here ({DRIVER})" if torch.version.cuda and not has_driver() else ""
    return Finding("GPUs", "ok", f"none{lacks}: everything runs on the CPU")


def _ranks() -> Finding:
    """A rank on each GPU, or two on the CPU."""
    import torch

    count = torch.cuda.device_count() or 2
    what = f"{count} over NCCL" if torch.cuda.is_available() else f"{count} over gloo"
    status = run_ranks(["doctor"], count)
    if status:
        return Finding("ranks", "broken", f"{what} did not meet, see above (exit status {status})", "docs/scale.md")
    return Finding("ranks", "ok", f"{what} met and exchanged numbers")
