"""Where the time of a generation goes: each phase waits for the device at its end, so nothing overlaps."""

import time
from collections.abc import Mapping
from typing import Any

import mlx.core as mx

from specmlx.decoding.stats import Stats

DRAFT, OBSERVE, VERIFY, ACCEPT = "draft", "observe", "verify", "accept"
READ, COMMIT, DETOKENIZE = "send and read", "commit", "detokenize"
OTHER = "other host work"
"""Python between the phases: the width, handing tokens out, counting."""
PHASES = (DRAFT, VERIFY, ACCEPT, READ, COMMIT, OBSERVE, DETOKENIZE, OTHER)
HOST = (COMMIT, DETOKENIZE, OTHER)
"""What is Python alone: a commit is an integer, whose rows the next verify folds."""


class Timer:
    """Seconds of decoding by phase, kept in a request's stats."""

    def __init__(self, stats: Stats):
        self.stats = stats
        self._begin = 0.0

    def start(self) -> None:
        """A phase begins."""
        self._begin = time.perf_counter()

    def lap(self, phase: str, arrays: Any = ()) -> None:
        """The phase ends once `arrays` are evaluated, and the next one begins."""
        mx.eval(arrays)
        begin, self._begin = self._begin, time.perf_counter()
        self.stats.phases[phase] = self.stats.phases.get(phase, 0.0) + self._begin - begin

    def finish(self) -> None:
        """Call what decoding took beside its phases by its name."""
        stats = self.stats
        found = stats.phases | {READ: stats.device_seconds, COMMIT: stats.commit_seconds}
        inside = sum(seconds for name, seconds in found.items() if name != DETOKENIZE)
        found[OTHER] = max(0.0, stats.decode_seconds - inside)
        stats.phases = {name: found[name] for name in PHASES if name in found}


def host_share(phases: Mapping[str, float]) -> float:
    """Of profiled decoding, the share of Python outside the calls of target, drafter and acceptance."""
    return sum(phases.get(name, 0.0) for name in HOST) / max(sum(phases.values()), 1e-9)


def round_seconds(seconds: float, away: float, waited: float, overlapped: bool) -> float | None:
    """What a round took of the `seconds` since the one before was read; None where that can't be told.

    away: seconds of them that whoever takes the tokens had. A round that went on meanwhile (`overlapped`) was as long
    as all of them if the host `waited` for it then, else it was over at some time before.
    """
    if not overlapped:
        return seconds - away
    return seconds if away < 0.1 * seconds or waited > 0.05 * seconds else None
