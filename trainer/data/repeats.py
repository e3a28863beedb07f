"""Targets that are in their user's history already: when they are common, and what that means for hit rates."""

from collections.abc import Mapping

COMMON_REPEATS, RARE_REPEATS = 0.1, 0.01
"""From the first share of repeated targets on, evaluation does not leave the history out of its ranking unless told to;
from the second one on, it says what is impossible where it does."""


def are_common(repeated: Mapping[str, float]) -> bool:
    """Whether the shares of repeated targets are such that a ranking without the history would mean little. That of
    test counts, too: what is decided on it is the rule, and for all methods alike."""
    return max(repeated.values()) >= COMMON_REPEATS


def said_of_repeats(repeated: Mapping[str, float]) -> str:
    """How large these shares are."""
    return " and ".join(f"{share:.0%} of the {split} targets" for split, share in repeated.items())


def highest_hit_rates(repeated: Mapping[str, float]) -> str:
    """The limits of hit rates without the history; empty where it hardly matters."""
    if max(repeated.values()) < RARE_REPEATS:
        return ""
    most = " and ".join(f"{1 - share:.2f} in {split}" for split, share in repeated.items())
    return f"no hit rate can be above {most}"
