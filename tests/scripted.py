"""A target without a neural network, drafters that follow a script, and a conversation of the two."""

import random
from collections.abc import Callable, Iterator, Sequence

import mlx.core as mx
import numpy as np

from specmlx.drafters.proposal import Proposal
from specmlx.speculation.loop import generate_tokens
from specmlx.speculation.policy import Policy
from specmlx.speculation.stats import Stats
from specmlx.state.conversation import Conversation
from specmlx.state.kv import reserve, write
from specmlx.state.layers import LayerStates, Pass

V = 64
_ROWS = 997
_TABLE = np.random.default_rng(0).normal(size=(_ROWS, V)).astype(np.float32)


def oracle(text: Sequence[int], count: int, stop_tokens: Sequence[int] = ()) -> list[int]:
    """The greedy continuation of a text, by numpy: `count` tokens, or up to a stop token."""
    text = list(text)
    start = len(text)
    while len(text) < start + count and not (len(text) > start and text[-1] in stop_tokens):
        row = sum(token * (i + 1) for i, token in enumerate(text)) % _ROWS
        text.append(int(_TABLE[row].argmax()))
    return text[start:]


class TableTarget:
    """The next token's logits are a row of a table that all ids so far choose together.

    Its state is a real one, with one layer that keeps the ids as keys: rows that are lost, doubled or left over change
    the text. `passes` are the widths of all verify passes; `spoilt` maps absolute indices of tokens to what their
    logits are made of instead.
    """

    vocab_size = V

    def __init__(self, spoilt: dict[int, float] | None = None):
        self.table = mx.array(_TABLE)
        self.spoilt = spoilt or {}
        self.passes: list[int] = []

    def conversation(self) -> Conversation:
        return Conversation(LayerStates([None]))

    def ids(self, conversation: Conversation) -> list[int]:
        """What the state holds."""
        kv = conversation.states.folded()[0]
        return [] if kv is None else kv.keys[0, 0, : conversation.states.length, 0].tolist()

    def verify(self, states: LayerStates, rows: mx.array, tap_ids: Sequence[int] = ()) -> Pass:
        self.passes.append(rows.shape[1])
        return states.open(self._run(states, rows, tap_ids))

    def prefill(
        self, states: LayerStates, tokens: mx.array, tap_ids: Sequence[int] = (), step_size: int = 2048
    ) -> Iterator[tuple[mx.array, mx.array | None]]:
        for at in range(0, tokens.shape[1], step_size):
            step = tokens[:, at : at + step_size]
            done = states.open(self._run(states, step, tap_ids))
            states.evaluate()
            states.commit(step.shape[1])
            yield step, done.features

    def _run(self, states: LayerStates, rows: mx.array, tap_ids: Sequence[int]) -> Pass:
        T = rows.shape[1]
        origin = states.origin(T)
        ids = rows[:, None, :, None]
        kv = write(reserve(states.layers[0], origin.length, ids, ids), ids, ids, origin.start)
        places = mx.arange(origin.length) + 1
        positions = origin.start + mx.arange(T)
        chosen = mx.cumsum(kv.keys[0, 0, : origin.length, 0] * places)[positions] % _ROWS
        logits = self.table[chosen]
        for index, value in self.spoilt.items():
            logits = mx.where((positions == index - 1)[:, None], value, logits)
        # As an embedding would read foreign memory.
        logits = mx.where(mx.all((rows >= 0) & (rows < V)), logits, mx.nan)
        # A row's own id and position, so that a drafter can tell whose features it is shown.
        features = mx.stack([rows, mx.broadcast_to(positions, rows.shape)], axis=-1)
        return Pass(T, [kv], logits[None], features if tap_ids else None)


class Context:
    """What a scripted drafter has been shown."""

    def __init__(self, start: int):
        self.start = start
        self.tokens: list[int] = []
        self.before = 0

    def show(self, tokens: list[int]) -> None:
        self.before = len(self.tokens)
        self.tokens += tokens

    def settle(self, count: int) -> None:
        assert count <= len(self.tokens) - self.before, "it was not shown so many rows"
        del self.tokens[self.before + count :]

    def arrays(self) -> list[mx.array]:
        return []


