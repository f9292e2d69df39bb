"""Whether speculative decoding gives the target's own tokens: the same prompts decoded several ways and compared."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import mlx.core as mx

from specmlx.decoding.stats import Stats, summed
from specmlx.drafters.proposal import Drafter
from specmlx.generation.generate import stream_generate
from specmlx.targets.adapters import read_adapter
from specmlx.targets.any_lm import AnyLM
from specmlx.targets.checkpoint import cast
from specmlx.targets.hybrid import Model


@dataclass(frozen=True)
class Decoded:
    """One decoding of a prompt.

    Args:
        tokens: the generated ids, a stop token included.
        margins: for each, how far the target's two best log-probabilities lie apart.
        stats: counts of rounds and drafts; None for mlx-lm.
    """

    tokens: tuple[int, ...]
    margins: tuple[float, ...]
    stats: Stats | None = None


@dataclass(frozen=True)
class Difference:
    """The first generated token that differs: its index from 0, plain decoding's and the other's (None: at its end).

    `margin` is plain decoding's there: a near-tie may fall either way where kernels sum in another order.
    """

    index: int
    plain: int | None
    other: int | None
    margin: float | None


@dataclass(frozen=True)
class Verdict:
    """A decoding held against the plain one; `stats` are the decoding's own, None for mlx-lm."""

    tokens: int
    difference: Difference | None
    stats: Stats | None = None

    @property
    def identical(self) -> bool:
        return self.difference is None

    @property
    def passed(self) -> bool:
        """Identical, and where there is a drafter it has proposed: plain decoding twice shows nothing."""
        return self.identical and (self.stats is None or self.stats.proposed > 0)


@dataclass(frozen=True)
class Totals:
    """Sums over the prompts of one drafter (or of mlx-lm, where nothing is proposed)."""

    prompts: int
    passed: int
    tokens: int
    rounds: int
    proposed: int
    accepted: int
    accept_histogram: tuple[int, ...]

    @property
    def acceptance_length(self) -> float:
        """Tokens delivered per round (τ)."""
        return self.tokens / self.rounds if self.rounds else 0.0


def verdicts(
    model: Model,
    tokenizer: Any,
    prompts: Sequence[Sequence[int]],
    drafters: dict[str, Drafter],
    max_tokens: int,
    num_draft_tokens: int | str = "full",
    others: dict[str, Sequence[Decoded]] | None = None,
    **options: Any,
) -> Iterator[dict[str, Verdict]]:
    """Decode each prompt plainly and with each drafter, and hold all against the plain one, by the drafters' names.

    `others` are decodings of the same prompts made elsewhere; `options` are `stream_generate`'s.
    """
    for index, prompt in enumerate(prompts):
        plain = decode(model, tokenizer, prompt, max_tokens, **options)
        decoded = {
            name: decode(model, tokenizer, prompt, max_tokens, drafter, num_draft_tokens=num_draft_tokens, **options)
            for name, drafter in drafters.items()
        }
        decoded |= {name: runs[index] for name, runs in (others or {}).items()}
        yield {name: compare(plain, run) for name, run in decoded.items()}


def verdicts_by_choice(
    run: Callable[[], Iterable[dict[str, Verdict]]], choose: Callable[[bool], None] | None, tell: Callable[[str], None]
) -> Iterator[tuple[bool, dict[str, Verdict]]]:
    """What `run` yields, and whether it is the proof.

    choose: on Metal, puts kernels into the model, for every number of rows the same ones (True) or the default choice
    (False). Text with a drafter has to be the plain one by the former; how far it is by the latter comes behind it.
    Where the former can't be had, `tell` takes why, and the default choice is what counts; so it is without `choose`.
    """
    if choose is not None:
        try:
            choose(True)
        except ValueError as why:
            tell(f"not with --consistent: {why}")
            choose(False)
            choose = None
    for row in run():
        yield True, row
    if choose is not None:
        choose(False)
        for row in run():
            yield False, row


