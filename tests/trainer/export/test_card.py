"""The model card of an export."""

import hashlib
import json
import re
from pathlib import Path

import pytest
import yaml
from small_data import ITEMS, catalog_of, small_config, write_dataset

from logitmix.modules.schema import RECENCY
from logitmix.serving.directory.reader import read_manifest
from logitmix.trainer.export.export import export
from logitmix.trainer.export.update import update_items
from logitmix.trainer.loop import train


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("card")
    data = write_dataset(folder / "data", features=True)
    train(small_config(data, {"model.features": ["all", RECENCY], "train.seed": 7}), folder / "run")
    return folder / "run"


def cells(card: str) -> dict[str, list[str]]:
    """The rows of all tables by their first cell."""
    rows = [line.strip("| ").split(" | ") for line in card.splitlines() if line.startswith("| ")]
    return {first: others for first, *others in rows}


def test_the_card_says_what_was_trained_on_what_and_how_well(run: Path, tmp_path: Path) -> None:
    manifest = export(run, tmp_path / "served")
    card = (tmp_path / "served" / "README.md").read_text()
    _, head, body = card.split("---\n", 2)
    assert yaml.safe_load(head) == {
        "library_name": "logitmix",
        "tags": ["recommendation", "retrieval", "mol", "sasrec"],
    }
    rows, results = cells(body), json.loads((run / "results.json").read_text())
    (validation,) = [
        row
        for line in (run / "metrics.jsonl").read_text().splitlines()
        if (row := json.loads(line))["kind"] == "validation" and row["step"] == results["step"]
    ]
    others = {"popularity": "popularity", "item_knn": "item-kNN", "at_last_action": "asked at the last action's time"}
    assert rows["metric"] == ["validation", "test", *(f"test, {of}" for of in others.values())]
    for name in ("hr@10", "mrr", "hindexer/hr@50"):
        assert rows[name][:2] == [f"{validation[name]:.4f}", f"{results[name]:.4f}"]
    assert rows["hr@10"][2:] == [f"{results[f'{name}/hr@10']:.4f}" for name in others]
    assert not {"step", "seconds", "examples_per_second"} & rows.keys()
    dataset = (run / "dataset.json").read_bytes()
    counts = json.loads(dataset)
    assert rows["run, step"] == [f"`run`, {results['step']}"]
    assert rows["seed"] == ["7"] and rows["precision"] == ["bf16 in training, FP32 weights"]
    assert rows["users, items, actions"] == [f"{counts['users']}, {counts['items']}, {counts['actions']}"]
    assert rows["sha256 of its dataset.json"] == [f"`{hashlib.sha256(dataset).hexdigest()}`"]
    assert rows["`favorites`"] == ["user", "ids"] and rows["`recency`"] == ["event", "id"]
    assert "component_dim = 4\n" in card and 'path = "data"\n' in card
    assert str(tmp_path) not in card and str(run.parent) not in card
    data = [of for name, of in manifest["files"].items() if name != "README.md"]
    assert f"{ITEMS} items" in card and f"6 files of {sum(of['bytes'] for of in data):,} bytes" in card


def test_the_same_checkpoint_gives_the_same_bytes(run: Path, tmp_path: Path) -> None:
    first, again = export(run, tmp_path / "first"), export(run, tmp_path / "again" / "deeper")
    assert first == again
    card = (tmp_path / "first" / "README.md").read_bytes()
    assert card == (tmp_path / "again" / "deeper" / "README.md").read_bytes()
    assert first["files"]["README.md"] == {"bytes": len(card), "sha256": hashlib.sha256(card).hexdigest()}
    assert read_manifest(tmp_path / "first") == first


def test_its_example_runs(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    export(run, tmp_path / "served")
    card = (tmp_path / "served" / "README.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    exec(example.replace('"DIR"', repr(str(tmp_path / "served"))), {})
    assert "'rank': 1" in capsys.readouterr().out
    assert "logitmix retrieve DIR --history item-0,item-1,item-2 -k 10\n" in card


def test_test_metrics_are_those_of_the_exported_step_or_none(run: Path, tmp_path: Path) -> None:
    results, digests = run / "results.json", run / "digests.json"
    text = results.read_text()
    try:
        digests = digests.rename(tmp_path / "digests.json")
        results.write_text(json.dumps(json.loads(text) | {"step": 1}))
        export(run, tmp_path / "served")
        card = (tmp_path / "served" / "README.md").read_text()
        assert cells(card)["metric"] == ["validation"]
        assert "The test metrics are those of another checkpoint" in card
        for damaged, said in (("{", "is damaged"), ('{"mrr": 1}', "has no field step"), ("[]", "is not a JSON object")):
            results.write_text(damaged)
            with pytest.raises(ValueError, match=rf"results\.json {said}.*; remove .* to export without"):
                export(run, tmp_path / "others")
        assert sorted(path.name for path in tmp_path.iterdir()) == ["digests.json", "served"]
    finally:
        results.write_text(text)
        digests.rename(run / "digests.json")


def test_it_counts_the_items_that_are_added(run: Path, tmp_path: Path) -> None:
    served = tmp_path / "served"
    export(run, served)
    before = (served / "README.md").read_text()
    update_items(served, catalog_of(tmp_path, "item,price\nnew-1,2\nnew-2,3\n"))
    after = (served / "README.md").read_text()
    assert f"{ITEMS + 2} items" in after and f"{ITEMS} items, stored" not in after
    assert after.partition("## This directory")[0] == before.partition("## This directory")[0]
    content = (served / "README.md").read_bytes()
    assert read_manifest(served)["files"]["README.md"]["sha256"] == hashlib.sha256(content).hexdigest()
    # People may write in it.
    (served / "README.md").write_text("# Mine\n")
    update_items(served, catalog_of(tmp_path, "item,price\nnew-3,2\n"))
    assert (served / "README.md").read_text().startswith(f"# Mine\n\n## This directory\n\n{ITEMS + 3} items")
