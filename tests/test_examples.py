"""The scripts in examples/ run as their first lines say, and so does the code of docs/pieces.md."""

import random
import re
import subprocess
from functools import partial
from pathlib import Path
from runpy import run_path
from typing import Any

import pyarrow.parquet as pq
import pytest
from two_ranks import said

from logitmix.trainer.data.dataset import load_dataset

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"


def output_of(script: Path, *words: str, ranks: int = 1) -> str:
    return said(partial(run_path, str(script), run_name="__main__"), [str(script), *words], ROOT, ranks)


def test_mol_in_a_torch_loop_learns() -> None:
    losses = re.findall(r"^step \d+: loss (\S+)$", output_of(EXAMPLES / "pieces/mol_in_torch.py"), re.MULTILINE)
    assert len(losses) == 4
    assert float(losses[-1]) < 0.1 * float(losses[0])


def test_fp8_wire_in_a_torchrec_model_sends_bytes_of_its_format() -> None:
    shown = output_of(EXAMPLES / "pieces/fp8_wire.py", ranks=2)
    for table in ("user", "item"):  # two rows of 64 numbers cross in each direction, each with a scale of two bytes
        assert f"{table}: 132 of 512 bytes forward, 132 of 512 back\n" in shown


def test_mol_in_lightning_learns() -> None:
    pytest.importorskip("lightning", reason="Lightning is no dependency; CI does not have it")
    loss = re.search(r"^loss (\S+)$", output_of(EXAMPLES / "pieces/mol_in_lightning.py"), re.MULTILINE)
    assert loss is not None
    assert float(loss[1]) < 0.5


def test_stage_1_as_the_page_of_pieces_has_it() -> None:
    (code,) = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / "pieces.md").read_text(), re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {}
    exec(code, names)
    assert names["found"].items_BK.shape == (8, 1_000)
    assert (names["found"].items_BK.diff(dim=1) > 0).all()


@pytest.mark.slow
def test_paper_table_shows_the_recorded_figures() -> None:
    shown = output_of(EXAMPLES / "paper_table.py")
    assert "hstu+mol" in shown
    assert "0.3079" in shown  # the paper's MoL


@pytest.mark.slow
def test_shop_recommends_from_the_aisle_of_the_last_purchase(tmp_path: Path) -> None:
    shown = output_of(EXAMPLES / "shop.py", str(tmp_path / "shop"))
    hit_rate = re.search(r"^test HR@10 (\S+)$", shown, re.MULTILINE)
    assert hit_rate is not None
    assert float(hit_rate[1]) > 0.5  # 0.09 by chance
    assert len(re.findall(r"^\d soap-\d+ ", shown, re.MULTILINE)) == 5


@pytest.mark.slow
def test_the_weekly_job_of_a_shop_recommends_what_is_in_stock_to_everyone(tmp_path: Path) -> None:
    words = ["sh", str(EXAMPLES / "weekly_shop.sh"), str(tmp_path / "shop"), "--train.epochs", "1"]
    subprocess.run(words, cwd=ROOT, check=True, timeout=1_000, capture_output=True)
    dataset = load_dataset(tmp_path / "shop/data")
    (in_stock,) = (of for of in dataset.schema.of("item") if of.name == "in_stock")
    stock = dict(zip(dataset.raw_ids(), dataset.single_values(in_stock).to_pylist(), strict=True))
    stock |= {"news-1": "yes", "news-2": "no"}
    found = pq.read_table(tmp_path / "shop/recommended.parquet")
    assert {stock[item] for item in found["item"].unique().to_pylist()} == {"yes"}
    assert len(found["user"].unique()) == dataset.num_users and len(found) == 100 * dataset.num_users


@pytest.mark.slow
def test_the_weekly_job_of_a_shop_takes_its_own_files_each_week(tmp_path: Path) -> None:
    draw, kinds = random.Random(0), ("view", "purchase")
    actions = [f"u{user},i{draw.randrange(150)},{at},{kinds[at % 2]}" for user in range(100) for at in range(20)]
    rows = [f"i{item},aisle {item % 5},{'no' if item % 10 == 0 else 'yes'}" for item in range(160)]
    (tmp_path / "catalog.csv").write_text("\n".join(["item,category,in_stock", *rows, ""]))
    words = ["sh", str(EXAMPLES / "weekly_shop.sh"), str(tmp_path), "--train.epochs", "1"]
    for users in (80, 100):
        (tmp_path / "events.csv").write_text("\n".join(["user,item,timestamp,event", *actions[: 20 * users], ""]))
        subprocess.run(words, cwd=ROOT, check=True, timeout=1_000, capture_output=True)
    assert (tmp_path / "export.former-1").is_dir()
    found = pq.read_table(tmp_path / "recommended.parquet")
    in_stock = {f"i{item}" for item in range(160) if item % 10}
    assert len(found["user"].unique()) == 100 and {*found["item"].unique().to_pylist()} <= in_stock
