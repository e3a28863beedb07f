"""Every relative link of the Markdown files leads to a file, and to a heading if it names one."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [
    *ROOT.glob("*.md"),
    *(
        page
        for folder in ("benchmarks", "comm", "common", "docs", "examples", "launch", "modules", "serving", "trainer")
        for page in (ROOT / folder).rglob("*.md")
    ),
]
LINK = re.compile(r"\]\(([^()\s]+)\)")


def prose(page: Path) -> str:
    """Without blocks of code, whose brackets are no links."""
    return re.sub(r"^```.*?^```$|^    .*?$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """Those that GitHub makes of the headings."""
    headings = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for link in LINK.findall(prose(page)):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.is_file(), link  # A folder is no page of the site.
        assert not anchor or anchor in anchors(target), link


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_benchmarks_that_are_named_exist_or_name_their_commit(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for match in re.finditer(r"\bbenchmarks\.([a-z]\w*)", text):
        there = (ROOT / "benchmarks" / f"{match[1]}.py").is_file()
        assert there or re.search(r"\bat\s+[0-9a-f]{7}\b", text[match.end() : match.end() + 150]), match[0]


def test_tests_that_are_named_exist() -> None:
    files = list((ROOT / "tests").rglob("*.py"))
    tests = "\n".join(path.read_text(encoding="utf-8") for path in files)
    defined = {*re.findall(r"^ *def (test_\w+)", tests, re.MULTILINE), *(path.name for path in files)}
    pages = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    assert set(re.findall(r"`(test_\w+(?:\.py)?)`", pages)) <= defined


def test_the_site_has_every_page_of_its_contents_and_of_docs() -> None:
    listed = re.findall(r"^ +- .*: (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
    assert len(listed) == len(set(listed))
    # gpu.md is written by `make gpu`.
    pages = {str(page.relative_to(ROOT)) for page in PAGES if page.name != "gpu.md"}
    assert set(listed) == pages