def decode(
    model: Model, tokenizer: Any, prompt: Sequence[int], max_tokens: int, drafter: Drafter | None = None, **options: Any
) -> Decoded:
    """Decode prompt ids with specmlx, plainly or with a drafter; `options` are `stream_generate`'s."""
    tokens, margins, stats = [], [], None
    for response in stream_generate(model, tokenizer, prompt, max_tokens, drafter, **options):
        tokens.append(response.token)
        margins.append(top_2_margin(response.logprobs))
        stats = response.stats
    return Decoded(tuple(tokens), tuple(margins), stats)


def decode_mlx_lm(
    path: str | Path,
    prompts: Iterable[Sequence[int]],
    max_tokens: int,
    stop_tokens: Iterable[int],
    logits_processors: dict[str, Any] | None = None,
    adapter_path: str | None = None,
    prefill_step_size: int = 2048,
    dtype: str | None = None,
) -> Iterator[Decoded]:
    """Decode prompts greedily with mlx_lm's own model, loaded by mlx_lm from a directory, one by one.

    `logits_processors` holds the keywords of mlx_lm's make_logits_processors; `dtype` is one to cast the model to.
    """
    import mlx_lm
    from mlx_lm.generate import generate_step
    from mlx_lm.sample_utils import make_logits_processors

    if adapter_path is not None and "peft_type" in read_adapter(Path(adapter_path)):
        raise ValueError(f"mlx_lm can't load {adapter_path}, a PEFT adapter: take another reference")
    model, _ = mlx_lm.load(str(path), adapter_path=adapter_path)
    if dtype is not None:
        cast(model, getattr(mx, dtype))
    stops = frozenset(stop_tokens)
    for prompt in prompts:
        tokens, margins = [], []
        for token, logprobs in generate_step(
            mx.array(prompt),
            model,
            max_tokens=max_tokens,
            logits_processors=make_logits_processors(**(logits_processors or {})),
            prefill_step_size=prefill_step_size,
        ):
            tokens.append(int(token))
            margins.append(top_2_margin(logprobs))
            if token in stops:
                break
        yield Decoded(tuple(tokens), tuple(margins))


def rope_note(model: Model | AnyLM, path: str | Path) -> str | None:
    """A line that says so where mlx-lm turns rows otherwise than specmlx, which reads ropes as transformers does."""
    from mlx_lm.utils import load_model

    ropes = []
    for each in (model if isinstance(model, Model) else model.lm, load_model(Path(path), lazy=True)[0]):
        ropes.append([module for name, module in each.named_modules() if name.endswith("self_attn.rope")])
    # Wider than any head: the dims behind what a rope turns stay.
    rows = mx.ones((1, 1, 64, 2048))
    if all(mx.array_equal(a(rows), b(rows)).item() for a, b in zip(*ropes, strict=False)):
        return None
    return "mlx-lm reads config.json's rope otherwise than transformers, as which specmlx reads it: texts may differ"


def compare(plain: Decoded, other: Decoded) -> Verdict:
    """Hold a decoding against the plain one of the same prompt."""
    return Verdict(len(other.tokens), first_difference(plain, other), other.stats)


def first_difference(plain: Decoded, other: Decoded) -> Difference | None:
    """Where two decodings part, or None."""
    for index, (a, b) in enumerate(zip_longest(plain.tokens, other.tokens)):
        if a != b:
            return Difference(index, a, b, plain.margins[index] if a is not None else None)
    return None


def total(verdicts: Sequence[Verdict]) -> Totals:
    """Sum up the verdicts of one drafter."""
    sums = summed(verdict.stats for verdict in verdicts if verdict.stats is not None)
    passed, tokens = sum(verdict.passed for verdict in verdicts), sum(verdict.tokens for verdict in verdicts)
    counts = (sums.rounds, sums.proposed, sums.accepted, tuple(sums.accept_histogram))
    return Totals(len(verdicts), passed, tokens, *counts)


def top_2_margin(logprobs: mx.array) -> float:
    """How far the two largest of `[V]` lie apart."""
    low, high = mx.sort(mx.topk(logprobs.astype(mx.float32), 2)).tolist()
    return high - low
