"""Where does a stop string end the reply?

The first stop string to be completed wins, and of several that end together the longest: a rule
that does not depend on how the text was cut. Text that may be the head of a stop string is held
back, and no more than that. Reasoning and content are searched alike, each on its own; a tool call
is never searched, because a call cut in its middle would be neither a call nor an answer.
"""

from __future__ import annotations

from collections.abc import Sequence

from capserve.text.markup import unfinished


class StopFilter:
    """One channel's filter. After a match, nothing more is to be fed."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._held = ""
        self.matched: str | None = None

    def feed(self, text: str) -> str:
        """What may be shown now: everything before a stop string, never a part of it."""
        assert self.matched is None, "fed after a match"
        if not self._stops:
            return text
        text = self._held + text
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            _, at, self.matched = min(found)
            self._held = ""
            return text[:at]
        shown = len(text) - unfinished(text, self._stops)
        self._held = text[shown:]
        return text[:shown]

    def flush(self) -> str:
        """What was held back; the channel ends or is interrupted here."""
        text, self._held = self._held, ""
        return text
