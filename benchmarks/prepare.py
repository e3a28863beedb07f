"""`logitmix prepare table` beside a plain query of DuckDB: CPU time and memory for the same file.

    python -m benchmarks.prepare [--actions 5000000] [--users 250000] [--items 100000] [--memory 4GiB] [--folder DIR]

The file has lines `user,item,timestamp`, nearly in the order of time; users and items are drawn with unequal shares. It
is made in --folder (a temporary one), if it is not there yet. The query leaves out users with fewer than five actions,
numbers users and items, and writes the actions by user, then time, as Parquet: it looks for no malformed lines or
duplicates, and computes no statistics or digests. DuckDB, if it is installed, has two threads and the same limit of
memory.
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
    actions: int = 5_000_000
    users: int = 250_000
    items: int = 100_000
    memory: str = "4GiB"
    folder: str = ""


def main(options: Options) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(options.folder or temporary)
        source, out = folder / f"{options.actions}.csv", folder / "prepared"
        if not source.is_file():
            make(source, options)
        words = ["prepare", "table", "--source", str(source), "--out", str(out), "--memory", options.memory]
        found = {"logitmix": measured([sys.executable, "-m", "logitmix.trainer", *words, "--overwrite"], options)}
        if find_spec("duckdb"):
            query = QUERY.format(source=source, out=folder / "duckdb.parquet", memory=options.memory)
            found["duckdb"] = measured([sys.executable, "-c", f"import duckdb; duckdb.execute({query!r})"], options)
    print(json.dumps({"machine": machine(), "actions": options.actions, "memory": options.memory, **found}, indent=1))


def make(path: Path, options: Options) -> None:
    random = np.random.default_rng(0)
    user_ids, item_ids = (1 + random.permutation(count) for count in (options.users, options.items))
    names = ("user", "item", "timestamp")
    schema = pa.schema([(name, pa.int64()) for name in names])
    with pyarrow.csv.CSVWriter(path, schema, write_options=pyarrow.csv.WriteOptions(quoting_style="none")) as writer:
        for start in range(0, options.actions, AT_ONCE):
            count = min(AT_ONCE, options.actions - start)
            users = user_ids[(options.users * random.random(count) ** 1.5).astype(np.int64)]
            items = item_ids[(options.items * random.random(count) ** 3).astype(np.int64)]
            elapsed = (start + np.arange(count)) * 50_000_000 // options.actions
            times = 1_600_000_000 + elapsed + random.integers(0, 100_000, count)
            writer.write_table(pa.table(dict(zip(names, (users, items, times), strict=True))))


def measured(words: list[str], options: Options) -> dict[str, Any]:
    """Microseconds of CPU an action, and the most memory, in MiB."""
    done = subprocess.run([sys.executable, "-c", MEASURE, *words], stderr=subprocess.PIPE, text=True, check=True)
    used = json.loads(done.stderr.splitlines()[-1])
    if used["status"]:
        raise ValueError(f"{words[:4]} failed: {done.stderr}")
    return {
        "CPU seconds": round(used["cpu"], 1),
        "CPU microseconds an action": round(used["cpu"] / options.actions * 1e6, 2),
        "MiB": used["bytes"] >> 20,
    }


if __name__ == "__main__":
    main(tyro.cli(Options))
