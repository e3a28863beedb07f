"""Every file of checkpoints, runs and exports, with every kind of damage."""

import json
import random
import re
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from damages import damaged, in_parts, newest, replace_train, resume, signed, steps, told

from logitmix.common.checked import check_file
from logitmix.trainer.commands.report_page import write_report
from logitmix.trainer.config import dump_toml, model_schema
from logitmix.trainer.run import checkpoint, checksums
from logitmix.trainer.run.folder import read_code, read_config, read_schema
from logitmix.trainer.run.metrics import keep_rows, read_rows
from logitmix.trainer.run.results import read_ranks, read_results, read_test_users


def test_every_damage_to_a_checkpoint_is_found(run: Path) -> None:
    step, chance, found = newest(run), random.Random(0), 0
    swapped = {file.name: file.read_bytes() for file in (step.parent / "step-8").iterdir()}
    for other in steps(run)[1:]:
        shutil.rmtree(other)
    for file in sorted(step.iterdir()):
        content = file.read_bytes()
        for changed in [*damaged(content, chance, 50, 5), swapped[file.name]]:
            file.write_bytes(changed)
            with pytest.raises(ValueError, match=file.name):
                checkpoint.load_saved(run)
            found += 1
        file.unlink()
        with pytest.raises(ValueError, match=f"{file.name} is missing"):
            checkpoint.load_saved(run)
        file.write_bytes(content)
    assert found > 110 and checkpoint.load_saved(run).step == 12


READERS: dict[str, Callable[[Path], object]] = {
    "code.json": read_code,
    "config.toml": read_config,
    "dataset.json": read_schema,
    "metrics.jsonl": read_rows,
    "results.json": read_results,
    "test_ranks.json": read_ranks,
    "test_users.json": read_test_users,
}


