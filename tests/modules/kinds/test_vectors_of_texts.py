"""Vectors of texts: as encoders make them, as a dataset and an export have them, and those of later texts."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from asking import ranked_rows
from small_data import small_config

from logitmix.common.plugins import load_plugins
from logitmix.modules.kinds import text
from logitmix.modules.kinds.text import TEXT_ENCODERS, TextEncoder, encode, fit_projection, words_of
from logitmix.modules.schema import Feature
from logitmix.modules.values import Values
from logitmix.serving.directory import reader
from logitmix.serving.features import FeatureReader
from logitmix.serving.items import ItemInputs
from logitmix.serving.retriever import Retriever
from logitmix.trainer import cli
from logitmix.trainer.data.dataset import encoders_of, load_dataset
from logitmix.trainer.export.export import export
from logitmix.trainer.loop import train
from logitmix.trainer.prepare.config import PrepareOptions
from logitmix.trainer.prepare.prepare import prepare

LETTERS = Path(__file__).parents[3] / "examples" / "plugins" / "letters.py"
TITLES = ["Red shoes, RED!", "blue shoes", "Blue Straße 7", "", "a green hat", "日本 の帽子", "NULL", "green 帽子"]
TEXTS = [*(title for title in TITLES if title not in ("", "NULL")), "red shoe", "x" * 100]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("Red shoes, RED!", ["red", "shoes", "red"]),
        ("x-large_2 L'été", ["x", "large_2", "l", "été"]),
        ("STRASSE Straße", ["strasse", "strasse"]),
        ("日本 の帽子a1", ["日", "本", "の", "帽", "子", "a1"]),
        (" - \u2026 ", []),
    ],
)
def test_words_are_runs_of_letters_and_digits(given: str, words: list[str]) -> None:
    assert words_of(given) == words


def ngrams(given: str) -> list[str]:
    found = []
    for word in words_of(given):
        padded = f"<{word[:64]}>"
        runs = {(at, at + size) for size in (3, 4, 5) for at in range(len(padded) - size + 1)} | {(0, len(padded))}
        found += [padded[first:last] for first, last in runs]
    return found


def test_they_are_those_of_a_plain_svd_of_all_ngrams() -> None:
    counts = [Counter(ngrams(given)) for given in TEXTS]
    names = sorted(set().union(*counts))
    matrix = np.array([[count[name] for name in names] for count in counts], float)
    weighted = matrix * (np.log((1 + len(TEXTS)) / (1 + (matrix > 0).sum(0))) + 1)
    weighted /= np.linalg.norm(weighted, axis=1, keepdims=True)
    _, singular, right = np.linalg.svd(weighted, full_matrices=False)
    assert singular.min() > 0.01

    def similarities(vectors: np.ndarray) -> np.ndarray:
        vectors = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
        return vectors @ vectors.T

    projection = fit_projection(TEXTS)
    assert projection.shape == (text.BUCKETS, len(TEXTS))
    np.testing.assert_allclose(similarities(encode(TEXTS, projection)), similarities(weighted @ right.T), atol=1e-4)


def test_they_depend_on_the_texts_alone(threads: None, monkeypatch: pytest.MonkeyPatch) -> None:
    first, state = fit_projection(TEXTS), torch.random.get_rng_state()
    torch.randn(3)
    torch.set_num_threads(3)
    assert fit_projection(TEXTS).tobytes() == first.tobytes() and torch.get_num_threads() == 3
    torch.random.set_rng_state(state)
    fit_projection(TEXTS)
    assert torch.equal(torch.random.get_rng_state(), state)
    whole = encode(TEXTS, first)
    monkeypatch.setattr(text, "AT_ONCE", 3)
    assert (encode(TEXTS, first) == whole).all() and (encode(TEXTS[2:3], first) == whole[2:3]).all()
    assert not encode(["?!", "ŋŋŋŋ"], first).any() and encode([], first).shape == (0, len(TEXTS))
    # Where there are too many characters, some of the texts are fitted.
    monkeypatch.setattr(text, "FITTED_CHARACTERS", sum(map(len, TEXTS)) - 1)
    assert fit_projection(TEXTS).tobytes() == fit_projection(TEXTS[::2]).tobytes() != first.tobytes()
    assert not fit_projection(["?", "!"]).any()


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        (lambda texts: np.ones(len(texts)), r"float64 of shape \[2\]; it must return numbers of shape \[2, 3\]"),
        (lambda texts: np.ones((1, 3)), r"of shape \[1, 3\]; it must return"),
        (lambda texts: np.ones((2, 5)), r"of shape \[2, 5\]; it must return"),
        (lambda texts: [[1.0] * 3, [np.nan] * 3], r"what is not finite for the text 'b'$"),
        (lambda texts: [[1.0] * 3, [1e39] * 3], r"what is not finite for the text 'b'$"),
    ],
)
def test_what_an_encoder_returns_is_checked(
    function: Callable[..., Any], problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TextEncoder, "_function", property(lambda self: function))
    with pytest.raises(ValueError, match=rf"^the encoder of texts own returned .*{problem}"):
        TextEncoder("own", "own.py 1", 3)(["a", "b"])


def test_a_request_states_a_text_or_its_vector() -> None:
    feature = Feature("about", "user", "text", width=2, mean=0.5, encoder="own", version="own.py 1")

    def cell(value: object) -> list[float]:
        return feature.form.cell(feature, value, lambda given: [float(len(given)), 1.0])

    assert cell("abc") == [3.0, 1.0] and cell([4, 5]) == [4.0, 5.0] and cell(None) == cell(" ") == [0.5, 0.5]
    assert feature.form.in_request.format(width=feature.width) == "text, or its 2 numbers"
    of = Values(torch.tensor([[1.5, 0.5], [0.5, -0.5]]))
    torch.testing.assert_close(feature.form.embed(feature, of, None) * 2**0.5, of.values - 0.5)
    with pytest.raises(ValueError, match="has 1 numbers; it must have 2"):
        cell([4])
    with pytest.raises(ValueError, match="has encoder '' and version ''"):
        Feature("about", "user", "text", width=2)


def written(folder: Path, first: int = 0, items: int = 6) -> dict[str, str]:
    random = np.random.default_rng(first)
    times = 1_700_000_000 + 1_000_000 * first
    rows = [f"u{user},i{random.integers(first, items)},{times + at}" for user in range(30) for at in range(6)]
    (folder / f"{first}.csv").write_text("\n".join(["user,item,timestamp", *rows]) + "\n", encoding="utf-8")
    lines = "".join(f'i{item},"{title}",{item % 3}, ,{"*" * (item % 5)}\n' for item, title in enumerate(TITLES))
    (folder / "items.csv").write_text(f"item,title,size,blank,stars\n{lines}", encoding="utf-8")
    return {"source": str(folder / f"{first}.csv"), "items": str(folder / "items.csv")}


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"embed": "titel"}, r"^--embed: no column 'titel' \(did you mean title\?\); there are: title, size, blank"),
        ({"embed": "stars"}, r"feature stars has no text of letters or digits; kind text needs some"),
        ({"embed": "title", "embed_with": "ngram"}, r"^no encoder of texts named 'ngram'.*; there are: ngrams"),
        ({"embed": "title", "append": "d"}, "^--append takes no --embed: it keeps all actions"),
    ],
)
def test_bad_input_is_one_line(options: dict[str, str], problem: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=problem):
        prepare(PrepareOptions("table", out=str(tmp_path / "data"), **written(tmp_path), **options))
    assert not (tmp_path / "data").exists()


def expected(data: Path, raw_ids: list[str], given: Mapping[str, str]) -> list[list[float]]:
    schema = load_dataset(data).schema
    (feature,) = (of for of in schema.features if of.name == "item_title")
    encoder, missing = encoders_of(data, schema)["item_title"], np.full(feature.width, feature.mean, np.float32)
    said = [given[raw_id] for raw_id in raw_ids]
    return [(missing if of in ("", "NULL") else encoder([of])[0]).tolist() for of in said]


def require_vectors(data: Path, dataset: Path) -> None:
    """That a dataset's vectors are those that the encoder of the dataset at `data` makes."""
    found, given = load_dataset(dataset), {f"i{item}": title for item, title in enumerate(TITLES)}
    assert found.item_features["item_title"].values.tolist() == expected(data, found.raw_ids(), given)


