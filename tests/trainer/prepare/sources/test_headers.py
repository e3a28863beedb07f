"""Tables whose header says more than names, or that have none."""

from pathlib import Path
from typing import Any

import pytest
from reading import actions_of, decoded, file_of, listed, prepared, titles

from logitmix.trainer.prepare.config import PrepareOptions
from logitmix.trainer.prepare.rejects import Rejects
from logitmix.trainer.prepare.sources.table import ColumnNames
from logitmix.trainer.prepare.text import Layout

INTER = """user_id:token\titem_id:token\trating:float\ttimestamp:float\tplace:token\tkey:token
u1\ta\t4.5\t1600000000.0\t1.5\t10
u1\tb\t3\t1600000001.0\t2.5\t11
u2\ta\t4\t1600000002.0\t1.5\t12
u2\tc\t1\t1600000003.0\t2.5\t13
"""
ITEM = """item_id:token\tname:token_seq\tclass:token_seq\tyear:token\tsize:float_seq\turl:token\tmade:float
a\tThe  First One\tComedy Drama\t1990\t0.5 1\tx.test/1\t1999
b\tThe Second\tDrama\t1991\t2 3.5\tx.test/2\t1998
c\t\t\t1990\t\tx.test/3\t1999
d\tNot Seen\tDrama\t1991\t1 1\tx.test/4\t1998
"""


def test_atomic_files_state_the_kinds(tmp_path: Path) -> None:
    folder = tmp_path / "x"
    folder.mkdir()
    (folder / "x.inter").write_text(INTER)
    (folder / "x.item").write_text(ITEM)
    (folder / "x.user").write_text("user_id:token\tage:token\nu1\t25\nu2\t25\n")
    usual: dict[str, Any] = {"title_column": "name", "out": tmp_path / "out"}
    dataset, said = prepared(folder / "x.inter", items=folder / "x.item", users=folder / "x.user", **usual)
    assert dataset.timestamps_flat.tolist() == [1600000000, 1600000001, 1600000002, 1600000003]
    assert titles(dataset) == ["The First One", "The Second", None]
    kinds = {feature.name: (feature.owner, feature.kind) for feature in dataset.schema.features[1:]}
    assert kinds == {
        "class": ("item", "ids"),
        "year": ("item", "id"),
        "size": ("item", "vector"),
        "made": ("item", "number"),
        "age": ("user", "id"),
        "rating": ("event", "number"),
        "place": ("event", "id"),
    }
    assert decoded(dataset, "item")["class"] == [["Comedy", "Drama"], ["Drama"], []]
    assert decoded(dataset, "item")["size"][:2] == [[0.5, 1], [2, 3.5]]
    assert "states a kind: url, key (nearly each row has its own value)\n" in said
    # A folder of such files has actions, items and users.
    assert prepared(folder, items=folder, users=folder, **usual)[0].schema == dataset.schema


def test_sequences_of_items(tmp_path: Path) -> None:
    (tmp_path / "x.inter").write_text("user_id:token\titem_id_list:token_seq\nu1\ta b c\nu2\tb\n")
    dataset, said = prepared(tmp_path / "x.inter", item_column="item_id_list", timestamp_column="")
    assert dataset.raw_ids() == ["a", "b", "c"] and "2 rows have lists: read as 4 actions" in said


def test_users_and_items_may_be_called_ids(tmp_path: Path, rejects: Rejects) -> None:
    file = file_of(tmp_path, b"item_id,user_id,timestamp\n5,u,1\n")
    assert actions_of(file, rejects) == [("u", "5", 1)]
    file = file_of(tmp_path, b"item_id,user_id,item,user,timestamp\n5,u,6,v,1\n")
    assert actions_of(file, rejects) == [("v", "6", 1)]
    with pytest.raises(ValueError, match=r"no column 'who'; there are: .*user_id"):
        actions_of(file, rejects, ColumnNames(user="who"))


