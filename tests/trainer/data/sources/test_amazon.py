import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from reading import PROGRESS, actions, decoded, file_of, listed, titles
from rich.console import Console

from logitmix.trainer.data.config import PrepareOptions
from logitmix.trainer.data.dataset import load_dataset
from logitmix.trainer.data.prepare import prepare
from logitmix.trainer.data.rejects import Rejects
from logitmix.trainer.data.sources.amazon import read_actions

REVIEW = {"reviewerID": "A7", "asin": "B1", "unixReviewTime": 12, "reviewText": "line\nend", "overall": 5.0}


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_amazon_reviews(pack: Callable[[bytes], bytes], tmp_path: Path, rejects: Rejects) -> None:
    lines = [
        json.dumps(REVIEW),
        json.dumps(REVIEW | {"reviewerID": "Ä", "unixReviewTime": 10}, ensure_ascii=False),
        json.dumps({"asin": "B1", "unixReviewTime": 12}),
        json.dumps(REVIEW | {"unixReviewTime": "12"}),
        json.dumps(REVIEW | {"asin": ""}),
        "{'asin': 'B1'}",
        "[1]",
        "[" * 100_000,
        '{"reviewerID": "\\ud800", "asin": "B1", "unixReviewTime": 1}',
    ]
    content = "\n".join(lines).encode() + b'\n{"asin": "\xff"}\n'
    read = actions(read_actions(file_of(tmp_path, pack(content)), rejects, PROGRESS))
    assert read == [("A7", "B1", 12), ("Ä", "B1", 10)]
    reasons = {int(number): reason for _, number, reason, _ in listed(rejects)}
    assert reasons == {
        3: "no reviewerID that is text",
        4: "no unixReviewTime that is a whole number",
        5: "the item is empty",
        6: "not JSON in UTF-8",
        7: "not a JSON object",
        8: "JSON nested too deeply",
        9: "not UTF-8",
        10: "not JSON in UTF-8",
    }
    assert rejects.lines == 10


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_amazon_ratings(pack: Callable[[bytes], bytes], tmp_path: Path, rejects: Rejects) -> None:
    content = pack(b"A0000000000MARY,0000000017,1.0,1300000005\nA0000000000JOHN,0000000017,3.0,1300000003\n")
    read = actions(read_actions(file_of(tmp_path, content), rejects, PROGRESS))
    assert read == [("A0000000000MARY", "0000000017", 1300000005), ("A0000000000JOHN", "0000000017", 1300000003)]


@pytest.mark.parametrize("item", [b"0000000017", b"B0MADEUP17", b"000000017X"])
def test_amazon_ratings_with_the_item_first_are_refused(item: bytes, tmp_path: Path, rejects: Rejects) -> None:
    with pytest.raises(ValueError, match=r"^in\.txt: its lines are item,user,rating,timestamp \(the 2018 files\)"):
        read_actions(file_of(tmp_path, item + b",A0000000000MARY,1.0,1300000005\n"), rejects, PROGRESS)


PRODUCTS = [
    json.dumps({"asin": "B1", "title": "Öl", "category": ["Beauty", "Hair"], "price": "$1,012.50", "brand": "x"}),
    json.dumps({"asin": "B2", "category": [], "price": ".a-box-inner{background-color:#fff}"}),
    str({"asin": "B3", "title": "It's", "categories": [["Beauty", "Skin"], ["Beauty", "Hair"]], "price": 12.5}),
    str({"asin": "B4", "title": None, "related": {"also_viewed": ["B1"]}}),
    '{"title": "no id"}',
    "{'asin': open('x')}",
    "[" * 100_000,
]


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_products(pack: Callable[[bytes], bytes], tmp_path: Path) -> None:
    lines = "".join(f"U{user},B{item},{item},{item}\n" for user in (1, 2) for item in range(1, 6))
    (tmp_path / "ratings.csv").write_text(lines)
    (tmp_path / "meta.json.gz").write_bytes(pack("\n".join(PRODUCTS).encode()))
    given = {"items": str(tmp_path / "meta.json.gz"), "max_rejects": 0.5}
    options = PrepareOptions("amazon-beauty", str(tmp_path / "ratings.csv"), str(tmp_path / "out"), **given)
    prepare(options, Console(quiet=True))
    dataset = load_dataset(tmp_path / "out")
    assert titles(dataset) == ["Öl", None, "It's", None, None]
    price = pytest.approx((1012.5 + 12.5) / 2)
    assert decoded(dataset, "item") == {
        "category": [["Beauty", "Hair"], [], ["Beauty", "Skin", "Hair"], [], []],
        "price": [1012.5, price, 12.5, price, price],
    }
    assert decoded(dataset, "event") == {"rating": [1, 2, 3, 4, 5] * 2}
    rejects = [line.split("\t")[1:3] for line in (tmp_path / "out" / "rejects.tsv").read_text().splitlines()[1:]]
    assert rejects == [["5", "no asin that is text"], ["6", "not JSON in UTF-8"], ["7", "JSON nested too deeply"]]


