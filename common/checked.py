"""JSON files in which every changed bit is found: they say what they are, and have digests of themselves and of others.

    kind, format_version      what the file is
    ...                       its fields
    files                     {name: {"bytes": size, "sha256": digest}} of the files that belong to it, if there are any
    sha256                    digest of the other fields, as compact JSON in ASCII with sorted keys

dataset.json, checkpoint.json, manifest.json, digests.json and copy.json are such files. They are read byte by byte as
`Checked.text` lays them out, because some changed bits leave the same values: e and E in a number, or a space.

What is wrong is a ValueError that begins with the name of the file, or with `where` in place of that.
"""

import hashlib
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from logitmix.common.files import file_digest, other_kind, parse_json, require_file
from logitmix.common.mappings import brief

_OWN = ("kind", "format_version", "sha256")


@dataclass(frozen=True)
class Checked:
    """A format of such files."""

    kind: str
    version: int

    def text(self, content: Mapping[str, Any]) -> str:
        """The text of a file with these fields, and with kind, version and digest. ASCII with escapes preserves every
        text, even unpaired surrogates."""
        whole = {"kind": self.kind, "format_version": self.version, **content}
        digest = json_digest({name: of for name, of in whole.items() if name != "sha256"})
        return json.dumps(whole | {"sha256": digest}, indent=1) + "\n"

    def write(self, file: Path, content: Mapping[str, Any]) -> dict[str, Any]:
        """Writes a file with these fields; returns what `read` returns of it."""
        text = self.text(content)
        file.write_text(text, encoding="ascii")
        found: dict[str, Any] = json.loads(text)
        return found

    def read(self, file: Path) -> dict[str, Any]:
        """All fields of a file. ValueError if it is not as it was written, or of another kind or version."""
        require_file(file)
        return self.parse(file.read_bytes(), str(file))

    def parse(self, content: bytes, where: str) -> dict[str, Any]:
        """All fields, from the bytes of a file. ValueError as of `read`."""
        found = parse_json(content, where)
        if not isinstance(found, dict):
            raise ValueError(f"{where} is damaged (it is {brief(found)}, not a JSON object)")
        kind, version = found.get("kind"), found.get("format_version")
        if content != self.text(found).encode():
            other = "" if version == self.version else f"; its format_version is {brief(version)}, not {self.version}"
            raise ValueError(f"{where} is damaged (its sha256 is not that of its content{other})")
        if kind != self.kind:
            raise ValueError(f"{where}: kind is {brief(kind)}, not {self.kind!r}")
        if type(version) is not int or version != self.version:
            raise ValueError(f"{where}: format_version is {brief(version)}, and this logitmix reads {self.version}")
        return found


def fields_of(found: Mapping[str, Any]) -> dict[str, Any]:
    """What `Checked.read` returns without kind, version and digest."""
    return {name: of for name, of in found.items() if name not in _OWN}


def json_digest(content: Mapping[str, Any]) -> str:
    """SHA-256 of a mapping as compact JSON in ASCII with sorted keys."""
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def entry_of(file: Path) -> dict[str, Any]:
    """The entry in `files` of a file. ValueError if something else is there."""
    return {"bytes": file.stat().st_size, "sha256": file_digest(file)}


def entry_of_bytes(content: bytes) -> dict[str, Any]:
    """The entry of a file with this content."""
    return {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def require_entry(entry: Any, where: str, more: Collection[str] = ()) -> None:
    """ValueError if this is no entry of a file, with `more` fields besides."""
    require_fields(entry, ("bytes", "sha256", *more), where)
    if type(entry["bytes"]) is not int or not 0 <= entry["bytes"] < 2**63:
        raise ValueError(f"{where}.bytes is {brief(entry['bytes'])}, not a number of bytes")
    if not isinstance(entry["sha256"], str):
        raise ValueError(f"{where}.sha256 is {brief(entry['sha256'])}, not a text")


def require_fields(found: Any, names: Collection[str], where: str) -> None:
    """ValueError if this is no JSON object with these names."""
    if not isinstance(found, dict):
        raise ValueError(f"{where} is {brief(found)}, not a mapping")
    for name in names:
        if name not in found:
            raise ValueError(f"{where} has no field {name}")
    for name in found:
        if name not in names:
            raise ValueError(f"{where} has a field {name:.80} that this logitmix does not know")


def check_file(file: Path, entry: Mapping[str, Any], said_in: str, where: str = "", content: bool = True) -> None:
    """ValueError if a file is not that of an entry, which the file `said_in` has; without `content`, its size alone is
    compared."""
    where = where or str(file)
    if not file.exists():
        raise ValueError(f"{where} is missing")
    if kind := other_kind(file):
        raise ValueError(f"{where} is a {kind}, not a file")
    if (size := file.stat().st_size) != entry["bytes"]:
        raise ValueError(f"{where} is damaged ({size} bytes, {entry['bytes']} in {said_in})")
    if content and file_digest(file) != entry["sha256"]:
        raise ValueError(f"{where} is damaged (its SHA-256 is not that in {said_in})")
