"""The Spark job against `prepare`: the same dataset of the same files."""

import io
import random
import re
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console

from logitmix.trainer.data.dataset import load_dataset
from logitmix.trainer.prepare.config import PrepareOptions
from logitmix.trainer.prepare.prepare import prepare

pytest.importorskip("pyspark", reason="needs Spark: pip install 'logitmix[spark]'")
pytest.importorskip("sqlglot", reason="needs sqlglot: pip install 'logitmix[spark]'")
if not shutil.which("java"):
    pytest.skip("pyspark needs Java, and there is no java on PATH", allow_module_level=True)

from pyspark import SparkContext
from pyspark.sql import SparkSession

from logitmix.trainer.data.writer import PartWriter
from logitmix.trainer.prepare import spark

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(900), pytest.mark.filterwarnings("ignore")]
SCHEMA = """
[features.brand]
owner = "item"
[features.plan]
owner = "user"
[features.price]
kind = "number"
"""


@pytest.fixture(scope="module", autouse=True)
def session() -> Iterator[SparkSession]:
    made = (
        SparkSession.builder.master("local[2]")
        .config("spark.ui.enabled", "false")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.extraJavaOptions", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")
        # Compiling statements takes longer than running them on a few rows.
        .config("spark.sql.codegen.wholeStage", "false")
        .config("spark.sql.codegen.factoryMode", "NO_CODEGEN")
        .getOrCreate()
    )
    gateway: Any = made.sparkContext._gateway
    yield made
    made.stop()
    # Otherwise Java ends with this process alone.
    gateway.shutdown()
    gateway.proc.stdin.close()
    gateway.proc.wait(60)
    SparkContext._gateway = None


def both(folder: Path, **given: Any) -> tuple[tuple[dict[str, Any], str], tuple[dict[str, Any], str]]:
    """What `prepare` and the Spark job return and say of `folder`/in, to `folder`/here and `folder`/spark."""
    found = []
    for name, run in (("here", prepare), ("spark", spark.prepare_with_spark)):
        said = io.StringIO()
        options = PrepareOptions("table", str(folder / "in"), out=str(folder / name), **given)
        found.append((run(options, Console(file=said, width=500)), said.getvalue()))
    return found[0], found[1]


def without_rounding(description: dict[str, Any]) -> tuple[dict[str, Any], list[float]]:
    """A description without its digest and statistics, and these."""
    features, figures = [], []
    for feature in description["schema"]["features"]:
        figures += [feature.pop("mean", 0.0), feature.pop("deviation", 1.0)]
        features.append(feature)
    kept = {name: of for name, of in description.items() if name != "sha256"}
    return kept, figures


def require_same(folder: Path, here: tuple[dict[str, Any], str], there: tuple[dict[str, Any], str]) -> None:
    (one, figures), (other, others) = without_rounding(here[0]), without_rounding(there[0])
    np.testing.assert_allclose(figures, others, rtol=1e-12)
    assert one == other
    assert here[1].replace(str(folder / "here"), str(folder / "spark")) == there[1]


def clicks(folder: Path) -> None:
    chance = random.Random(0)
    (folder / "in").mkdir()
    for number in (0, 3, 5, 10):
        rows = ["user,item,timestamp,brand,plan,price,kind,tags,noise,row"]
        for row in range(0 if number == 5 else 200):
            item = chance.randrange(40)
            price = chance.choice(["", "n/a", "1.5", "2", "7.25"])
            tags = "|".join(chance.sample(["a", "b", "c", "d"], chance.randrange(3)))
            fields = [chance.randrange(30), f"i{item}", 1_600_000_000 + chance.randrange(300), f"b{item % 7}"]
            fields += [chance.choice(["free", "paid", ""]), f'"{price}"', chance.choice("xyz"), tags]
            rows.append(",".join(map(str, [*fields, chance.random(), row])))
            if chance.random() < 0.3:
                rows.append(rows[-1])
        rows += ["u1,,5", "1,i1,never,,,,,,,"] if number == 3 else []
        (folder / "in" / f"day-{number}.csv").write_text("\n".join(rows) + "\n")
    (folder / "items.csv").write_text("item,title,size\n" + "".join(f"i{n},Item {n},{n % 3}\n" for n in range(30)))
    (folder / "users.csv").write_text("user,age\n" + "".join(f"{n},{20 + n % 9}\n" for n in range(29)))
    (folder / "schema.toml").write_text(SCHEMA)