def test_ratings_of_reviews(tmp_path: Path) -> None:
    """What is no number is missing, and no reason to leave the action out."""
    ratings = {"a": 1.0, "b": 4, "c": "x", "d": None}
    reviews = [REVIEW | {"asin": item, "overall": rating} for item, rating in ratings.items()]
    (tmp_path / "reviews.json").write_text("\n".join(map(json.dumps, reviews)))
    options = PrepareOptions("amazon-books", str(tmp_path / "reviews.json"), str(tmp_path / "out"), min_user_actions=1)
    assert prepare(options, Console(quiet=True))["rejected_lines"] == 0
    assert load_dataset(tmp_path / "out").event_features["rating"].values.tolist() == [1, 4, 2.5, 2.5]


REVIEW_2023 = {"user_id": "A7", "parent_asin": "B1", "asin": "B2", "timestamp": 1588615855070, "rating": 4.0}


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_files_of_2023(pack: Callable[[bytes], bytes], tmp_path: Path) -> None:
    reviews = [
        json.dumps(REVIEW_2023 | {"title": "a review's", "images": [{"x": 1}]}),
        json.dumps(REVIEW_2023 | {"parent_asin": "B3", "timestamp": 1588615855071, "rating": None}),
        json.dumps(REVIEW_2023 | {"timestamp": "2020-05-04"}),
        json.dumps({name: value for name, value in REVIEW_2023.items() if name != "parent_asin"}),
        '{"user_id": "A7", "parent',
    ]
    products = [
        {"parent_asin": "B1", "title": "Oil", "categories": ["Beauty", "Hair"], "price": 9.99, "store": "ACME"},
        {"parent_asin": "B3", "title": None, "categories": [], "price": "from 5.00", "store": "Bolt", "details": {}},
        {"parent_asin": None, "title": "none"},
    ]
    (tmp_path / "reviews.jsonl").write_bytes(pack("\n".join(reviews).encode()))
    (tmp_path / "meta.jsonl").write_bytes(pack("\n".join(map(json.dumps, products)).encode()))
    given = {"items": str(tmp_path / "meta.jsonl"), "max_rejects": 0.5, "min_user_actions": 1}
    options = PrepareOptions("amazon-all-beauty", str(tmp_path / "reviews.jsonl"), str(tmp_path / "out"), **given)
    prepare(options, Console(quiet=True))
    dataset = load_dataset(tmp_path / "out")
    assert dataset.raw_ids() == ["B1", "B3"] and titles(dataset) == ["Oil", None]
    assert decoded(dataset, "item") == {
        "category": [["Beauty", "Hair"], []],
        "price": pytest.approx([9.99, 9.99]),
        "store": ["ACME", "Bolt"],
    }
    assert decoded(dataset, "event") == {"rating": [4, 4]}
    assert dataset.timestamps_flat.tolist() == [1588615855070, 1588615855071]
    rejects = [line.split("\t")[:3] for line in (tmp_path / "out" / "rejects.tsv").read_text().splitlines()[1:]]
    assert rejects == [
        ["reviews.jsonl", "3", "no timestamp that is a whole number"],
        ["reviews.jsonl", "4", "no parent_asin that is text"],
        ["reviews.jsonl", "5", "not JSON in UTF-8"],
        ["meta.jsonl", "3", "no parent_asin that is text"],
    ]


@pytest.mark.parametrize("history", ["", ",history"])
def test_ratings_of_2023(history: str, tmp_path: Path, rejects: Rejects) -> None:
    content = f"user_id,parent_asin,rating,timestamp{history}\r\nA7,B1,5.0,1588615855070{history and ',B2 B3'}\r\n"
    read = actions(read_actions(file_of(tmp_path, content.encode()), rejects, PROGRESS))
    assert read == [("A7", "B1", 1588615855070)] and rejects.count == 0
