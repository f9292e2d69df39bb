"""How many tokens to propose for lanes that share their passes: one number for all, by how many lanes there are."""

from collections.abc import Callable

from specmlx.decoding.draft_length import AutoWidth, FixedWidth, Widths


class LaneWidths:
    """Chooses the width of rounds of several lanes, for 1, 2, up to 4, up to 8 … lanes apart.

    A drafted token is a row in every lane: where a pass is bound by arithmetic, many lanes can pay for fewer of them.
    new: what chooses for about so many lanes; it learns what their rounds take and what each lane keeps of a proposal.
    """

    def __init__(self, new: Callable[[int], AutoWidth]):
        self._new = new
        self._widths: dict[int, AutoWidth] = {}

    def __call__(self, lanes: int) -> AutoWidth:
        """What chooses for so many lanes."""
        about = 1 << (lanes - 1).bit_length()
        if about not in self._widths:
            self._widths[about] = self._new(about)
        return self._widths[about]

    def keep(self) -> None:
        """Write what was learnt, and go on from there: no round is under way."""
        for widths in self._widths.values():
            widths.keep()
        self._widths = {}


def widths_of(num_draft_tokens: int | Widths | Callable[[int], Widths] | None, most: int) -> Callable[[int], Widths]:
    """What chooses for so many sequences: the same for any number of them, or what is given. None is the `most`.

    Raises ValueError for a number outside 0..most.
    """
    if num_draft_tokens is None or isinstance(num_draft_tokens, int):
        num_draft_tokens = FixedWidth(most if num_draft_tokens is None else num_draft_tokens)
    if not isinstance(num_draft_tokens, Widths):
        return num_draft_tokens
    if not 0 <= num_draft_tokens.most <= most:
        raise ValueError(f"num_draft_tokens is {num_draft_tokens.most}: this drafter proposes 0 to {most}")
    return lambda batch: num_draft_tokens
