"""`user item` lines in the order of time, of several users interleaved or not; the order of the lines is the time."""

from logitmix.trainer.prepare.download import find_source
from logitmix.trainer.prepare.files import single_file
from logitmix.trainer.prepare.tables import Job
from logitmix.trainer.prepare.text import Layout, fixed_keys, read_text

LINES = Layout(" ", ("user", "item"), quotes=False, fixed=True)


def read(job: Job) -> None:
    job.source = find_source(job.options, job.progress, reason="is a format, not one data set")
    job.files = [single_file(job.source)]
    raw = read_text(job.files[0], fixed_keys("user", "item"), job.rejects, job.progress, job.duck, LINES)
    job.settle(job.gather([raw], None, first=1))
