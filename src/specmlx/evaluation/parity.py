"""Whether speculative decoding gives the target's own tokens: the same prompts decoded several ways and compared."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

import mlx.core as mx

from specmlx.decoding.stats import Stats, summed
from specmlx.drafters.proposal import Drafter
from specmlx.evaluation.answer import Answer, answer, top_2_margin
from specmlx.generation.scheduler import Scheduler
from specmlx.targets.adapters import read_adapter
from specmlx.targets.any_lm import AnyLM
from specmlx.targets.checkpoint import cast
from specmlx.targets.hybrid import Model


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


def verdicts(
    model: Model,
    tokenizer: Any,
    prompts: Sequence[Sequence[int]],
    drafters: dict[str, Drafter],
    max_tokens: int,
    num_draft_tokens: int | str = "full",
    prefill_step_size: int = 2048,
    others: dict[str, Sequence[Answer]] | None = None,
    **options: Any,
) -> Iterator[dict[str, Verdict]]:
    """Decode each prompt plainly and with each drafter, and hold all against the plain one, by the drafters' names.

    `others` are decodings of the same prompts made elsewhere; `options` are `Scheduler.request`'s.
    """
    make = partial(Scheduler, model, tokenizer, prefill_step_size=prefill_step_size)
    without, drafting = make(None), {name: make(drafter, num_draft_tokens) for name, drafter in drafters.items()}
    for index, prompt in enumerate(prompts):
        ask = partial(answer, prompt=prompt, max_tokens=max_tokens, margins=True, **options)
        plain, answers = ask(without), {name: ask(scheduler) for name, scheduler in drafting.items()}
        answers |= {name: runs[index] for name, runs in (others or {}).items()}
        yield {name: compare(plain, found) for name, found in answers.items()}


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
    yield from ((True, row) for row in run())
    if choose is not None:
        choose(False)
        yield from ((False, row) for row in run())


def decode_mlx_lm(
    path: str | Path,
    prompts: Iterable[Sequence[int]],
    max_tokens: int,
    stop_tokens: Iterable[int],
    logits_processors: dict[str, Any] | None = None,
    adapter_path: str | None = None,
    prefill_step_size: int = 2048,
    dtype: str | None = None,
) -> Iterator[Answer]:
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
        yield Answer(tuple(tokens), tuple(margins))


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


def compare(plain: Answer, other: Answer) -> Verdict:
    """Hold a decoding against the plain one of the same prompt."""
    found = None
    for index, (a, b) in enumerate(zip_longest(plain.tokens, other.tokens)):
        if a != b:
            found = Difference(index, a, b, plain.margins[index] if a is not None else None)
            break
    return Verdict(len(other.tokens), found, other.stats)


def total(verdicts: Sequence[Verdict]) -> Stats:
    """The counts of one drafter's verdicts together; of mlx-lm's, the tokens alone."""
    sums = summed(verdict.stats for verdict in verdicts if verdict.stats is not None)
    return replace(sums, generation_tokens=sum(verdict.tokens for verdict in verdicts))