def test_a_table_with_features_of_all_owners(tmp_path: Path) -> None:
    clicks(tmp_path)
    given = {"items": str(tmp_path / "items.csv"), "users": str(tmp_path / "users.csv"), "max_rejects": 0.1}
    given["schema"] = str(tmp_path / "schema.toml")
    where = ("kind != z", "timestamp >= 2020-09-13T12:26:50", "item != i3")
    here, there = both(tmp_path, **given, where=where, min_item_actions=3, min_user_actions=6)
    require_same(tmp_path, here, there)
    owners = {of["name"]: of["owner"] for of in here[0]["schema"]["features"]}
    assert owners.items() >= {"brand": "item", "plan": "user", "price": "event", "tags": "event", "age": "user"}.items()
    assert here[0]["filters"]["removed"]["duplicates"]["actions"] and here[0]["rejected_lines"] == 2
    files = [(tmp_path / name / "rejects.tsv").read_text() for name in ("here", "spark")]
    assert files[0] == files[1]


def test_rows_that_are_no_actions_but_were_shown(tmp_path: Path) -> None:
    clicks(tmp_path)
    given = {"shown": ("kind = z", "timestamp < 2020-09-13T12:27:30"), "where": ("item != i3",), "max_rejects": 0.1}
    here, there = both(tmp_path, **given, min_item_actions=3, min_user_actions=6)
    require_same(tmp_path, here, there)
    assert "rows wait for an action of their user" in here[1] and "waiting.parquet" in here[0]["files"]
    assert load_dataset(tmp_path / "spark").event_features["shown"].values.any()


def test_parquet_in_the_order_of_its_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chance = np.random.default_rng(0)
    (tmp_path / "in").mkdir()
    for number in range(3):
        columns = {"user": chance.integers(0, 40, 200).astype(float), "item": chance.integers(0, 20, 200)}
        columns |= {"kind": chance.integers(0, 3, 200), "price": np.where(chance.random(200) < 0.1, np.nan, 0.5)}
        columns["price"] *= chance.integers(-2, 5, 200)
        # Files differ in the types of their columns, and in which they have.
        if number == 1:
            del columns["price"]
        elif number == 2:
            columns["kind"] = columns["kind"].astype(str)
        pq.write_table(pa.table(columns), tmp_path / "in" / f"part-{number}.parquet")
    monkeypatch.setattr("logitmix.trainer.prepare.prepare.PartWriter", partial(PartWriter, users_per_file=7))
    here, there = both(tmp_path, timestamp_column="", min_user_actions=17)
    assert there[0]["files"].keys() >= {"sequences/part-00000.parquet", "sequences/part-00001.parquet"}
    require_same(tmp_path, here, there)
    one, other = (load_dataset(tmp_path / name) for name in ("here", "spark"))
    for name in ("offsets", "items_flat", "timestamps_flat"):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
    for name, column in one.event_features.items():
        np.testing.assert_array_equal(column.values, other.event_features[name].values)
    assert one.event_features.keys() == {"kind", "price"}


@pytest.mark.parametrize(
    ("options", "content", "message"),
    [
        ({"memory": "1GiB"}, "", "the Spark job takes no --memory; logitmix prepare table does"),
        ({"out": "s3://bucket/data"}, "", "the Spark job prepares tables, to a path; logitmix prepare does the rest"),
        ({}, '{"user": 1, "item": [2, 3], "timestamp": 3}', "in.csv: has lists of items, which only logitmix"),
        ({}, "user,item,timestamp\n1,2,3", "no user has 5 or more actions"),
        ({}, "user,item,timestamp\n1,2,3\n,,", "1 of 2 lines are malformed"),
    ],
)
def test_what_is_refused(tmp_path: Path, options: dict[str, Any], content: str, message: str) -> None:
    (tmp_path / "in.csv").write_text(content)
    given = {"out": str(tmp_path / "out")} | options
    with pytest.raises(ValueError, match=re.escape(message)):
        spark.prepare_with_spark(PrepareOptions("table", str(tmp_path / "in.csv"), **given), Console(quiet=True))
    assert {path.name for path in tmp_path.iterdir()} <= {"in.csv", "out.rejects.tsv"}
