import gzip
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from reading import decoded, file_of, prepared, titles

REVIEW = {"reviewerID": "A7", "asin": "B1", "unixReviewTime": 12, "reviewText": "line\nend", "overall": 5.0}


YEARS = {
    "ratings": "A7,B1,1.0,12\nÄ,B1,3.0,10\n",
    "ratings of 2023": "user_id,parent_asin,rating,timestamp\r\nA7,B1,5.0,12\r\nÄ,B1,4.0,10\r\n",
    "with histories": "user_id,parent_asin,rating,timestamp,history\r\nA7,B1,5.0,12,B2 B3\r\nÄ,B1,4.0,10,\r\n",
    "reviews": json.dumps(REVIEW) + "\n" + json.dumps(REVIEW | {"reviewerID": "Ä", "unixReviewTime": 10}),
}


@pytest.mark.parametrize("kind", YEARS)
def test_actions(kind: str, tmp_path: Path) -> None:
    dataset, _ = prepared(file_of(tmp_path, YEARS[kind].encode()), "amazon-x")
    read = zip(dataset.raw_user_ids(np.arange(2)), dataset.timestamps_flat.tolist(), strict=True)
    assert dataset.raw_ids() == ["B1"] and list(read) == [("A7", 12), ("Ä", 10)]


@pytest.mark.parametrize("item", [b"0000000017", b"B0MADEUP17", b"000000017X"])
def test_amazon_ratings_with_the_item_first_are_refused(item: bytes, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^in\.txt: its lines are item,user,rating,timestamp \(the 2018 files\)"):
        prepared(file_of(tmp_path, item + b",A0000000000MARY,1.0,1300000005\n"), "amazon-x")


PRODUCTS = [
    json.dumps({"asin": "B1", "title": "Öl", "category": ["Beauty", "Hair"], "price": "$1,012.50", "brand": "x"}),
    json.dumps({"asin": "B2", "category": [], "price": ".a-box-inner{background-color:#fff}"}),
    str({"asin": "B3", "title": "It's", "categories": [["Beauty", "Skin"], ["Beauty", "Hair"]], "price": 12.5}),
    str({"asin": "B4", "title": None, "related": {"also_viewed": ["B1"]}}),
]


def test_products(tmp_path: Path) -> None:
    lines = "".join(f"U{user},B{item},{item},{item}\n" for user in (1, 2) for item in range(1, 6))
    items = file_of(tmp_path, gzip.compress("\n".join(PRODUCTS).encode()), "meta.json.gz").path
    dataset, _ = prepared(file_of(tmp_path, lines.encode()), "amazon-beauty", items=items)
    assert titles(dataset) == ["Öl", None, "It's", None, None]
    price = pytest.approx((1012.5 + 12.5) / 2)
    assert decoded(dataset, "item") == {
        "category": [["Beauty", "Hair"], [], ["Beauty", "Skin", "Hair"], [], []],
        "price": [1012.5, price, 12.5, price, price],
    }
    assert decoded(dataset, "event") == {"rating": [1, 2, 3, 4, 5] * 2}


def test_ratings_of_reviews(tmp_path: Path) -> None:
    """What is no number is missing, and no reason to leave the action out."""
    ratings = {"a": 1.0, "b": 4, "c": "x", "d": None}
    reviews = [REVIEW | {"asin": item, "overall": rating} for item, rating in ratings.items()]
    dataset, _ = prepared(file_of(tmp_path, "\n".join(map(json.dumps, reviews)).encode()), "amazon-books")
    assert dataset.event_features["rating"].values.tolist() == [1, 4, 2.5, 2.5]


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
    file = file_of(tmp_path, pack("\n".join(reviews).encode()), "reviews.jsonl")
    items = file_of(tmp_path, pack("\n".join(map(json.dumps, products)).encode()), "meta.jsonl").path
    dataset, _ = prepared(file, "amazon-all-beauty", items=items, max_rejects=0.5)
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
        ["reviews.jsonl", "3", "the timestamp '2020-05-04' is not a number between -2^62 and 2^62"],
        ["reviews.jsonl", "4", "the item is empty"],
        ["reviews.jsonl", "5", "not JSON in UTF-8"],
        ["meta.jsonl", "3", "no parent_asin that is text"],
    ]
