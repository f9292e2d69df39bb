"""`specmlx parity`: the same prompts with and without the drafter, compared token by token."""

import contextlib
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import click

from specmlx.cli.flags import as_json, command, like, report
from specmlx.cli.options import DEMO, JSON, PROMPTS, DraftFlags, ModelFlags, RequestFlags, loading, prompt_lines
from specmlx.cli.sampling import SamplingFlags
from specmlx.cli.tables import count
from specmlx.cli.template import TemplateFlags
from specmlx.cli.terminal import note, say, status
from specmlx.formats.values import option

MLX_LM = "mlx-lm"
# Follows a drafter's name where the kernels are those that run without --consistent.
DEFAULT = "by the default kernels"
COUNTS = ("rounds", "proposed", "accepted", "accept_histogram")
Results = dict[str, list]
"""Verdicts (of `evaluation.parity`) on all prompts, by what is compared with plain decoding."""


@command(JSON)
class Parity:
    """Decode the same prompts with and without the drafter; exit code 0 if every token is the same, else 1.

    On Metal the proof is made with --consistent; how far the default choice of kernels agrees is shown beside it.
    """

    target: ModelFlags
    draft_model: tuple[str, ...] = option(
        ("auto",), "Drafter; may be repeated.", show_default="auto", metavar="auto|PATH_OR_ID"
    )
    drafting: DraftFlags
    num_draft_tokens: int | str = like(RequestFlags, "num_draft_tokens", "full")
    max_tokens: int = like(RequestFlags, "max_tokens")
    prefill_step_size: int = like(RequestFlags, "prefill_step_size")
    prompt: tuple[str, ...] = option((), "May be repeated. Default: some of specmlx's own.", names=("-p",))
    prompts: Path | None = PROMPTS
    limit: int | None = option(None, "The first N prompts only.", least=1, metavar="N")
    template: TemplateFlags
    sampling: SamplingFlags
    reference: str | None = option(None, "Also mlx_lm's own decoding of the same files.", type=(MLX_LM,))

    def run(self) -> bool:
        self.target.check(*self.draft_model)
        if "none" in self.draft_model:
            raise click.UsageError("--draft-model none leaves nothing to compare: name a drafter.")
        if self.reference and self.sampling.temp > 0:
            raise click.UsageError("--reference compares greedy decoding only: leave --temp out.")
        self.sampling.check(repeatable=True)
        texts = self._texts()[: self.limit]
        with contextlib.ExitStack() as stack:
            files, auto = self.target, "auto" in self.draft_model
            if self.reference and files.model == DEMO:
                from specmlx.demo.export import write_demo

                # The demo is stored in float16, and mlx_lm would compute in it.
                directory = stack.enter_context(tempfile.TemporaryDirectory())
                files = replace(files, model=str(write_demo(directory)))
            model, tokenizer = files.load("auto" if auto else None, self.drafting if auto else None)
            from specmlx.evaluation.parity import decode_mlx_lm, rope_note, verdicts, verdicts_by_choice
            from specmlx.kernels.dispatch import on_metal
            from specmlx.loading.load import choose_kernels
            from specmlx.loading.resolve import resolve

            drafters, ids = self._drafters(model), [self.template.ids(tokenizer, text) for text in texts]
            options, others, notes = self.sampling.options(tokenizer), {}, {}
            if self.reference:
                path, stops, processors = resolve(files.model), tokenizer.eos_token_ids, self.sampling.processors()
                if rope := rope_note(model, path):
                    notes["note"] = rope
                with status(f"decoding {len(ids)} prompts with mlx-lm"):
                    same = {"adapter_path": files.adapter_path, "dtype": files.dtype}
                    others[MLX_LM] = [*decode_mlx_lm(path, ids, self.max_tokens, stops, processors, **same)]
            options |= {"prefill_step_size": self.prefill_step_size, "others": others}
            run = partial(verdicts, model, tokenizer, ids, drafters, self.max_tokens, self.num_draft_tokens, **options)
            results, default = {}, {}
            choose = partial(choose_kernels, model) if on_metal() and not self.target.consistent else None
            for proof, row in verdicts_by_choice(run, choose, note):
                for name, verdict in row.items():
                    found = (results if proof else default).setdefault(name, [])
                    found.append(verdict)
                    if not as_json():
                        place = f"prompt {len(found)} of {len(ids)}, {name}{'' if proof else f' {DEFAULT}'}"
                        say(f"{place}: {_line(verdict, tokenizer)}")
            found = _object(self.target.model, texts, results, tokenizer, default) | notes
            report(found, [*summary(results, default), *notes.values()])
        return found["passed"]

    def _texts(self) -> list[str]:
        if self.prompt and self.prompts:
            raise click.UsageError("--prompt and --prompts can't go together.")
        if self.prompts:
            return prompt_lines(self.prompts)
        if self.prompt:
            if not all(text.strip() for text in self.prompt):
                raise ValueError("the prompt is empty: give --prompt a text")
            return list(self.prompt)
        from specmlx.evaluation.suites import PROMPTS, suite

        return list(suite(DEMO)) if self.target.model == DEMO else PROMPTS["parity"]

    def _drafters(self, model: Any) -> dict[str, Any]:
        from specmlx.generation.settings import check_width
        from specmlx.loading.load import load_drafter

        drafters = {}
        for name in self.draft_model:
            with loading(name):
                drafter = model.draft_model if name == "auto" else load_drafter(name, model, **asdict(self.drafting))
            if drafter is None:
                raise ValueError(f"{model.no_draft_reason}: pass --draft-model")
            check_width(drafter, self.num_draft_tokens)
            drafters[type(drafter).__name__ if name == "auto" else name] = drafter
        return drafters


