"""Words to people: printed lines name a copy by its URL, show no secret of a URL, and cannot control a terminal."""

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

urls: dict[Path, str] = {}
"""The copies of what is in a store that this process has named, and their URLs (storage.py)."""


def shown(text: object) -> str:
    """A text for people, as `plain`, with URLs in place of the paths of their copies. `say`, `show`, `tell` and
    `naming_urls` do this for all that passes through them, so only what goes elsewhere, such as a page, calls it."""
    said = str(text)
    for path, url in list(urls.items()):
        said = re.sub(re.escape(str(path)) + r"(?![\w.-])", url.replace("\\", r"\\"), said)
    return plain(said)


def plain(text: object) -> str:
    """A text as all that is printed or put into a page: without passwords and signatures of URLs, and with escapes in
    place of characters that would control a terminal."""
    return _CONTROLS.sub(lambda found: found[0].encode("unicode_escape").decode("ascii"), _masked(str(text)))


_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Those of terminals but newline and tab, line separators, marks that turn the direction of a text, and surrogates."""
_SECRETS = (
    # A port is no password. A Path has dropped a slash.
    re.compile(r"(:/{1,2}[^\s/@:?#]*:)(?!\d+(?:[/?#\s]|$))\S+(@)"),
    # With other protocols, a name alone is that of a user, or of a container.
    re.compile(r"(https?:/{1,2})[^\s/@:?#]+(@)"),
    re.compile(
        r"([?&;#][^\s=&?]*(?:sig|token|key|secret|pass|pwd|credential|auth|policy|code|jwt|session)[^\s=&?]*=)"
        r"[^\s&#'\"]+()",
        re.IGNORECASE,
    ),
)
"""Secrets of URLs, between what is shown before and after them."""


def _masked(text: str) -> str:
    for pattern in _SECRETS:
        text = pattern.sub(r"\1***\2", text)
    return text


def require_no_secrets(name: str, place: str) -> None:
    """ValueError if a setting is a URL with a password or a signature: files, logs and pages would show it."""
    one_word = "".join(place.split())
    if "://" in place and _masked(one_word) != one_word:
        raise ValueError(
            f"{name} is {_masked(one_word)}, a URL with a secret, which files and logs would hold; give it to fsspec "
            "in the environment (AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY), or in a file of ~/.config/fsspec"
        )


def say(line: object) -> None:
    """Prints a line for people on stderr, as `shown`."""
    print(shown(line), file=sys.stderr, flush=True)


def say_of_disk(line: object) -> None:
    """Prints a line, `plain`, of an OSError: the trouble is with the disk that holds a copy, so its path stays."""
    print(plain(line), file=sys.stderr, flush=True)


def show(text: object) -> None:
    """Prints a command's result for people on stdout, `shown`."""
    print(shown(text))


def tell(console: "Console | None", line: object, style: str | None = None) -> None:
    """Prints a line for people, `shown`, where there is a console."""
    if console:
        console.print(shown(line), style=style, markup=False, highlight=False, soft_wrap=True)


@contextmanager
def naming_urls() -> Iterator[None]:
    """The message of a ValueError within is one line, as `shown`."""
    try:
        yield
    except ValueError as error:
        line = " ".join(shown(error).splitlines())
        if line == str(error):
            raise
        raise ValueError(line) from None


@contextmanager
def prefixed(what: str, kinds: type[Exception] | tuple[type[Exception], ...] = ValueError) -> Iterator[None]:
    """Turns an exception of the given kinds within into a ValueError whose line begins with `what`."""
    try:
        yield
    except kinds as error:
        raise ValueError(f"{what}{error}") from None
