"""What must be equal on all ranks of a job before its first step, by name."""

import json
from typing import Any

from logitmix.common.code import code
from logitmix.launch.processes import launched
from logitmix.trainer.config import Config, flatten
from logitmix.trainer.data.dataset import Dataset

MAY_DIFFER = ("data.path", "train.device")
"""Settings that may differ among ranks: the content of the dataset, and the kind of device found, are compared."""


def facts_of(command: str, config: Config | None, dataset: Dataset | None, **options: Any) -> dict[str, str]:
    """The command, the code, the settings and `options`, and what dataset.json says. Empty where there is one process
    alone."""
    if not launched():
        return {}
    settings = (flatten(config) if config else {}) | {f"--{name.replace('_', '-')}": of for name, of in options.items()}
    facts = {"the command": command} | code()
    facts |= {name: _text(value) for name, value in settings.items() if name not in MAY_DIFFER}
    entries = flatten(dataset.identity()) if dataset else {}
    return facts | {f"dataset.json: {name}": _text(value) for name, value in entries.items()}


def _text(value: Any) -> str:
    return value if isinstance(value, str) and value else json.dumps(value)
