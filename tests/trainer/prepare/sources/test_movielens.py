from pathlib import Path

import numpy as np
import pytest
from reading import decoded, prepared, titles

from logitmix.trainer.data.dataset import Dataset
from logitmix.trainer.prepare.sources.movielens import GENRES_100K


def item(dataset: Dataset, title: str) -> dict[str, object]:
    known = titles(dataset)
    assert known
    return {name: values[known.index(title)] for name, values in decoded(dataset, "item").items()}


def test_what_ml_100k_says_of_users_and_items(real_data: Path, tmp_path: Path) -> None:
    dataset, _ = prepared(real_data / "ml-100k.zip", "ml-100k", out=tmp_path / "out")
    rows = {table.name: table.rows for table in dataset.schema.tables}
    assert rows == {"item": 1683, "genres": 20, "year": 72, "gender": 3, "age": 62, "occupation": 22, "zip": 796}
    assert sorted(dataset.vocabulary("genres")[1:]) == sorted(GENRES_100K)
    users = decoded(dataset, "user")
    assert (users["gender"].count("F"), users["gender"].count("M")) == (273, 670)
    first = {"gender": "M", "age": "24", "occupation": "technician", "zip": "85711"}
    assert {name: values[0] for name, values in users.items()} == first
    story = {"genres": ["Animation", "Children's", "Comedy"], "year": "1995"}
    assert item(dataset, "Toy Story (1995)") == story
    assert item(dataset, "unknown") == {"genres": ["unknown"], "year": ""}
    # Its title does not end with the year, but it has a release date.
    assert item(dataset, "Land Before Time III: The Time of the Great Giving (1995) (V)")["year"] == "1995"
    ratings = dataset.event_features["rating"].values
    assert np.bincount(ratings.astype(int)).tolist() == [0, 6110, 11370, 27145, 34174, 21201]
    assert dataset.schema.of("event")[0].mean == pytest.approx(3.52986, abs=1e-9)


@pytest.mark.long
def test_what_ml_1m_says_of_users_and_items(real_data: Path, tmp_path: Path) -> None:
    dataset, _ = prepared(real_data / "ml-1m.zip", "ml-1m", out=tmp_path / "out")
    rows = {table.name: table.rows for table in dataset.schema.tables}
    assert rows == {"item": 3616, "genres": 19, "year": 82, "gender": 3, "age": 8, "occupation": 22, "zip": 3440}
    users = decoded(dataset, "user")
    assert (users["gender"].count("F"), users["gender"].count("M")) == (1709, 4331)
    assert sorted(set(users["age"])) == ["1", "18", "25", "35", "45", "50", "56"]
    story = {"genres": ["Animation", "Children's", "Comedy"], "year": "1995"}
    assert item(dataset, "Toy Story (1995)") == story
    assert "" not in decoded(dataset, "item")["year"]
    assert len(dataset.event_features["rating"].values) == 999_917
