"""One conversation: the ids in the state, the one that is not in yet, and what target and drafter keep of them."""

from typing import Any, NamedTuple

import mlx.core as mx

from specmlx.cache.layers import LayerStates


class Observable(NamedTuple):
    """Rows of the last pass that a drafter may still observe: tokens `[1, T]` and their taps `[1, T, F]`, if any."""

    tokens: mx.array
    features: mx.array | None


Count = int | list[int]
"""How many rows of a pass are in: of one conversation, or of each of several."""


class Draft(NamedTuple):
    """A drafter and its context, which has the first `end` rows of a conversation (of several: so many of all of them).

    ahead: it was shown the rows of the pass after them too, before it was known how many stay (see `Context.settle`).
    waiting: rows behind `end` that it will be shown when it is to propose again, of each pass the first so many.
    """

    drafter: Any
    context: Any
    end: int
    ahead: bool = False
    waiting: tuple[tuple[Observable, Count], ...] = ()

    @property
    def known(self) -> int:
        """Rows that it has or that wait for it."""
        end = self.end
        for _, count in self.waiting:
            end += count if isinstance(count, int) else sum(count)
        return end


class Held:
    """What target and drafter keep of a conversation, or of several together (see `decoding.joint`).

    `draft` is the last drafter's context; `unobserved` the rows that it has not seen, as many as `count`.
    lengths: rows that are in, of each of the conversations, which are `members`; count: those of the last pass.
    """

    states: LayerStates
    lengths: list[int]
    count: Count
    members: "list[Conversation]"
    draft: Draft | None = None
    unobserved: Observable | None = None

    def begin(self, rows: Observable | None) -> None:
        """The open pass is about to be committed, and the drafter may observe `rows`."""
        self.unobserved = rows

    def commit(self, count: int, token: int, index: int = 0) -> None:
        """Let `count` rows of the open pass in; `token`, the conversation's newest, is not in yet."""
        raise NotImplementedError

    def draft_arrays(self) -> list[mx.array]:
        """What to evaluate for the drafter's context to stand on its own: in another thread, or many rounds on."""
        return [] if self.draft is None else self.draft.context.arrays()


class Conversation(Held):
    """Processed ids are in `states`; `pending` has left but is not in. Together: what the user was given.

    One request at a time owns it: `claim` takes it over, and an older owner's next step raises.
    An interrupt may fall anywhere: ids are recorded before their rows enter the states, and `settle` takes back those
    whose rows did not. `model` is the fingerprint of the model whose states these are; None where it is not known.
    `max_kv_size`: the most tokens that it may hold, if there is a limit of its own.
    """

    def __init__(self, states: LayerStates, processed: list[int] | None = None, pending: int | None = None):
        self.states = states
        self.processed = processed if processed is not None else []
        self.pending = pending
        self.model: str | None = None
        self.max_kv_size: int | None = None
        self.owner = 0

    def __deepcopy__(self, memo: dict) -> "Conversation":
        """Another conversation that goes on from here, as copies of mlx-lm's caches do; its drafter starts here."""
        copied = Conversation(self.states.copy(), self.processed[: self.states.length], self.pending)
        copied.model, copied.max_kv_size = self.model, self.max_kv_size
        return copied

    @property
    def pending(self) -> int | None:
        """The id behind the processed ones, which has left to the user but is not in; None if there is none."""
        index, token = self._pending
        return token if index == len(self.processed) else None

    @pending.setter
    def pending(self, token: int | None) -> None:
        # With its index, so that it is pending no longer once it has been recorded as processed.
        self._pending = (len(self.processed), token)

    @property
    def tokens(self) -> list[int]:
        """All ids that the conversation holds, the pending one included."""
        return self.processed + ([] if self.pending is None else [self.pending])

    @property
    def nbytes(self) -> int:
        return self.states.nbytes

    @property
    def lengths(self) -> list[int]:
        """See `Held`."""
        return [self.states.length]

    @property
    def count(self) -> int:
        """See `Held`."""
        return self.states.count

    @property
    def members(self) -> "list[Conversation]":
        """See `Held`."""
        return [self]

    def claim(self) -> int:
        """Take the conversation over and get the owner's number."""
        self.settle()
        self.owner += 1
        return self.owner

    def settle(self) -> None:
        """Make record and states agree after whatever ended a request: a pass that it left open is dropped."""
        self.states.abort()
        del self.processed[self.states.length :]

    def owned_by(self, owner: int) -> bool:
        return owner == self.owner

    def check(self, owner: int) -> None:
        """Raises RuntimeError when another request has taken the conversation over."""
        if owner != self.owner:
            raise RuntimeError("another request has taken this conversation over: this generator can't go on")

    def commit(self, count: int, token: int, index: int = 0) -> None:
        """See `Held`."""
        self.processed.append(self._pending[1])
        self.states.commit(count)
        self._pending = (len(self.processed), token)
