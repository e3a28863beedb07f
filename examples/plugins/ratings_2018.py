"""A source: Amazon's ratings of 2018, lines `item,user,rating,timestamp` without a header.

logitmix prepare ratings-2018 --import ratings_2018.py --source FILE
"""

from rich.progress import Progress

from logitmix.trainer.data.config import PrepareOptions
from logitmix.trainer.data.delimited import Layout, read_delimited
from logitmix.trainer.data.download import find_source
from logitmix.trainer.data.files import single_file
from logitmix.trainer.data.raw import RawDataset, gather
from logitmix.trainer.data.registry import SOURCES, Source
from logitmix.trainer.data.rejects import Rejects

LINES = Layout(",", fields=4, item=0, user=1, timestamp=3, numbers={"rating": 2})


def read(options: PrepareOptions, rejects: Rejects, progress: Progress) -> RawDataset:
    source = find_source(options, progress, reason="has no published digest", page="https://nijianmo.github.io/amazon")
    file = single_file(source)
    blocks = read_delimited(file, LINES, rejects, progress)
    return RawDataset(gather(blocks), source, [file], kinds={"rating": "number"})


SOURCES["ratings-2018"] = Source(read)
