"""The paper's table of MovieLens-1M beside this project's figures: python examples/paper_table.py

It shows what benchmarks/results has and trains nothing. To train a cell yourself, for example the dot product in about
half an hour on a core:

    logitmix prepare ml-1m
    python -m benchmarks.paper --table movielens --datasets ml-1m --methods dot --results runs/results
"""

import subprocess
import sys
from pathlib import Path

table = ["--table", "movielens", "--datasets", "ml-1m", "--show"]
subprocess.run([sys.executable, "-m", "benchmarks.paper", *table], cwd=Path(__file__).parents[1], check=True)
