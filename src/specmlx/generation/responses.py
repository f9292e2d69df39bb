"""A request: a sequence with its prompt, and its tokens as text, one response each."""

from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Ordered
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from specmlx.decoding.loop import Batch, Sequence, Token
from specmlx.decoding.policy import Policy
from specmlx.decoding.stats import DETOKENIZE, Stats
from specmlx.generation.prompt_cache import Reuse


@dataclass
class GenerationResponse:
    """One token and the text that it lets out, with mlx_lm's fields and specmlx's `stats`.

    Args:
        text: the next segment of text; may be empty.
        token: the token's id.
        logprobs: the target's log-probabilities `[V]` for it, after logits processors and before the sampler's filters.
        from_draft: whether the drafter had guessed it.
        prompt_tokens: tokens of this call's prompt.
        prompt_tps: prompt tokens per second of prefill.
        generation_tokens: tokens given so far.
        generation_tps: the same per second of decoding (prefill apart).
        peak_memory: GB.
        cached_tokens: tokens of the prompt that a `PromptCache` held already: they were not run.
        finish_reason: "length", "stop" or None while it goes on.
        stats: counts of rounds and drafts up to this token.
    """

    text: str
    token: int
    logprobs: mx.array
    from_draft: bool
    prompt_tokens: int
    prompt_tps: float
    generation_tokens: int
    generation_tps: float
    peak_memory: float
    finish_reason: str | None = None
    stats: Stats | None = None
    cached_tokens: int = 0


class StopStrings:
    """Holds text back while it may be the beginning of a stop string, and ends at the first whole one."""

    def __init__(self, stops: str | Ordered[str] | None = ()):
        """stops: one, several or none. Raises ValueError for what is no text, and for an empty one."""
        stops = [stops] if isinstance(stops, str) else stops or ()
        if not isinstance(stops, Iterable):
            raise ValueError(f"stop is {stops!r}: give a text or a list of texts")
        self.stops = tuple(stops)
        for stop in self.stops:
            if not isinstance(stop, str):
                raise ValueError(f"stop holds {stop!r}: give a text or a list of texts")
            if not stop:
                raise ValueError("a stop string is empty: leave it out")
        self.stopped = False
        self._held = ""

    def feed(self, text: str) -> str:
        """The text that may leave now. After a stop string, `stopped` is set and everything from it on is dropped."""
        if self.stopped:
            return ""
        text, keep = self._held + text, 0
        if found := [at for at in map(text.find, self.stops) if at >= 0]:
            self.stopped, text = True, text[: min(found)]
        else:
            # The longest end of the text that begins a stop string.
            keep = max((n for stop in self.stops for n in range(len(stop)) if text.endswith(stop[:n])), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """What is still held back, at the end of the text."""
        out, self._held = self._held, ""
        return out


class Request(Sequence):
    """A prompt that is to be answered; `Scheduler.request` makes it, with every option checked.

    ids: of its prompt. text: the answer so far. cached_tokens: how many of its ids come from a `PromptCache`.
    Setting `cancelled` ends it at the next step. on_end: called once, at the end, with what ended it: None or an
    exception. queue: where an engine's responses go.
    limit: how long the conversation may get and what says so, where `max_tokens` comes from that.
    """

    def __init__(
        self,
        ids: list[int],
        policy: Policy,
        max_tokens: int,
        stats: Stats,
        stops: StopStrings,
        tokenizer: Any,
        progress: Callable[[int, int], None] | None = None,
    ):
        """tokenizer: a TokenizerWrapper of mlx_lm's. progress: gets (processed, total) tokens of the prompt."""
        super().__init__(None, policy, list(ids), frozenset(tokenizer.eos_token_ids), max_tokens, stats)
        self.ids, self.stops, self.progress = ids, stops, progress
        self._detokenizer = tokenizer.detokenizer
        self.text = ""
        self.cached_tokens = 0
        self.cancelled = self.ended = False
        self.on_end: Callable[[Exception | None], None] = lambda error: None
        self.queue: Callable[[], Any] | None = None
        self.limit: tuple[int, str] | None = None
        self.reuse: Reuse | None = None
        self.steps: Iterator[int] | None = None
        self.batch: Batch | None = None
        self.resources = ExitStack()

    def respond(self, token: Token) -> GenerationResponse:
        """The response of the next token; the last one has a finish reason, and all text that was held back."""
        finish, stats, timer = token.finish_reason, self.stats, self.batch.timer
        if timer:
            timer.start()
        if finish != "stop":
            self._detokenizer.add_token(token.id)
        if finish:
            self._detokenizer.finalize()
        text = self._detokenizer.last_segment
        if self.stops.stops:
            text = self.stops.feed(text)
            if self.stops.stopped:
                finish = "stop"
            elif finish:
                text += self.stops.flush()
        self.text += text
        response = GenerationResponse(
            text=text,
            token=token.id,
            logprobs=token.logprobs,
            from_draft=token.from_draft,
            prompt_tokens=len(self.ids),
            prompt_tps=(len(self.ids) - self.cached_tokens) / max(stats.prefill_seconds, 1e-9),
            generation_tokens=stats.generation_tokens,
            generation_tps=stats.generation_tokens / max(stats.decode_seconds, 1e-9),
            peak_memory=mx.get_peak_memory() / 1e9,
            finish_reason=finish,
            stats=stats.snapshot(),
            cached_tokens=self.cached_tokens,
        )
        if timer:
            timer.lap(DETOKENIZE)
        return response


def summary(response: GenerationResponse) -> str:
    """One line on a finished generation: tokens, acceptance length, speeds, mode, and how many passes were plain."""
    stats = response.stats
    seconds = stats.prefill_seconds + stats.decode_seconds
    speculative = f", {stats.acceptance_length:.2f} tokens per target pass ({stats.rounds} passes)"
    mode = stats.mode
    if mode == "speculative" and stats.plain_share:
        mode += f" in {1 - stats.plain_share:.0%} of the passes, plain in {stats.plain_share:.0%}"
    held = f" ({response.cached_tokens} of them cached)" if response.cached_tokens else ""
    return (
        f"{response.prompt_tokens} prompt{held} and {response.generation_tokens} generated tokens"
        f"{speculative if stats.mode == 'speculative' else ''}, decoding {response.generation_tps:.1f} tok/s, "
        f"end to end {response.generation_tokens / max(seconds, 1e-9):.1f} tok/s, "
        f"peak memory {response.peak_memory:.2f} GB, {mode}{f' ({stats.reason})' if stats.reason else ''}"
    )
