"""`--time-format` with a zone: RFC 2822, Twitter, the logs of web servers."""

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

NOON = 1_690_027_200
"""2023-07-22T12:00:00Z."""


@pytest.fixture(params=["UTC", "EST5EDT"])
def machine_zone(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The zone of this machine, which must not change anything."""
    with monkeypatch.context() as patch:
        patch.setenv("TZ", request.param)
        time.tzset()
        yield request.param
    time.tzset()


@pytest.mark.parametrize(
    ("form", "texts"),
    [
        ("%a %b %d %H:%M:%S %z %Y", ["Sat Jul 22 04:00:00 -0800 2023", "Sat Jul 22 14:00:01 +0200 2023"]),
        ("%a, %d %b %Y %H:%M:%S %z", ["Sat, 22 Jul 2023 12:00:00 +0000", "Sat, 22 Jul 2023 17:30:01 +0530"]),
        ("[%d/%b/%Y:%H:%M:%S %z]", ["[22/Jul/2023:12:00:00 +0000]", "[22/Jul/2023:11:00:01 -0100]"]),
        ("%d %b %Y %H:%M:%S%z", ["22 Jul 2023 12:00:00Z", "22 Jul 2023 14:00:01+02:00"]),
        ("%a, %d %b %Y %H:%M:%S %Z", ["Sat, 22 Jul 2023 12:00:00 GMT", "Sat, 22 Jul 2023 12:00:01 UTC"]),
        ("%d %b %Y %H:%M:%S", ["22 Jul 2023 12:00:00", "22 Jul 2023 12:00:01"]),
    ],
)
def test_a_zone_is_read(prepared: Callable[..., Any], machine_zone: str, form: str, texts: list[str]) -> None:
    rows = "".join(f'u,i{n},"{text}"\n' for n, text in enumerate(texts))
    found = prepared(f"user,item,timestamp\n{rows}", time_format=form)
    assert found.actions == {"u": [("i0", NOON), ("i1", NOON + 1)]}
    assert found.description["times"]["unit"] == "s" and "rejects" not in found.said


def test_other_names_of_zones_are_malformed(prepared: Callable[..., Any], machine_zone: str) -> None:
    """Python takes those of the machine's own zone, for UTC."""
    rows = ["u,a,22 Jul 2023 12:00:00 UTC", "u,b,22 Jul 2023 12:00:00 EST", "u,c,22 Jul 2023 12:00:00 PDT"]
    text = "\n".join(["user,item,timestamp", *rows]) + "\n"
    found = prepared(text, time_format="%d %b %Y %H:%M:%S %Z", max_rejects=1.0)
    assert found.actions == {"u": [("a", NOON)]}
    assert found.description["rejected_lines"] == 2
