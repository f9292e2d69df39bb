"""A target without a neural network, drafters that follow a script, and a conversation of the two."""

import random
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Ids

import mlx.core as mx
import numpy as np
from rig import generate_tokens

from specmlx.cache.conversation import Conversation
from specmlx.cache.kv import KV, reserve, write
from specmlx.cache.layers import LayerStates, Pass
from specmlx.decoding.joint import Joint
from specmlx.decoding.loop import Batch, Sequence
from specmlx.decoding.policy import Policy
from specmlx.decoding.prefill import prefill
from specmlx.decoding.stats import Stats
from specmlx.drafters.proposal import Proposal

V = 64
_ROWS = 997
_TABLE = np.random.default_rng(0).normal(size=(_ROWS, V)).astype(np.float32)


def oracle(text: Ids[int], count: int, stop_tokens: Ids[int] = ()) -> list[int]:
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

    def ids(self, conversation: Conversation, states: LayerStates | None = None, index: int = 0) -> list[int]:
        """What the conversation's own state holds, or one that it is in with others."""
        states = conversation.states if states is None else states
        kv, lengths = states.folded()[0], mx.broadcast_to(mx.array(states.length), (states.batch,))
        return [] if kv is None else kv.keys[index, 0, : lengths[index].item(), 0].tolist()

    def verify(self, states: LayerStates, rows: mx.array, tap_ids: Ids[int] = ()) -> Pass:
        self.passes.append(rows.shape[1])
        return states.open(self._run(states, rows, tap_ids))

    def prefill(
        self, states: LayerStates, tokens: mx.array, tap_ids: Ids[int] = (), step_size: int = 2048
    ) -> Iterator[tuple[mx.array, mx.array | None]]:
        for at in range(0, tokens.shape[1], step_size):
            step = tokens[:, at : at + step_size]
            done = states.open(self._run(states, step, tap_ids))
            states.evaluate()
            states.commit(step.shape[1])
            yield step, done.features

    def _run(self, states: LayerStates, rows: mx.array, tap_ids: Ids[int]) -> Pass:
        T = rows.shape[1]
        origin = states.origin(T)
        ids = KV(rows[:, None, :, None], rows[:, None, :, None])
        kv = write(reserve(states.layers[0], origin.length, ids), ids, origin.start)
        places = mx.arange(origin.length) + 1
        positions = mx.broadcast_to(mx.array(origin.start).reshape(-1, 1) + mx.arange(T), rows.shape)
        sums = mx.cumsum(kv.keys[:, 0, : origin.length, 0] * places, axis=1)
        logits = self.table[mx.take_along_axis(sums, positions, axis=1) % _ROWS]
        first = mx.arange(len(rows))[:, None, None] == 0
        for index, value in self.spoilt.items():
            logits = mx.where(first & (positions == index - 1)[..., None], value, logits)
        # As an embedding would read foreign memory.
        fine = mx.all((rows >= 0) & (rows < V), axis=1)
        logits = mx.where(fine[:, None, None], logits, mx.nan)
        # A row's own id and position, so that a drafter can tell whose features it is shown.
        features = mx.stack([rows, positions], axis=-1)
        return Pass(T, [kv], logits, features if tap_ids else None)


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

    text: all ids of the conversation, those still to come included; those of others beside it are `OTHERS`.
    guess: (absolute index, slot, right id) -> id.
    widths: what it proposes at most, round by round.
    """

    def __init__(
        self,
        text: Ids[int],
        guess: Callable[[int, int, int], int],
        max_width: int = 7,
        widths: Ids[int] = (),
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
        seen = [*context.tokens, *anchor.tolist()]
        text = next(
            (text for text in (self.text, *OTHERS) if self._says(text[context.start : position + 1], seen)), None
        )
        assert text is not None, "it was not shown the conversation's rows"
        if self.widths and text is self.text:
            width = min(width, self.widths.pop(0))
        right = text[position + 1 : position + 1 + width]
        right += [0] * (width - len(right))
        drafts = [self.guess(position + 1 + s, s, token) for s, token in enumerate(right)]
        return Proposal(mx.array([drafts], dtype=mx.int32).reshape(1, -1))

    def _says(self, text: list[int], seen: list[int]) -> bool:
        """Whether a text says what was seen; beside others, a round may be issued that goes beyond its end."""
        return text == (seen[: len(text)] if Run.batch_size > 1 else seen)

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


# What goes on beside a conversation in a batch.
OTHER_PROMPTS = [[2, 7, 1], [8] * 9]
OTHERS = [prompt + oracle(prompt, 600) for prompt in OTHER_PROMPTS]


class Run:
    """One conversation with a target, alone or the first in a batch of so many, and what its last call gave."""

    batch_size = 1

    def __init__(self, target: TableTarget | None = None):
        self.target = target or TableTarget()
        self.conversation = self.target.conversation()
        self.given: list[int] = []
        self.finish = None
        self.batch: Batch | None = None

    def start(self, prompt=PROMPT, policy=None, drafter=None, width=None, **options):
        self.prompt, self.stats, self.given, self.finish = list(prompt), Stats(), [], None
        run = generate_tokens if self.batch_size == 1 else self._beside_others
        self.tokens = run(
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
        assert self.ids() == self.conversation.processed

    def ids(self) -> list[int]:
        """What the state holds of the conversation."""
        if self.batch is None or not isinstance(self.batch.held, Joint) or self.conversation.states.layers:
            return self.target.ids(self.conversation)
        index = self.batch.held.members.index(self.conversation)
        return self.target.ids(self.conversation, self.batch.held.states, index)

    def _beside_others(self, target, conversation, prompt, policy, drafter, width, *, lookahead=True, stats, **options):
        """`generate_tokens` in a batch; whoever is beside is seen to have its own text."""
        names = ("stop_tokens", "max_tokens")
        own = Sequence(conversation, policy, stats=stats, **{k: options.pop(k) for k in names if k in options})
        batch = self.batch = Batch(target, drafter, width, lookahead=lookahead)
        others = {}
        for text, start in zip(OTHERS, OTHER_PROMPTS[: self.batch_size - 1], strict=False):
            other = Sequence(target.conversation(), Policy(), list(start))
            taken_in(target, other.conversation, start, drafter)
            others[other] = iter(text[len(start) :])
        taken_in(target, conversation, prompt, drafter, **options)
        own.history += prompt
        batch.join([own, *others])
        try:
            while not own.over:
                for sequence, token in batch.round():
                    if token is None:
                        raise sequence.error
                    if sequence is own:
                        yield token
                    else:
                        assert token.id == next(others[sequence])
        finally:
            if batch.held is not None and not batch.held.states.broken:
                own.over = True
                batch.part(own)


def taken_in(target, conversation, prompt, drafter, prefill_step_size=2048, progress=lambda *at: None) -> None:
    for step in prefill(target, conversation, prompt, drafter, prefill_step_size):
        progress(step, len(prompt))
    progress(len(prompt), len(prompt))


def drafter(guess=all_right, text=TEXT, **options) -> ScriptedDrafter:
    return ScriptedDrafter(text, guess, **options)
