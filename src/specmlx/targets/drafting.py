"""What a target knows of its drafter."""

from dataclasses import dataclass

from specmlx.drafters.proposal import Drafter


@dataclass(frozen=True)
class Drafting:
    """A target's own drafter, or why it has none; with both, one that is taken where there is none (prompt lookup)."""

    drafter: Drafter | None = None
    reason: str | None = "no drafter was loaded"


class Drafted:
    """A target that keeps a drafter, outside of its own parameters."""

    _drafting = Drafting()

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
