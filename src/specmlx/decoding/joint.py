"""Several conversations whose rows are in the same states: how they come together, and how they part."""

from collections.abc import Sequence

import mlx.core as mx

from specmlx.cache.conversation import Conversation, Draft, Held, Observable
from specmlx.cache.layers import LayerStates
from specmlx.decoding.round import joined, observe
from specmlx.drafters.proposal import Drafter


class Joint(Held):
    """Conversations in one, in order (`members`); they have no states of their own until they part."""

    def __init__(self, members: Sequence[Conversation], states: LayerStates, draft: Draft | None):
        self.members, self.states, self.draft = list(members), states, draft
        # Rows before the last pass: one that has parted goes on elsewhere.
        self._before = [len(conversation.processed) for conversation in self.members]
        self.count = [0] * len(self._before)

    @property
    def lengths(self) -> list[int]:
        """See `Held`."""
        return [length + count for length, count in zip(self._before, self.count, strict=True)]

    def begin(self, rows: Observable | None) -> None:
        """See `Held`."""
        super().begin(rows)
        self._before, self.count = self.lengths, [0] * len(self.members)
        self.states.commit(self.count)

    def commit(self, count: int, token: int, index: int = 0) -> None:
        """See `Held`."""
        conversation = self.members[index]
        conversation.processed.append(conversation.pending)
        self.count = [*self.count[:index], count, *self.count[index + 1 :]]
        self.states.commit(self.count)
        # The states only know how many rows each pass let in at most.
        self.states.max_length = max(self.lengths)
        conversation.pending = token

    def part(self, index: int) -> Conversation:
        """A conversation with its own states again; the drafter has seen all of its rows."""
        conversation = self.members[index]
        rows = len(conversation.processed)
        conversation.states = self.states.lanes([index], rows)
        conversation.states.start = rows
        conversation.draft = self.draft_of([index], rows)
        return conversation

    def draft_of(self, indices: Sequence[int], rows: int) -> Draft | None:
        """The draft of some of the conversations, which have so many rows."""
        return self.draft and Draft(self.draft.drafter, self.draft.context.lanes(indices), rows)


def join(held: Held | None, conversations: Sequence[Conversation], drafter: Drafter | None) -> Held | None:
    """Conversations behind those that are `held`; one that is alone keeps what it has."""
    parts = [*([] if held is None else [held]), *conversations]
    if len(parts) < 2:
        return parts[0] if parts else None
    for part in parts:
        observe(part, drafter)
    states = type(parts[0].states).merged([part.states for part in parts])
    mx.eval([x for layer in states.layers if layer is not None for x in layer if isinstance(x, mx.array)])
    members = [each for part in parts for each in part.members]
    joint = Joint(members, states, drafter and joined([part.draft for part in parts]))
    for each in members:
        # They are in the batch's now: not kept twice.
        each.states, each.draft, each.unobserved = LayerStates([]), None, None
    return joint


def keep(held: Held | None, indices: Sequence[int]) -> Held | None:
    """Those of the conversations that stay, if any; the drafter has seen all of their rows."""
    if held is None or not indices:
        return None
    if len(indices) == len(held.members):
        return held
    if len(indices) == 1:
        return held.part(indices[0])
    rows = [held.lengths[i] for i in indices]
    draft = held.draft_of(indices, sum(rows))
    return Joint([held.members[i] for i in indices], held.states.lanes(indices, max(rows)), draft)
