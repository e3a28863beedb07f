"""`user item` lines in the order of time, of several users interleaved or not; the line number is the timestamp."""

from rich.progress import Progress

from logitmix.trainer.data.config import PrepareOptions
from logitmix.trainer.data.delimited import Layout, read_delimited
from logitmix.trainer.data.download import find_source
from logitmix.trainer.data.files import single_file
from logitmix.trainer.data.raw import RawDataset, gather
from logitmix.trainer.data.rejects import Rejects

LINES = Layout("", fields=2)


def read(options: PrepareOptions, rejects: Rejects, progress: Progress) -> RawDataset:
    source = find_source(options, progress, reason="is a format, not one data set")
    file = single_file(source)
    return RawDataset(gather(read_delimited(file, LINES, rejects, progress)), source, [file])
