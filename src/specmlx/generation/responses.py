"""What a request gets back: a response for each token."""

from dataclasses import dataclass

import mlx.core as mx

from specmlx.decoding.stats import Stats


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