def _line(verdict: Any, tokenizer: Any) -> str:
    """One prompt: identical with its counts, or where it parts."""

    def named(token: int | None) -> str:
        return "the end" if token is None else f"{token} {tokenizer.decode([token])!r}"

    found, tokens, stats = verdict.difference, count(verdict.tokens, "token"), verdict.stats
    if found is not None:
        margin = "" if found.margin is None else f"; top-2 margin {found.margin:.3g}"
        return f"differs at token {found.index}: plain {named(found.plain)}, here {named(found.other)}{margin}"
    if not verdict.passed:
        return f"no pass: nothing was proposed for {tokens}"
    return f"identical, {tokens}{_counts(stats) if stats else ''}"


def _counts(stats: Any) -> str:
    return f", {count(stats.rounds, 'round')}, {stats.proposed} proposed, {stats.accepted} accepted"


def summary(results: Results, default: Results) -> Iterator[str]:
    """The last lines: sums by what was compared with plain decoding, with `consistent` and by the default choice."""
    from specmlx.evaluation.parity import total

    for name, found in results.items():
        sums, passed = total(found), sum(verdict.passed for verdict in found)
        text = f"{passed} of {len(found)} prompts pass, {count(sums.generation_tokens, 'token')}"
        if sums.rounds:
            histogram = ", ".join(f"{accepted}: {rounds}" for accepted, rounds in enumerate(sums.accept_histogram))
            text += f"{_counts(sums)}, {sums.acceptance_length:.2f} tokens a round; "
            text += f"rounds by accepted tokens: {histogram}"
        yield f"{name}{' with --consistent' if default else ''}: {text}"
    # How many decodings are identical, and the margins where the others part: they need not agree.
    for name, found in default.items():
        text = f"{sum(verdict.identical for verdict in found)} of {len(found)} prompts identical"
        if parted := [verdict.difference for verdict in found if verdict.difference is not None]:
            margin = max((each.margin for each in parted if each.margin is not None), default=0)
            first = min(each.index for each in parted)
            text += f", first difference at token {first}, top-2 margins where they part up to {margin:.3g}"
        yield f"{name} {DEFAULT}: {text}"


def _object(model: str, texts: list[str], results: Results, tokenizer: Any, default: Results) -> dict[str, Any]:
    """Everything, for `--json`. default: results of the default choice of kernels, where there are others."""
    from specmlx.evaluation.parity import total

    def prompt(text: str, verdict: Any) -> dict[str, Any]:
        found = verdict.difference
        difference = found and asdict(found)
        for of in ("plain", "other") if found else ():
            token = difference[of]
            difference[f"{of}_text"] = None if token is None else tokenizer.decode([token])
        outcome = {"prompt": text} | {name: getattr(verdict, name) for name in ("tokens", "identical", "passed")}
        counts = {name: getattr(verdict.stats, name) for name in COUNTS if verdict.stats}
        return outcome | counts | {"difference": difference}

    def comparisons(results: Results) -> dict[str, Any]:
        found = {}
        for name, verdicts in results.items():
            sums, prompts = total(verdicts), [prompt(*pair) for pair in zip(texts, verdicts, strict=True)]
            passed = sum(verdict.passed for verdict in verdicts)
            outcome = {"prompts": len(verdicts), "passed": passed, "tokens": sums.generation_tokens}
            counts = {name: getattr(sums, name) for name in (*COUNTS, "acceptance_length")}
            found[name] = outcome | counts | {"by_prompt": prompts}
        return found

    passed = all(verdict.passed for verdicts in results.values() for verdict in verdicts)
    found = {"model": model, "passed": passed, "comparisons": comparisons(results)}
    return found | ({"default_choice": comparisons(default)} if default else {})
