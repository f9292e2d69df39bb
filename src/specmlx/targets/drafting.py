"""What a target knows of its drafter."""

import warnings
from dataclasses import dataclass

from specmlx.drafters.proposal import Drafter

FIRST, LEAST = 100, 5
"""Of so many of a drafter's first proposals, so many have to be kept for nothing to be said."""


@dataclass(frozen=True)
class Drafting:
    """A target's own drafter, or why it has none; with both, one that is taken where there is none (prompt lookup)."""

    drafter: Drafter | None = None
    reason: str | None = "no drafter was loaded"


@dataclass
class FirstProposals:
    """A drafter's first proposals, over all requests, and how many of them were kept."""

    drafter: Drafter
    proposed: int = 0
    accepted: int = 0


class Drafted:
    """A target that keeps a drafter, outside of its own parameters."""

    _drafting = Drafting()
    _first: FirstProposals | None = None

    def attach(self, drafter: Drafter | None, reason: str | None = None) -> None:
        """Keep a drafter as `draft_model`; `reason` says why there is none, or none but this."""
        self._drafting = Drafting(drafter, reason)

    @property
    def draft_model(self) -> Drafter | None:
        return self._drafting.drafter

    @property
    def no_draft_reason(self) -> str | None:
        """Why `draft_model` is None, or a fallback, in one line."""
        return self._drafting.reason

    @property
    def fallback(self) -> Drafter | None:
        """The drafter that nobody asked for, where there is no other."""
        return None if self._drafting.reason is None else self._drafting.drafter

    def count_first(self, drafter: Drafter, proposed: int, accepted: int) -> None:
        """Count a request's proposals, of which so many among its first were kept; warn once of one that is no use."""
        if self._first is None or self._first.drafter is not drafter:
            self._first = FirstProposals(drafter)
        first = self._first
        if first.proposed >= FIRST:
            return
        first.proposed += proposed
        first.accepted += accepted
        if first.proposed >= FIRST and first.accepted < LEAST:
            warnings.warn(
                f"the drafter hardly helps: {first.accepted} of its first {FIRST} proposals were kept. "
                "Was it made for this model?",
                stacklevel=5,
            )