@pytest.mark.parametrize("world_size", [1, 3, 5])
def test_the_ranks_verify_all_parts_between_them(run: Path, world_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    path, verified = newest(run), []
    parts = in_parts(path, 4)

    def check(file: Path, *given: Any) -> None:
        verified.append(file)
        check_file(file, *given)

    monkeypatch.setattr(checkpoint, "check_file", check)
    config = read_config(run)
    # Nothing of the model is expected.
    wanted = checkpoint._Wanted(config, model_schema(read_schema(run), config), {}, unchecked=("",))
    for rank in range(world_size):
        checkpoint._open(path, wanted, replace(checkpoint.ALONE, rank=rank, world_size=world_size))
    assert sorted(verified) == parts


@pytest.mark.parametrize("name", READERS)
def test_every_damage_to_a_file_of_a_run_is_found(run: Path, another: Path, name: str) -> None:
    chance, file, reader = random.Random(1), run / name, READERS[name]
    content = file.read_bytes()
    swapped = [another / name, *(run / of for of in READERS if of != name)]
    for other in [*damaged(content, chance, 20, 5), *(of.read_bytes() for of in swapped)]:
        if name == "metrics.jsonl" and other.startswith(content):
            continue  # rows may follow
        if name == "code.json" and other == content:
            continue  # that of another run
        file.write_bytes(other)
        with pytest.raises(ValueError, match=rf"{file} is damaged .*; restore it, or remove .*/digests\.json"):
            reader(run)
    file.unlink()
    with pytest.raises((ValueError, FileNotFoundError)) as missing:
        reader(run)
    assert name in str(missing.value)
    file.write_bytes(content)
    reader(run)


def test_every_damage_to_the_digests_of_a_run_is_found(run: Path) -> None:
    file = run / "digests.json"
    content = file.read_bytes()
    for other in damaged(content, random.Random(1), 20, 5):
        file.write_bytes(other)
        with pytest.raises(ValueError, match=f"{file} is damaged"):
            read_config(run)
    # Without it, files are read as they are.
    file.unlink()
    (run / "config.toml").write_text((run / "config.toml").read_text() + "\n")
    assert read_config(run).train.epochs == 3


def test_digests_of_another_kind_or_run_are_refused(run: Path, tmp_path: Path) -> None:
    file, content = run / "digests.json", json.loads((run / "digests.json").read_text())
    made = [
        content | {"kind": "digests of others"},
        content | {"files": content["files"] | {"tower.safetensors": None}},
        content | {"files": content["files"] | {"config.toml": {"bytes": "1", "sha256": ""}}},
        content | {"files": {}},
    ]
    for other in [(newest(run) / "checkpoint.json").read_text(), *map(signed, made)]:
        file.write_text(other)
        with told("digests.json"):
            write_report([run], tmp_path / "report.html")
    # Moved or copied as a whole, it is the same run.
    file.write_text(signed(content))
    write_report([shutil.copytree(run, tmp_path / "moved")], tmp_path / "report.html")


def test_a_run_that_was_killed_while_it_notes_a_digest_goes_on(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before each write of a start: whatever stays is taken for whole."""
    config, wrote = read_config(run), checksums.write_whole
    for last in range(1, 20):
        left = last

        def killed(path: Path, text: str) -> None:
            nonlocal left
            left -= 1
            if left == 0:
                raise KeyboardInterrupt
            wrote(path, text)

        with monkeypatch.context() as patch, suppress(KeyboardInterrupt):
            patch.setattr(checksums, "write_whole", killed)
            for interval in (2, 3):
                changed = replace_train(config, log_every=interval)
                checksums.write_checksummed(run / "config.toml", dump_toml(changed))
                keep_rows(run, 12 - interval)
        assert read_config(run).train.log_every in (2, 3, config.train.log_every)
        assert read_rows(run)
    assert left > 0  # the last time, nothing killed it


@pytest.mark.parametrize("name", ["config.toml", "metrics.jsonl"])
@pytest.mark.parametrize("writes", range(4))
def test_a_file_that_is_replaced_while_it_is_read_is_not_damaged(
    run: Path, monkeypatch: pytest.MonkeyPatch, name: str, writes: int
) -> None:
    """A job that starts again has done so many of its writes between the reads of the digest and of the file."""
    file, left, digests, wrote = run / name, writes, checksums.digests_of, checksums.write_whole
    old = file.read_text()
    new = old[: old.index("\n") + 1]

    def ended(path: Path, text: str) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise KeyboardInterrupt
        wrote(path, text)

    def read_before(run: Path) -> dict[str, Any]:
        found = digests(run)
        monkeypatch.setattr(checksums, "digests_of", digests)
        with monkeypatch.context() as patch, suppress(KeyboardInterrupt):
            patch.setattr(checksums, "write_whole", ended)
            checksums.write_checksummed(file, new)
        return found

    monkeypatch.setattr(checksums, "digests_of", read_before)
    assert checksums.read_checksummed(file) == (new if writes > 1 else old).encode()
    assert left == (-1 if writes < 3 else 0)


ROW = "metrics.jsonl, line 2"
EDITS: list[tuple[bytes, str]] = [
    (b"[]", f"{ROW} is not a JSON object"),
    (b"[" * 100_000, f"{ROW} is damaged (nested too deep)"),
    (b'{"kind": "train"}', f"{ROW} has no field step"),
    (b'{"kind": "train", "step": 1, "loss": "low"}', f"{ROW}: loss is 'low'; it must be a number"),
    (b"[]", "results.json is not a JSON object"),
    (b'{"step": 12, "seconds": null}', "results.json: seconds is None; it must be a number"),
    (b"[1.5]", "test_ranks.json is not a list of values of type int"),
    (b"[0]", "test_users.json is not a list of values of type str"),
    (b"[]", "dataset.json is not a JSON object"),
    (b'{"users": 1}', "dataset.json has no field schema"),
    (b"[", "config.toml: not valid TOML"),
    (b"[model]\ndim = -8", "config.toml: model.dim (-8) must be divisible by 4"),
]


@pytest.mark.parametrize(("content", "said"), EDITS)
def test_an_edited_file_of_a_run_is_told(run: Path, content: bytes, said: str) -> None:
    file = run / re.split("[ ,:]", said)[0]
    if said.startswith(ROW):
        first, _, *others = file.read_bytes().splitlines(keepends=True)
        content = b"".join([first, content + b"\n", *others])
    (run / "digests.json").unlink()
    file.write_bytes(content)
    with told(said):
        READERS[file.name](run)


@pytest.mark.parametrize("name", ["step-x", "step-07", "step--1"])
def test_other_names_beside_the_checkpoints_are_left_alone(run: Path, name: str) -> None:
    shutil.copytree(newest(run), run / "checkpoints" / name)
    (run / "checkpoints" / "step-99").touch()
    assert checkpoint.load_saved(run, "last").step == resume(run).step == 12
    assert (run / "checkpoints" / name).exists() and (run / "checkpoints" / "step-99").is_file()
