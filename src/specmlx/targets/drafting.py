"""What a target knows of its drafter."""

from dataclasses import dataclass

from specmlx.drafters.proposal import Drafter


@dataclass(frozen=True)
class Drafting:
    """A target's own drafter, or why it has none."""

    drafter: Drafter | None = None
    reason: str | None = "no drafter was loaded"
