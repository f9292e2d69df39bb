"""How many tokens to propose for lanes that share their passes: one number for all, by how many lanes there are."""

from collections.abc import Callable, Sequence

from specmlx.speculation.width import AutoWidth


class LaneWidths:
    """Chooses the width of rounds of several lanes, for 1, 2, up to 4, up to 8 … lanes apart.

    A drafted token is a row in every lane: where a pass is bound by arithmetic, many lanes can pay for fewer of them.
    new: what chooses for about so many lanes; it learns what their rounds take and what each lane keeps of a proposal.
    """

    def __init__(self, new: Callable[[int], AutoWidth]):
        self._new = new
        self._widths: dict[int, AutoWidth] = {}

    def of(self, lanes: int) -> AutoWidth:
        """What chooses for so many lanes."""
        about = 1 << (lanes - 1).bit_length()
        if about not in self._widths:
            self._widths[about] = self._new(about)
        return self._widths[about]

    def choose(self, lanes: int, most: int | None) -> int:
        """The next round's width; one that may have `most` drafted tokens only tries nothing."""
        widths = self.of(lanes)
        return widths.choose() if most is None else min(most, widths.current or 0)

    def observed(self, lanes: int, width: int, accepted: Sequence[int], seconds: float) -> None:
        """A round for which `width` was chosen freely kept so many tokens of each lane's proposal and took `seconds`.

        A drafter may have proposed fewer: what it left out counts as not kept.
        """
        first, *others = accepted
        self.of(lanes).observed(width, first, seconds, others)

    def keep(self) -> None:
        """Write what was learnt, and go on from there: no round is under way."""
        for widths in self._widths.values():
            widths.keep()
        self._widths = {}
