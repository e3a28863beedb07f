"""An encoder of texts of one's own: how often each letter occurs. A sentence encoder takes its place in one line, such
as `TEXT_ENCODERS["minilm"] = SentenceTransformer("all-MiniLM-L6-v2").encode`.

    logitmix prepare table --source clicks.csv --items items.csv --embed title --embed-with letters --out data/clicks \
        --import letters.py

Exports and datasets name it with its version. Training and serving need no --import; `prepare --append` and
`update-items`, which encode new texts, do.
"""

from string import ascii_lowercase

import numpy as np

from logitmix.modules.kinds.text import TEXT_ENCODERS


def letters(texts: list[str]) -> np.ndarray:
    """Numbers [texts, width]."""
    return np.array([[text.lower().count(letter) for letter in ascii_lowercase] for text in texts], np.float32)


TEXT_ENCODERS["letters"] = letters
