import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from small_models import in_order

from logitmix.serving.texts import ABSENT, Texts


@pytest.mark.long
@given(st.lists(st.text(st.characters(), max_size=4), unique=True, max_size=20), st.text(max_size=4))
def test_texts_are_what_they_were_made_of_and_are_found(texts: list[str], other: str) -> None:
    made = in_order(texts)
    assert (list(made), len(made), made.problem() if texts else None) == (texts, len(texts), None)
    assert [made.find(text) for text in texts] == list(range(len(texts)))
    assert made.find(other) == (texts.index(other) if other in texts else None)
    if texts:
        asked = [*texts, other, *texts[:3]]
        assert made.places(asked) == [texts.index(text) if text in texts else ABSENT for text in asked]
        # Now by their hashes.
        assert [made.find(text) for text in asked] == [texts.index(text) if text in texts else None for text in asked]


def test_texts_are_a_sequence() -> None:
    texts = Texts.of(["a", "", "\ud800é"])
    assert (texts[-1], texts[1:], texts.index("")) == ("\ud800é", ["", "\ud800é"], 1)
    with pytest.raises(IndexError):
        texts[3]


LETTERS = st.text(st.sampled_from("aAbéÉßS\u0130\ud800"), max_size=4)


@example(["xa", "bx", "", "ab"], "ab", 0, 4)
@given(st.lists(LETTERS, max_size=20), LETTERS.filter(bool), st.integers(0, 20), st.integers(0, 20))
def test_texts_are_found_by_parts_in_either_case(texts: list[str], part: str, start: int, stop: int) -> None:
    start, stop = sorted((min(start, len(texts)), min(stop, len(texts))))
    wanted = re.compile("".join(f"(?:{one}|{one.lower()}|{one.upper()})" for one in part))
    expected = [place for place in range(start, stop) if wanted.search(texts[place])]
    assert list(Texts.of(texts).containing(part, start, stop)) == expected


def test_signs_of_patterns_are_letters_like_others() -> None:
    assert list(Texts.of(["a.b", "axb", "(*"]).containing("A.B", 0, 3)) == [0]
    assert list(Texts.of(["a.b", "axb", "(*"]).containing("(*", 0, 3)) == [2]
