"""One conversation: the ids in the state, the one that is not in yet, and what target and drafter keep of them."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx

from specmlx.formats.sealed import load_sealed, save_sealed
from specmlx.state import checks
from specmlx.state.kv import KV
from specmlx.state.layers import LayerStates
from specmlx.state.quantized_kv import of_arrays
from specmlx.state.recurrent import Recurrent

FORMAT = "specmlx-conversation-2"
_FIELDS = ("model", "kv_format", "max_kv_size", "layers", "processed", "pending", "metadata")
_MOST_LAYERS = 10_000


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
    """What target and drafter keep of a conversation, or of several together (see `speculation.joint`).

    `draft` is the last drafter's context; `unobserved` the rows that it has not seen, as many as `count`.
    """

    states: LayerStates
    draft: Draft | None = None
    unobserved: Observable | None = None

    @property
    def lengths(self) -> list[int]:
        """Rows that are in, of each conversation."""
        raise NotImplementedError

    @property
    def count(self) -> Count:
        """Rows of the last pass that are in."""
        raise NotImplementedError

    @property
    def members(self) -> "list[Conversation]":
        """The conversations."""
        raise NotImplementedError

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


def save(path: str | Path, conversation: Conversation, metadata: dict[str, str] | None = None) -> None:
    """Write the target's state to a safetensors file that only its owner may read, replacing it atomically.

    Drafter contexts are not kept.
    """
    arrays, states = {}, conversation.states
    for i, layer in enumerate(states.folded()):
        if isinstance(layer, KV):
            length = states.length
            arrays |= {f"{i}.kv.{part}": x[:, :, :length] for part, x in enumerate(layer.arrays())}
        elif layer is not None:
            arrays |= {f"{i}.S": layer.S, f"{i}.conv": layer.conv}
    header = {
        "model": json.dumps(conversation.model),
        "kv_format": json.dumps(states.kv_format and asdict(states.kv_format)),
        "max_kv_size": json.dumps(conversation.max_kv_size),
        "layers": str(len(conversation.states.layers)),
        "processed": json.dumps(conversation.processed),
        "pending": json.dumps(conversation.pending),
        "metadata": json.dumps(metadata or {}),
    }
    save_sealed(Path(path), arrays, header, FORMAT)


def load(path: str | Path) -> tuple[Conversation, dict[str, str]]:
    """The conversation and the metadata of a saved file. Raises ValueError in one line for what is none, or damaged."""
    arrays, header = load_sealed(Path(path), FORMAT)
    with checks.damaged(path):
        found = {name: json.loads(header[name]) for name in _FIELDS}
        layers = _layers(arrays, found)
        mx.eval(arrays)
        pending, limit, model, kv_format = (found[name] for name in ("pending", "max_kv_size", "model", "kv_format"))
        processed = found["processed"]
        states = LayerStates.holding(len(processed), layers, kv_format=checks.kv_format(kv_format))
        conversation = Conversation(states, processed, None if pending is None else checks.natural(pending, "token"))
        conversation.model = None if model is None else checks.text(model, "model")
        conversation.max_kv_size = None if limit is None else checks.natural(limit, "max_kv_size")
        return conversation, checks.texts(found["metadata"], "metadata")


def _layers(arrays: dict[str, mx.array], found: dict[str, Any]) -> list:
    rows, layers = len(checks.tokens(found["processed"])), []
    known: set[str] = set()
    for i in range(checks.natural(found["layers"], "layers", _MOST_LAYERS)):
        parts = [name for name in (f"{i}.S", f"{i}.conv") if name in arrays]
        if parts:
            layers.append(Recurrent(arrays[f"{i}.S"], arrays[f"{i}.conv"]))
        else:
            parts = sorted(name for name in arrays if name.startswith(f"{i}.kv."))
            layers.append(of_arrays([arrays[name] for name in parts]) if checks.parts(len(parts)) else None)
        checks.check_layer(layers[-1], rows, f"layer {i}")
        known.update(parts)
    checks.all_known(arrays, known)
    return layers