class ScriptedDrafter:
    """Proposes by a script; in every round it checks that it has been shown every row of the conversation, once.

    text: all ids of the conversation, those still to come included. guess: (absolute index, slot, right id) -> id.
    widths: what it proposes at most, round by round.
    """

    def __init__(
        self,
        text: Sequence[int],
        guess: Callable[[int, int, int], int],
        max_width: int = 7,
        widths: Sequence[int] = (),
        tap_ids: tuple[int, ...] = (0,),
    ):
        self.text = list(text)
        self.guess = guess
        self.max_width = max_width
        self.widths = list(widths)
        self.tap_ids = tap_ids
        self.contexts: list[Context] = []

    def new_context(self, batch: int = 1, start: int = 0) -> Context:
        self.contexts.append(Context(start))
        return self.contexts[-1]

    def propose(self, context: Context, anchor: mx.array, width: int, policy) -> Proposal:
        assert 0 < width <= self.max_width
        position = context.start + len(context.tokens)
        assert context.tokens == self.text[context.start : position], "it was not shown the conversation's rows"
        assert anchor.tolist() == [self.text[position]]
        if self.widths:
            width = min(width, self.widths.pop(0))
        right = self.text[position + 1 : position + 1 + width]
        right += [0] * (width - len(right))
        drafts = [self.guess(position + 1 + s, s, token) for s, token in enumerate(right)]
        return Proposal(mx.array([drafts], dtype=mx.int32).reshape(1, -1))

    def observe(self, context: Context, tokens: mx.array, features: mx.array | None, count: int) -> None:
        count = count if isinstance(count, int) else count.item()
        ids = tokens[0, :count].tolist()
        if self.tap_ids:
            first = context.start + len(context.tokens)
            assert features[0, :count].tolist() == [[token, first + t] for t, token in enumerate(ids)]
        else:
            assert features is None
        context.show(ids)


def all_right(index: int, slot: int, right: int) -> int:
    return right


def all_wrong(index: int, slot: int, right: int) -> int:
    return (right + 1) % V


def wrong_at(j: int) -> Callable[[int, int, int], int]:
    return lambda index, slot, right: all_wrong(index, slot, right) if slot == j else right


def right_with(chance: float, seed: int = 0) -> Callable[[int, int, int], int]:
    def guess(index: int, slot: int, right: int) -> int:
        return right if random.Random(f"{seed} {index}").random() < chance else (right + 1) % V

    return guess


class DraftingTarget:
    """A drafter that drafts by the policy, from the target's own logits and some noise: q is what it sampled from."""

    tap_ids = ()
    max_width = 7

    def __init__(self, noise: float = 0.0):
        self.noise = noise

    def new_context(self, batch: int = 1, start: int = 0) -> Context:
        assert start == 0, "it needs the whole text"
        return Context(start)

    def propose(self, context: Context, anchor: mx.array, width: int, policy) -> Proposal:
        text, tokens, q = [*context.tokens, *anchor.tolist()], [], []
        for slot in range(width):
            row = sum(token * (i + 1) for i, token in enumerate(text)) % _ROWS
            noise = self.noise * np.cos(np.arange(V) * row)
            logits = mx.array((_TABLE[row] + noise).astype(np.float32))
            token, shown = policy.draft(logits[None, None], slot)
            tokens.append(token)
            q.append(shown)
            text.append(token.item())
        return Proposal(mx.concatenate(tokens, axis=1), None if q[0] is None else mx.concatenate(q, axis=1))

    def observe(self, context: Context, tokens: mx.array, features: None, count: int) -> None:
        count = count if isinstance(count, int) else count.item()
        context.show(tokens[0, :count].tolist())


PROMPT = [3, 1, 4, 1, 5]
TEXT = PROMPT + oracle(PROMPT, 40)


class Run:
    """One conversation with a target, and what its last call gave."""

    def __init__(self, target: TableTarget | None = None):
        self.target = target or TableTarget()
        self.conversation = self.target.conversation()
        self.given: list[int] = []
        self.finish = None

    def start(self, prompt=PROMPT, policy=None, drafter=None, width=None, **options):
        self.prompt, self.stats, self.given, self.finish = list(prompt), Stats(), [], None
        self.tokens = generate_tokens(
            self.target, self.conversation, prompt, policy or Policy(), drafter, width, stats=self.stats, **options
        )
        return self

    def take(self, count: int = -1) -> list[int]:
        """The next `count` tokens, or all."""
        while count != 0 and (token := next(self.tokens, None)) is not None:
            assert self.finish is None, "a token after the last"
            self.given.append(token.id)
            self.finish = token.finish_reason
            self.check()
            count -= 1
        return self.given

    def check(self) -> None:
        """The conversation holds what the user was given: the newest token pending, the others in the state."""
        assert self.conversation.tokens[-len(self.given) - len(self.prompt) :] == self.prompt + self.given
        assert self.target.ids(self.conversation) == self.conversation.processed


def drafter(guess=all_right, text=TEXT, **options) -> ScriptedDrafter:
    return ScriptedDrafter(text, guess, **options)
