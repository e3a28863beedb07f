"""A stray quote costs its own line: no row is swallowed without a word."""

from pathlib import Path

import pytest
from reading import PROGRESS, actions_of, file_of, listed

from logitmix.trainer.prepare import text
from logitmix.trainer.prepare.rejects import Rejects
from logitmix.trainer.prepare.sources.table import ColumnNames, read_side
from logitmix.trainer.prepare.text import Layout

COUNT = 240
STRAY = (41, 181)
"""Rows with a quote at the start of a field, and at an end."""


def searches(
    delimiter: str, opens: str = '"blue', closes: str = 'size"', header: str = "user,item,timestamp,query"
) -> bytes:
    queries = {STRAY[0]: opens, STRAY[1]: closes}
    rows = [f"u{row % 30},i{row},{1_600_000_000 + row},{queries.get(row, f'q{row}')}" for row in range(COUNT)]
    return "\n".join([header, *rows, ""]).replace(",", delimiter).encode()


@pytest.mark.parametrize("given", ["", "\t"])
@pytest.mark.parametrize(("opens", "closes"), [('"blue', 'size"'), ('"blue', "size"), ('"', '"'), ('"a" b', 'x"y')])
def test_between_tabs_quotes_are_text(given: str, opens: str, closes: str, tmp_path: Path, rejects: Rejects) -> None:
    file = file_of(tmp_path, searches("\t", opens, closes))
    queries = [query for *_, query in actions_of(file, rejects, layout=Layout(given), more=["query"])]
    assert (len(queries), rejects.count) == (COUNT, 0)
    assert [queries[row] for row in STRAY] == [opens, closes]


def test_between_tabs_quotes_can_be_asked_for(tmp_path: Path, rejects: Rejects) -> None:
    file = file_of(tmp_path, b'user\titem\ttimestamp\ttitle\nu\ta\t1\t"two\nlines\t"\nu\tb\t2\tone\n')
    read = actions_of(file, rejects, layout=Layout(quotes=True), more=["title"])
    assert [title for *_, title in read] == ["two\nlines\t", "one"]


def test_quotes_that_are_kept_are_said(tmp_path: Path, rejects: Rejects, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(rejects, "say", said.append)
    content = b'user\titem\ttimestamp\ttitle\n"u"\ta\t1\t"x ""y"""\nu\tb\t2\t"z"\n'
    assert len(actions_of(file_of(tmp_path, content), rejects)) == 2
    assert said == [
        "in.txt: fields between tabs keep their quotes in 2 lines, such as line 2; --quote reads them as CSV"
    ]
    quoted = file_of(tmp_path, b'"user"\t"item"\t"timestamp"\n"u"\t"a"\t1\n')
    problem = r"^in\.txt: its header has names in quotes, which --quote reads; between tabs"
    with pytest.raises(ValueError, match=problem):
        actions_of(quoted, rejects, ColumnNames('"user"', '"item"', '"timestamp"'))
    assert actions_of(quoted, rejects, layout=Layout(quotes=True)) == [("u", "a", 1)]


@pytest.mark.parametrize("delimiter", [",", ";", "|"])
@pytest.mark.parametrize(
    ("opens", "closes", "lost"),
    [
        ('"blue', 'size"', [41]),
        ('"blue', "size", [41]),  # open to the end of the file
        ('"blue', '"size', [41, 181]),
        ('"blue', '"legit"', [41]),
        ('"blue"', 'size"', []),
    ],
)
def test_elsewhere_only_the_line_with_the_stray_quote_is_lost(
    delimiter: str, opens: str, closes: str, lost: list[int], tmp_path: Path, rejects: Rejects
) -> None:
    file = file_of(tmp_path, searches(delimiter, opens, closes))
    read = actions_of(file, rejects)
    assert [item for _, item, _ in read] == [f"i{row}" for row in range(COUNT) if row not in lost]
    assert (rejects.count, rejects.lines) == (len(lost), COUNT)
    if lost:
        found = listed(rejects)
        assert [int(number) - 2 for _, number, _, _ in found] == lost
        assert all(reason.startswith("a quote opens that would swallow ") for _, _, reason, _ in found)
        assert opens in found[0][3]


def test_a_stray_quote_in_the_first_column(tmp_path: Path, rejects: Rejects) -> None:
    lines = ["user,item,timestamp", '"1,2,3', *[f"{row},2,3" for row in range(50)], '7",2,3', "8,2,3"]
    read = actions_of(file_of(tmp_path, "\n".join(lines).encode()), rejects)
    assert len(read) == 52 and rejects.count == 1


@pytest.mark.parametrize("rows", ["item,title,price\n{}", "item,title\n{}"])
def test_side_tables_likewise(rows: str, tmp_path: Path, rejects: Rejects) -> None:
    price = ",1.5" if "price" in rows else ""
    titles = {5: '"open', 18: 'close"'}
    lines = "".join(f"i{row},{titles.get(row, 'title')}{price}\n" for row in range(40))
    (tmp_path / "in.csv").write_text(rows.format(lines))
    side = read_side(str(tmp_path / "in.csv"), "--items", "item", rejects, PROGRESS)
    assert side.ids.to_pylist() == [f"i{row}" for row in range(40) if row != 5]
    assert rejects.count == 1


@pytest.mark.parametrize(
    "review",
    [
        "first, second\nthird, fourth, fifth\nand, so, on, it, goes",
        "a,b,c,d\n" * 30,
        "\n" * 300,
        "one line\n2,3 lines\n",
        'with ""quotes""\nand more, much, more',
    ],
)
def test_text_of_several_lines_is_believed(review: str, tmp_path: Path, rejects: Rejects) -> None:
    """It looks like rows at most in the number of its commas."""
    content = "user,item,timestamp,review\n" + "".join(f'u{row},i{row},{row},"{review}"\n' for row in range(9))
    read = [text for *_, text in actions_of(file_of(tmp_path, content.encode()), rejects, more=["review"])]
    assert read == [review.replace('""', '"')] * 9 and rejects.count == 0


def test_a_row_may_go_on_in_the_next_block(tmp_path: Path, rejects: Rejects, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text, "BLOCK_BYTES", 20)
    reviews = ["one\nand another line\n\nand the last", "short", 'with ""quotes""\n' * 5]
    lines = "".join(f'u,i{row},{row},"{review}"\n' for row, review in enumerate(reviews))
    read = actions_of(file_of(tmp_path, f"user,item,timestamp,review\n{lines}".encode()), rejects, more=["review"])
    assert [review for *_, review in read] == [review.replace('""', '"') for review in reviews] and not rejects.count


def test_the_lines_after_an_open_quote_are_read_by_themselves(tmp_path: Path, rejects: Rejects) -> None:
    content = b'user,item,timestamp,review\nu,a,1,fine\nu,b,2,"some text\nand more of it\nand'
    assert len(actions_of(file_of(tmp_path, content), rejects)) == 1
    assert [line[1] for line in listed(rejects)] == ["3", "4", "5"] and rejects.lines == 4
