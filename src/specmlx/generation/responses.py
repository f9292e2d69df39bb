"""What a request gets back: its tokens as text, one response each."""

from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from specmlx.decoding.sequence import Token
from specmlx.decoding.stats import Stats
from specmlx.decoding.stops import StopStrings


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


class Reply:
    """Makes responses of a request's tokens: text without half characters, cut at a stop string.

    tokenizer: a TokenizerWrapper of mlx_lm's. `answer` is the text so far.
    """

    def __init__(self, tokenizer: Any, stops: StopStrings, prompt_tokens: int, stats: Stats, cached_tokens: int = 0):
        self._detokenizer = tokenizer.detokenizer
        self._stops = stops
        self.prompt_tokens = prompt_tokens
        self.cached_tokens = cached_tokens
        self.stats = stats
        self.answer = ""

    def feed(self, token: Token) -> GenerationResponse:
        """The response of the next token; the last one has a finish reason, and all text that was held back."""
        finish = token.finish_reason
        if finish != "stop":
            self._detokenizer.add_token(token.id)
        if finish:
            self._detokenizer.finalize()
        text = self._stops.feed(self._detokenizer.last_segment)
        if self._stops.stopped:
            finish = "stop"
        elif finish:
            text += self._stops.flush()
        self.answer += text
        stats = self.stats
        return GenerationResponse(
            text=text,
            token=token.id,
            logprobs=token.logprobs,
            from_draft=token.from_draft,
            prompt_tokens=self.prompt_tokens,
            prompt_tps=(self.prompt_tokens - self.cached_tokens) / max(stats.prefill_seconds, 1e-9),
            generation_tokens=stats.generation_tokens,
            generation_tps=stats.generation_tokens / max(stats.decode_seconds, 1e-9),
            peak_memory=mx.get_peak_memory() / 1e9,
            finish_reason=finish,
            stats=stats.snapshot(),
            cached_tokens=self.cached_tokens,
        )


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
