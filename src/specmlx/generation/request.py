"""A request: a sequence with its prompt, and its tokens as text, one response each."""

from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Ordered
from contextlib import ExitStack
from typing import Any

import mlx.core as mx

from specmlx.decoding.loop import Batch
from specmlx.decoding.policy import Policy
from specmlx.decoding.sequence import Sequence, Token
from specmlx.decoding.stats import Stats
from specmlx.generation.responses import GenerationResponse
from specmlx.generation.reuse import Reuse


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
        finish, stats = token.finish_reason, self.stats
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
        return GenerationResponse(
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