def test_vectors_go_through_all_commands(tmp_path: Path) -> None:
    data, run, served = (tmp_path / name for name in ("data", "run", "served"))
    prepare(PrepareOptions("table", out=str(data), embed="title", **written(tmp_path)))
    require_vectors(data, data)
    dataset = load_dataset(data)
    assert dataset.title_column() is not None
    train(small_config(data, {"model.features": ["all"], "train.epochs": 1, "model.item_id_dropout": 0.2}), run)
    export(run, served)
    (tmp_path / "new.csv").write_text("item,title\nn1,RED shoes\nn2,ŋŋŋŋ\nn3,\ni1,red 7\n")
    given = {f"i{item}": title for item, title in enumerate(TITLES)}
    given |= {"n1": "RED shoes", "n2": "ŋŋŋŋ", "n3": "", "i1": "red 7"}
    cli.main(["update-items", str(served), "--items", str(tmp_path / "new.csv")])
    contents = reader.read(served)
    shards = [ItemInputs.of_tensors(shard, contents.about.schema).values["item_title"] for shard in contents.shards]
    assert {*contents.raw_ids} == {*dataset.raw_ids(), "n1", "n2", "n3"}
    vectors = [vector for of in shards for vector in of.values.tolist()]
    assert vectors == expected(data, list(contents.raw_ids), given)
    of_requests = FeatureReader(contents.about.schema, contents.vocabularies, contents.projections)
    read = of_requests.read("item", [{"item_title": "RED shoes"}], ["new"])["item_title"].values
    assert read.tolist() == expected(data, ["n1"], given)
    (found,) = ranked_rows(Retriever.load(served).recommend([{"history": ["i1"]}], 9, exclude_history=False))
    assert {"n1", "n2", "n3"} <= {row["id"] for row in found}

    later = written(tmp_path, 1, 8)
    prepare(PrepareOptions("table", out=str(tmp_path / "later"), append=str(data), **later))
    require_vectors(data, tmp_path / "later")
    # Fitted to other texts, the vectors mean something else.
    other = tmp_path / "other"
    prepare(PrepareOptions("table", out=str(other), embed="title", **later))
    config = small_config(other, {"model.features": ["all"], "train.epochs": 1, "warm_start": str(run)})
    with pytest.raises(
        ValueError, match=r"item feature item_title \(text, \d wide, by ngrams [0-9a-f]{16}\) is not used"
    ):
        train(config, tmp_path / "warm")


def test_an_encoder_of_a_plugin_is_needed_where_it_encodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TEXT_ENCODERS, "data", dict(TEXT_ENCODERS.data))
    monkeypatch.setattr("logitmix.common.plugins._loaded", {})
    load_plugins([str(LETTERS)])
    data, files = tmp_path / "data", written(tmp_path)
    prepare(PrepareOptions("table", out=str(data), embed="title", embed_with="letters", **files))
    later = PrepareOptions("table", out=str(tmp_path / "later"), append=str(data), **written(tmp_path, 1, 8))
    prepare(later)
    require_vectors(data, tmp_path / "later")
    monkeypatch.setattr("logitmix.common.plugins._loaded", {})
    load_dataset(data)
    missing = r"^the encoder of texts letters needs the plugin letters.py \([0-9a-f]{12}\): --import PLACE/letters.py"
    with pytest.raises(ValueError, match=missing):
        prepare(replace(later, out=str(tmp_path / "again")))
