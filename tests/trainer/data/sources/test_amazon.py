import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from reading import PROGRESS, actions, file_of, listed

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
