"""Lanes on both sides of the row from which keys and values are kept in fewer bits."""

from collections.abc import Callable, Collection, Sequence

from specmlx.speculation.lanes import Lane, Lanes


class Stages:
    """Lanes whose keys are kept as they are and lanes behind `start`, whose keys are quantized, each in their passes.

    A lane changes over when it has just `start` rows, as alone: no round of a drafter reaches across. `new` makes the
    (empty) lanes of one stage. Otherwise this is used as `Lanes` are.
    """

    def __init__(self, new: Callable[[], Lanes], start: int):
        self.start = start
        self.before, self.behind = new(), new()

    @property
    def lanes(self) -> list[Lane]:
        return self.before.lanes + self.behind.lanes

    @property
    def rounds(self) -> int:
        """Passes over the target."""
        return self.before.rounds + self.behind.rounds

    def join(self, lanes: Sequence[Lane]) -> None:
        """See `Lanes.join`."""
        self.before.join([lane for lane in lanes if not self._behind(lane)])
        self.behind.join([lane for lane in lanes if self._behind(lane)])

    def leave(self, gone: Collection[Lane], keep: bool = False) -> None:
        """See `Lanes.leave`."""
        self.before.leave(gone, keep)
        self.behind.leave(gone, keep)

    def round(self) -> list[Lane]:
        """A pass for each stage that has lanes; see `Lanes.round`."""
        changing = [lane for lane in self.before.lanes if self._behind(lane)]
        if changing:
            self.before.leave(changing, keep=True)
            self.behind.join(changing)
        return [lane for stage in (self.before, self.behind) if stage.lanes for lane in stage.round()]

    def _behind(self, lane: Lane) -> bool:
        return len(lane.conversation.processed) >= self.start
