"""Where a stop string ends a growing text: pure, and the same however the text is cut into pieces.

The stop string whose last character comes first wins; of several ending there, the longest. This is what a reader of
single characters would decide, so that a stream never has to wait for a longer match and never takes text back.
"""

from typing import NamedTuple


class Scan(NamedTuple):
    """Between two pieces: `held` is the end of the text so far in which a stop string may have begun."""

    stops: tuple[str, ...]
    keeps: bool = False  # the stop string is part of the text
    held: str = ""


def scan(state: Scan, text: str) -> tuple[Scan, str, str | None]:
    """One more piece: what can be said now, and the stop string that ends the text, if one does.

    Costs time in proportion to the piece, what is held, and the number of stop strings.
    """
    text = state.held + text
    places = [(at + len(stop), at, stop) for stop in state.stops if (at := text.find(stop)) >= 0]
    if places:
        end, start, stop = min(places)
        return state._replace(held=""), text[: end if state.keeps else start], stop
    cut = _held_from(text, state.stops)
    return state._replace(held=text[cut:]), text[:cut], None


def release(state: Scan) -> tuple[Scan, str]:
    """The text goes on no further, or elsewhere: what was held is said."""
    return state._replace(held=""), state.held


def _held_from(text: str, stops: tuple[str, ...]) -> int:
    """Where the longest end of the text starts that a stop string begins with."""
    longest = max(map(len, stops), default=1)
    for at in range(max(0, len(text) - longest + 1), len(text)):
        rest = text[at:]
        if any(stop.startswith(rest) for stop in stops):
            return at
    return len(text)
