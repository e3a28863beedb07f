"""`logitmix prepare table` beside a plain query of DuckDB: CPU time and memory for the same file.

    python -m benchmarks.prepare [--actions 5000000 …] [--memory 4GiB] [--folder DIR]

A file has lines `user,item,timestamp`, nearly in the order of time; users and items are drawn with unequal shares, 40
actions a user and 100 an item on average. It is made in --folder (a temporary one), if it is not there yet. The query
leaves out users with fewer than five actions, numbers users and items, and writes the actions by user, then time, as
Parquet: it looks for no malformed lines or duplicates, and computes no statistics or digests. DuckDB, if it is
installed, has two threads and the same limit of memory.
"""

import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import tyro

from benchmarks.measure import machine

AT_ONCE = 1_000_000
MEASURE = """
import json, os, sys
os.dup2(2, 1)
_, status, used = os.wait4(os.posix_spawnp(sys.argv[1], sys.argv[1:], os.environ), 0)
found = {"status": status, "cpu": used.ru_utime + used.ru_stime, "bytes": 1024 * used.ru_maxrss}
print(json.dumps(found), file=sys.stderr)
"""
"""Runs a command from a small process, for the memory of one that starts another counts as its own."""
QUERY = """
set threads = 2; set memory_limit = '{memory}'; set temp_directory = '{out}.spill'; set preserve_insertion_order = true;
create temp table actions as select "user"::varchar u, item::varchar i, "timestamp" t, row_number() over () r
    from read_csv('{source}', types = {{'user': 'varchar', 'item': 'varchar'}});
create temp table users as select u, row_number() over (order by u::bigint) - 1 n
    from (select u from actions group by u having count(*) >= 5);
create temp table items as select i, row_number() over (order by i::bigint) - 1 n
    from (select distinct i from actions join users using (u));
copy (select users.n user_index, items.n item_index, t from actions join users using (u) join items using (i)
    order by user_index, t, r) to '{out}' (format parquet);
"""


@dataclass(frozen=True)
class Options:
    actions: tuple[int, ...] = (5_000_000,)
    memory: str = "4GiB"
    folder: str = ""


def main(options: Options) -> None:
    found = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(options.folder or temporary)
        for actions in options.actions:
            found[actions] = compared(folder, actions, options.memory)
    print(json.dumps({"machine": machine(), "memory": options.memory, "by actions": found}, indent=1))


def compared(folder: Path, actions: int, memory: str) -> dict[str, dict[str, Any]]:
    source, out = folder / f"{actions}.csv", folder / "prepared"
    if not source.is_file():
        make(source, actions)
    words = ["prepare", "table", "--source", str(source), "--out", str(out), "--memory", memory]
    found = {"logitmix": measured([sys.executable, "-m", "logitmix.trainer", *words, "--overwrite"], actions)}
    if find_spec("duckdb"):
        query = QUERY.format(source=source, out=folder / "duckdb.parquet", memory=memory)
        found["duckdb"] = measured([sys.executable, "-c", f"import duckdb; duckdb.execute({query!r})"], actions)
    return found


def make(path: Path, actions: int) -> None:
    random = np.random.default_rng(0)
    users, items = actions // 40, actions // 100
    user_ids, item_ids = (1 + random.permutation(count) for count in (users, items))
    names = ("user", "item", "timestamp")
    schema = pa.schema([(name, pa.int64()) for name in names])
    with pyarrow.csv.CSVWriter(path, schema, write_options=pyarrow.csv.WriteOptions(quoting_style="none")) as writer:
        for start in range(0, actions, AT_ONCE):
            count = min(AT_ONCE, actions - start)
            of_users = user_ids[(users * random.random(count) ** 1.5).astype(np.int64)]
            of_items = item_ids[(items * random.random(count) ** 3).astype(np.int64)]
            elapsed = (start + np.arange(count)) * 50_000_000 // actions
            times = 1_600_000_000 + elapsed + random.integers(0, 100_000, count)
            writer.write_table(pa.table(dict(zip(names, (of_users, of_items, times), strict=True))))


def measured(words: list[str], actions: int) -> dict[str, Any]:
    """Microseconds of CPU an action, and the most memory, in MiB."""
    done = subprocess.run([sys.executable, "-c", MEASURE, *words], stderr=subprocess.PIPE, text=True, check=True)
    used = json.loads(done.stderr.splitlines()[-1])
    if used["status"]:
        raise ValueError(f"{words[:4]} failed: {done.stderr}")
    return {
        "CPU seconds": round(used["cpu"], 1),
        "CPU microseconds an action": round(used["cpu"] / actions * 1e6, 2),
        "MiB": used["bytes"] >> 20,
    }


if __name__ == "__main__":
    main(tyro.cli(Options))
