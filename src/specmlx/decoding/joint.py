"""Several conversations whose rows are in the same states: how they come together, and how they part."""

from collections.abc import Sequence

import mlx.core as mx

from specmlx.cache.conversation import Conversation, Draft, Held, Observable
from specmlx.cache.layers import LayerStates
from specmlx.decoding.drafting import joined, observe, taken
from specmlx.drafters.proposal import Drafter


class Joint(Held):
    """Conversations in one, in order; they have no states of their own until they part."""

    def __init__(self, conversations: Sequence[Conversation], states: LayerStates, draft: Draft | None):
        self.conversations, self.states, self.draft = list(conversations), states, draft
        # Rows before the last pass, and those of it that are in.
        self._before = [len(conversation.processed) for conversation in conversations]
        self._count = [0] * len(self._before)

    @property
    def lengths(self) -> list[int]:
        """See `Held`."""
        return [length + count for length, count in zip(self._before, self._count, strict=True)]

    @property
    def count(self) -> list[int]:
        """See `Held`."""
        return self._count

    @property
    def members(self) -> list[Conversation]:
        """See `Held`."""
        return self.conversations

    def begin(self, rows: Observable | None) -> None:
        """See `Held`."""
        super().begin(rows)
        self._before, self._count = self.lengths, [0] * len(self._before)
        self.states.commit(self._count)

    def commit(self, count: int, token: int, index: int = 0) -> None:
        """See `Held`."""
        conversation = self.conversations[index]
        conversation.processed.append(conversation.pending)
        self._count = [*self._count[:index], count, *self._count[index + 1 :]]
        self.states.commit(self._count)
        # All that they know is how many rows each pass let in at most.
        self.states.max_length = max(self.lengths)
        conversation.pending = token


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
    draft = None if drafter is None else joined([part.draft for part in parts])
    joint = Joint(members, states, draft)
    for each in members:
        # They are in the batch's now: not kept twice.
        each.states, each.draft, each.unobserved = LayerStates([]), None, None
    return joint


def part(joint: Joint, index: int) -> Conversation:
    """A conversation with its own states again; the drafter has seen all of its rows."""
    conversation = joint.conversations[index]
    rows = len(conversation.processed)
    conversation.states = joint.states.lanes([index], rows)
    conversation.states.start = rows
    conversation.draft = None if joint.draft is None else taken(joint.draft, [index], rows)
    return conversation


def keep(held: Held, indices: Sequence[int]) -> Held | None:
    """Those of the conversations that stay together; the drafter has seen all of their rows."""
    if not indices or len(indices) == len(held.members):
        return held if indices else None
    if len(indices) == 1:
        return part(held, indices[0])
    members = [held.conversations[i] for i in indices]
    rows = [len(each.processed) for each in members]
    draft = None if held.draft is None else taken(held.draft, indices, sum(rows))
    return Joint(members, held.states.lanes(indices, max(rows)), draft)
