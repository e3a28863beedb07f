import json
import random
from pathlib import Path

import pytest

from logitmix.common.checked import Checked, check_file, entry_of, entry_of_bytes, fields_of, json_digest, require_entry

FORMAT = Checked("test", 2)
CONTENT = {"text": "ü\ud800", "number": 1e-05, "files": {"a": {"bytes": 3, "sha256": "0"}}}


def test_every_changed_bit_is_found() -> None:
    whole = FORMAT.text(CONTENT).encode()
    assert fields_of(FORMAT.parse(whole, "here")) == CONTENT
    for bit in range(8 * len(whole)):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(ValueError, match=r"^here is damaged \("):
            FORMAT.parse(bytes(damaged), "here")
    for length in range(len(whole)):
        with pytest.raises(ValueError, match=r"^here is damaged \("):
            FORMAT.parse(whole[:length], "here")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (Checked("another", 2).text({}), "here: kind is 'another', not 'test'"),
        (Checked("test", 1).text({}), "here: format_version is 1, and this logitmix reads 2"),
        ("[]", r"here is damaged \(it is \[\], not a JSON object\)"),
        ('{"format_version": 1}', r"here is damaged \(its sha256 is not .*; its format_version is 1, not 2\)"),
    ],
)
def test_what_is_another_is_refused(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=f"^{said}$"):
        FORMAT.parse(text.encode(), "here")


def test_what_is_written_is_read_and_has_the_digest_of_its_other_fields(tmp_path: Path) -> None:
    file = tmp_path / "test.json"
    written = FORMAT.write(file, CONTENT)
    assert written == FORMAT.read(file) == json.loads(file.read_text())
    assert file.read_text() == FORMAT.text(CONTENT) == FORMAT.text(written)
    digest = written.pop("sha256")
    assert digest == json_digest(dict(random.Random(0).sample(list(written.items()), len(written))))


def test_a_file_that_is_another_is_told(tmp_path: Path) -> None:
    file = tmp_path / "a"
    file.write_bytes(b"abc")
    entry = entry_of(file)
    assert entry == entry_of_bytes(b"abc")
    check_file(file, entry, "all.json")
    for content, said in ((b"abd", "its SHA-256 is not that in all.json"), (b"abcd", "4 bytes, 3 in all.json")):
        file.write_bytes(content)
        with pytest.raises(ValueError, match=rf"^{file} is damaged \({said}\)$"):
            check_file(file, entry, "all.json")
    file.write_bytes(b"abd")
    check_file(file, entry, "all.json", content=False)
    file.unlink()
    with pytest.raises(ValueError, match=r"^it is missing$"):
        check_file(file, entry, "all.json", "it")
    file.mkdir()
    with pytest.raises(ValueError, match=r"^it is a folder, not a file$"):
        check_file(file, entry, "all.json", "it")


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ({"bytes": 3}, "of a has no field sha256"),
        ({"bytes": 3, "sha256": "0", "x": 1}, "of a has a field x that this logitmix does not know"),
        ({"bytes": "3", "sha256": "0"}, "of a.bytes is '3', not a number of bytes"),
        ({"bytes": -1, "sha256": "0"}, "of a.bytes is -1, not a number of bytes"),
    ],
)
def test_what_is_no_entry_of_a_file_is_refused(entry: object, said: str) -> None:
    with pytest.raises(ValueError) as error:
        require_entry(entry, "of a")
    assert str(error.value) == said
