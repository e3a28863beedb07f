"""Words of texts: as a dataset has them, as requests state them, and those of new items and appended ones."""

import re
from pathlib import Path

import numpy as np
import pytest
from small_data import small_config

from logitmix.modules.kinds.words import words_of
from logitmix.modules.schema import ITEM, Feature
from logitmix.serving.directory import reader
from logitmix.serving.items import ItemInputs
from logitmix.serving.retriever import Retriever
from logitmix.trainer import cli
from logitmix.trainer.data.dataset import Dataset, load_dataset
from logitmix.trainer.export.export import export
from logitmix.trainer.loop import train

TITLES = ["Red shoes, RED!", "blue shoes", "Blue Straße 7", "", "a green hat", "日本 の帽子", "NULL", "green 帽子"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Red shoes, RED!", ["red", "shoes", "red"]),
        ("x-large_2 L'été", ["x", "large_2", "l", "été"]),
        ("STRASSE Straße", ["strasse", "strasse"]),
        ("日本 の帽子a1", ["日", "本", "の", "帽", "子", "a1"]),
        (" - \u2026 ", []),
        ("", []),
    ],
)
def test_words_are_runs_of_letters_and_digits(text: str, words: list[str]) -> None:
    assert words_of(text) == words


def test_a_request_states_a_text_and_unknown_words_are_left_out() -> None:
    feature, rows = Feature("about", "item", "words", table="about"), {"red": 3, "hat": 1}

    def cell(value: object) -> list[int]:
        return feature.form.cell(feature, value, lambda word: rows.get(str(word), 0))

    assert cell("Red new red HAT") == [3, 3, 1] == cell(["red", "?", "red", "hat"])
    assert cell(None) == cell("") == cell([]) == []
    with pytest.raises(ValueError, match=r"is 7; it must be text, or a list of words"):
        cell(7)


def prepared(folder: Path, *words: str) -> str:
    random = np.random.default_rng(0)
    first = 1_700_000_000 + 1_000_000 * len(words)
    rows = [f"u{user},i{random.integers(6)},{first + at}" for user in range(30) for at in range(6)]
    if words:
        rows.append(f"u0,i7,{first + 9}")
    (folder / "clicks.csv").write_text("\n".join(["user,item,timestamp", *rows]) + "\n", encoding="utf-8")
    items = "".join(f'i{item},"{title}"\n' for item, title in enumerate(TITLES))
    (folder / "items.csv").write_text(f"item,title\n{items}", encoding="utf-8")
    (folder / "schema.toml").write_text('[features.item_title]\nkind = "words"\n')
    files = ["--source", "clicks.csv", "--items", "items.csv", "--out", "data", *(words or ("--schema", "schema.toml"))]
    cli.main(["prepare", "table", *(str(folder / of) if re.match(r"\w.*\.|data$", of) else of for of in files)])
    return str(folder / "data")


def told(dataset: Dataset) -> dict[str, list[str]]:
    column, words = dataset.item_features["item_title"], dataset.vocabulary("item_title")
    assert column.offsets is not None
    parts = np.split(column.values, column.offsets[1:-1])
    return {name: [words[row] for row in part] for name, part in zip(dataset.raw_ids(), parts, strict=True)}


def test_words_of_titles_go_through_all_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = prepared(tmp_path)
    dataset = load_dataset(Path(data))
    # Words that occur once say nothing that comes again.
    known = {"red", "shoes", "blue"}
    expected = {f"i{item}": [word for word in words_of(TITLES[item]) if word in known] for item in range(6)}
    assert told(dataset) == expected
    assert dataset.title_column() is not None

    run = tmp_path / "run"
    train(small_config(Path(data), {"model.features": ["all"], "train.epochs": 1, "model.item_id_dropout": 0.2}), run)
    served = tmp_path / "served"
    export(run, served)
    new = tmp_path / "new.csv"
    new.write_text("item,title\nn1,RED shoes: red\nn2,unseen words\nn3,\ni1,red 7\n")
    capsys.readouterr()
    cli.main(["update-items", str(served), "--items", str(new)])
    said = " ".join(capsys.readouterr().err.split())
    assert "3 of 5 values of item_title are not in the export, such as '7'" in said
    contents = reader.read(served)
    values = [ItemInputs.of_tensors(shard, contents.about.schema).values["item_title"] for shard in contents.shards]
    bags = [part.tolist() for of in values for part in np.split(of.values, of.offsets[1:-1])]  # type: ignore[index]
    rows = {name: row for row, name in enumerate(dataset.vocabulary("item_title"))}
    of_item = dict(zip(contents.raw_ids, bags, strict=True))
    assert of_item["n1"] == [rows["red"], rows["shoes"], rows["red"]] and of_item["i1"] == [rows["red"]]
    assert of_item["n2"] == of_item["n3"] == []
    (found,) = Retriever.load(served).recommend([{"history": ["i1"]}], 9, exclude_history=False)
    score = {row["id"]: row["score"] for row in found}
    assert score["n2"] == pytest.approx(score["n3"], abs=1e-6) != pytest.approx(score["n1"], abs=1e-6)
    assert next(row["title"] for row in found if row["id"] == "n1") == "RED shoes: red"

    prepared(tmp_path, "--append", "data", "--overwrite")
    after = load_dataset(Path(data))
    assert after.schema.table(ITEM).rows == 8 and told(after) == expected | {"i7": []}
