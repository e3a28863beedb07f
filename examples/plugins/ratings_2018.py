"""A source: Amazon's ratings of 2018, whose lines are item,user,rating,timestamp.

logitmix prepare ratings-2018 --import ratings_2018.py --source ratings.csv --out data/ratings
"""

from logitmix.trainer.data.times import Clock
from logitmix.trainer.prepare.download import find_source
from logitmix.trainer.prepare.files import single_file
from logitmix.trainer.prepare.registry import SOURCES, Source
from logitmix.trainer.prepare.tables import Job
from logitmix.trainer.prepare.text import Layout, as_number, fixed_keys, read_text

LINES = Layout(",", ("item", "user", "rating", "timestamp"), fixed=True)


def read(job: Job) -> None:
    job.source = find_source(job.options, job.progress, reason="has no published digest")
    job.files, job.kinds = [single_file(job.source)], {"rating": "number"}
    keys = fixed_keys("user", "item", "timestamp")
    lines = read_text(job.files[0], keys, job.rejects, job.progress, job.duck, LINES)
    lines.columns["rating"] = as_number(lines.columns["rating"])
    job.read_actions([lines], Clock(dates=False))


SOURCES["ratings-2018"] = Source(read)