@pytest.mark.parametrize("delimiter", [",", "\t", "|", ";"])
def test_columns_without_a_header_are_named(
    delimiter: str, tmp_path: Path, rejects: Rejects, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(rejects, "say_once", said.append)
    rows = [["u", "1", "a b", "2.5", "x"], ["u", "2", "c"], ["v", "3", '"d"', "2.5", ""]]
    content = "\n" + "".join(delimiter.join(row) + "\n" for row in rows)
    columns = ["user", "timestamp", "item", "rating", "_"]
    file = file_of(tmp_path, content.encode())
    read = actions_of(file, rejects, layout=Layout(columns=columns), more=["rating"])
    assert read == [("u", "a b", 1, "2.5"), ("v", '"d"' if delimiter == "\t" else "d", 3, "2.5")]
    assert [line[1:3] for line in listed(rejects)] == [["3", "has 3 fields, not 5"]]
    # Nor is "_" taken for pandas' row numbers.
    assert not said


@pytest.mark.parametrize(
    ("content", "columns", "message"),
    [
        (b"1,31,2.5\n", "", "no column 'user'; there are: 1, 31, 2.5.*If the first line is data, name .*--columns"),
        (b"u1,i1,x\n", "", "no column 'user'; there are: u1, i1, x.*If the first line is data, name .*--columns"),
        (b"u,31,2.5\n", "user,item,rating,timestamp", "1: has 3 fields, but --columns names 4: user,item,rating"),
        (b"user,item,x\n", "user,item,timestamp", r"1: names the columns itself \(user,item,x\); leave out --columns"),
        (b"u,1,2\n", "user,item,when", "no column 'timestamp'; there are: user, item, when"),
        (b"User,item,when\n", "", r"no column 'user' \(did you mean 'User'\?\); there are: User, item, when\."),
        (b"user ,item,when\n", "", r"no column 'user' \(did you mean 'user '\?\); there are: 'user ', item, when\."),
        (b"u,1,2\n", "user,user,timestamp", "has two columns named 'user'|no column 'item'"),
        (b'{"user": 1}\n', "user,item,timestamp", "names its columns itself; --columns is for CSV without a header"),
    ],
)
def test_headers_that_do_not_fit_are_named(content: bytes, columns: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_bytes(content)
    with pytest.raises(ValueError, match=f"^in.csv: ?{message}|^in.csv:{message}"):
        prepared(tmp_path / "in.csv", columns=columns)


@pytest.mark.parametrize("ids", [["7", "8"], ["N007", "N8"], ["N1", "N2"]])
def test_a_table_of_items_without_a_header_is_named(ids: list[str], tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_text(f"user,item,timestamp\nu,{ids[0]},1\nu,{ids[1]},2\n")
    (tmp_path / "items.csv").write_text("N7,Seven\nN8,Eight\n" if ids[0] != "7" else "7,Seven\n8,Eight\n")
    problem = r"^items\.csv: its first line looks like data, for 'N?7' is like the ids of the"
    with pytest.raises(ValueError, match=problem):
        prepared(tmp_path / "in.csv", items=tmp_path / "items.csv")
    (tmp_path / "items.csv").write_text(f"sku,2024\n{ids[0]},Seven\n{ids[1]},Eight\n")
    prepared(tmp_path / "in.csv", items=tmp_path / "items.csv")


def test_titles_are_in_the_column_that_is_named(tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_text("user,item,timestamp,label,title\nu,7,1,Seven,x\nu,8,2,Eight,x\nu,7,3,Seven,y\n")
    dataset, _ = prepared(tmp_path / "in.csv", title_column="label")
    assert titles(dataset) == ["Seven", "Eight"]
    with pytest.raises(ValueError, match=r"^--title-column: no column 'name' of the items or the actions; there are: "):
        prepared(tmp_path / "in.csv", title_column="name")
    with pytest.raises(ValueError, match=r"^ml-1m takes no --title-column"):
        PrepareOptions("ml-1m", title_column="name")
