"""Stop strings in streamed text, wherever the borders of tokens and blocks fall."""

from collections.abc import Iterable, Sequence


class StopStrings:
    """Holds text back while it may be the beginning of a stop string, and ends at the first whole one."""

    def __init__(self, stops: str | Sequence[str] | None = ()):
        """stops: one, several or none. Raises ValueError for what is no text, and for an empty one."""
        stops = [stops] if isinstance(stops, str) else stops or ()
        if not isinstance(stops, Iterable):
            raise ValueError(f"stop is {stops!r}: give a text or a list of texts")
        self.stops = tuple(stops)
        for stop in self.stops:
            if not isinstance(stop, str):
                raise ValueError(f"stop holds {stop!r}: give a text or a list of texts")
            if not stop:
                raise ValueError("a stop string is empty: leave it out")
        self.stopped = False
        self._held = ""

    def feed(self, text: str) -> str:
        """The text that may leave now. After a stop string, `stopped` is set and everything from it on is dropped."""
        if self.stopped:
            return ""
        if not self.stops:
            return text
        self._held += text
        found = [at for at in map(self._held.find, self.stops) if at >= 0]
        if found:
            self.stopped = True
            out, self._held = self._held[: min(found)], ""
            return out
        keep = max((_overlap(self._held, stop) for stop in self.stops), default=0)
        out = self._held[: len(self._held) - keep]
        self._held = self._held[len(self._held) - keep :]
        return out

    def flush(self) -> str:
        """What is still held back, at the end of the text."""
        out, self._held = self._held, ""
        return out


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if stop.startswith(text[-n:])), 0)
