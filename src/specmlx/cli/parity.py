"""`specmlx parity`: the same prompts with and without the drafter, compared token by token."""

import contextlib
import json
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from specmlx.cli import options, parity_report
from specmlx.cli.flags import grouped, options_of
from specmlx.cli.sampling import SamplingFlags
from specmlx.cli.terminal import answers, note, say, status

if TYPE_CHECKING:
    from specmlx.evaluation.parity import Verdict

MLX_LM = "mlx-lm"


@click.command(short_help="Check that a drafter changes no token.")
@grouped("target", options.ModelFlags)
@click.option(
    "--draft-model",
    multiple=True,
    default=["auto"],
    show_default="auto",
    metavar="auto|PATH_OR_ID",
    help="Drafter; may be repeated.",
)
@grouped("drafting", options.DraftFlags)
@options_of(options.RequestFlags, "num_draft_tokens", "max_tokens", "prefill_step_size", num_draft_tokens="full")
@click.option("--prompt", "-p", multiple=True, help="May be repeated. Default: some of specmlx's own.")
@click.option("--prompts", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="A file, one a line.")
@click.option("--limit", type=click.IntRange(min=1), metavar="N", help="The first N prompts only.")
@grouped("template", options.TemplateFlags)
@grouped("sampling", SamplingFlags)
@click.option("--reference", type=click.Choice([MLX_LM]), help="Also mlx_lm's own decoding of the same files.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def parity(
    target: options.ModelFlags,
    sampling: SamplingFlags,
    template: options.TemplateFlags,
    draft_model: tuple[str, ...],
    drafting: options.DraftFlags,
    num_draft_tokens: int | str,
    prompt: tuple[str, ...],
    prompts: Path | None,
    limit: int | None,
    max_tokens: int,
    prefill_step_size: int,
    reference: str | None,
    as_json: bool,
) -> None:
    """Decode the same prompts with and without the drafter; exit code 0 if every token is the same, else 1.

    On Metal the proof is made with --consistent; how far the default choice of kernels agrees is shown beside it.
    """
    _check(target, sampling, draft_model, reference)
    texts = _texts(target.model, prompt, prompts)[:limit]
    with answers() as out, _files(target, reference) as files:
        model, tokenizer = files.load(
            "auto" if "auto" in draft_model else None, drafting=drafting if "auto" in draft_model else None
        )
        from specmlx.evaluation.parity import rope_note, verdicts, verdicts_by_choice
        from specmlx.kernels.dispatch import on_metal
        from specmlx.loading.load import choose_kernels
        from specmlx.loading.resolve import resolve

        drafters = _drafters(model, draft_model, num_draft_tokens, drafting)
        ids = [template.ids(tokenizer, text) for text in texts]
        others = _reference(files, sampling, tokenizer, ids, max_tokens) if reference else {}
        rope = rope_note(model, resolve(files.model)) if reference else None
        settings = {
            "num_draft_tokens": num_draft_tokens,
            "seed": sampling.seed,
            "sampler": sampling.sampler(tokenizer),
            "logits_processors": sampling.processors(),
            "prefill_step_size": prefill_step_size,
        }

        def run() -> Iterator[dict[str, "Verdict"]]:
            return verdicts(model, tokenizer, ids, drafters, max_tokens, others=others, **settings)

        results: dict[str, list] = {}
        default: dict[str, list] = {}
        choose = partial(choose_kernels, model) if on_metal() and not target.consistent else None
        for proof, row in verdicts_by_choice(run, choose, note):
            for name, verdict in row.items():
                found = (results if proof else default).setdefault(name, [])
                found.append(verdict)
                if not as_json:
                    kernels = "" if proof else f" {parity_report.DEFAULT}"
                    place = f"prompt {len(found)} of {len(ids)}, {name}{kernels}"
                    say(f"{place}: {parity_report.line(verdict, tokenizer)}", out)
        if as_json:
            report = parity_report.as_object(target.model, texts, results, tokenizer, default)
            say(json.dumps(report | ({"note": rope} if rope else {})), out)
        else:
            for line in (*parity_report.summary(results, default), *([rope] if rope else [])):
                say(line, out)
    passed = all(verdict.passed for found in results.values() for verdict in found)
    click.get_current_context().exit(0 if passed else 1)


def _check(
    target: options.ModelFlags, sampling: SamplingFlags, draft_model: tuple[str, ...], reference: str | None
) -> None:
    target.check(*draft_model)
    if "none" in draft_model:
        raise click.UsageError("--draft-model none leaves nothing to compare: name a drafter.")
    if reference and sampling.temp > 0:
        raise click.UsageError("--reference compares greedy decoding only: leave --temp out.")
    sampling.check(repeatable=True)


def _texts(model: str, prompt: tuple[str, ...], file: Path | None) -> list[str]:
    if prompt and file:
        raise click.UsageError("--prompt and --prompts can't go together.")
    if file:
        return options.prompt_lines(file)
    if prompt:
        if not all(text.strip() for text in prompt):
            raise ValueError("the prompt is empty: give --prompt a text")
        return list(prompt)
    from specmlx.evaluation.suites import PROMPTS, suite

    if model == options.DEMO:
        return list(suite(model))
    return PROMPTS["parity"]


@contextlib.contextmanager
def _files(target: options.ModelFlags, reference: str | None) -> Iterator[options.ModelFlags]:
    """Where both programs find the same weights: the demo is stored in float16, and mlx_lm would compute in it."""
    if not (reference and target.model == options.DEMO):
        yield target
        return
    from specmlx.demo.export import write_demo

    with tempfile.TemporaryDirectory() as directory:
        yield replace(target, model=str(write_demo(directory)))


def _drafters(
    model: Any, names: tuple[str, ...], num_draft_tokens: int | str, drafting: options.DraftFlags
) -> dict[str, Any]:
    from specmlx.generation.draft_options import check_width
    from specmlx.loading.load import load_drafter

    drafters = {}
    for name in names:
        with options.loading(name):
            drafter = model.draft_model if name == "auto" else load_drafter(name, model, **asdict(drafting))
        if drafter is None:
            raise ValueError(f"{model.no_draft_reason}: pass --draft-model")
        check_width(drafter, num_draft_tokens)
        drafters[type(drafter).__name__ if name == "auto" else name] = drafter
    return drafters


def _reference(
    target: options.ModelFlags, sampling: SamplingFlags, tokenizer: Any, ids: list[list[int]], max_tokens: int
) -> dict[str, list]:
    from specmlx.evaluation.parity import decode_mlx_lm
    from specmlx.loading.resolve import resolve

    with status(f"decoding {len(ids)} prompts with mlx-lm"):
        path, stops, processors = resolve(target.model), tokenizer.eos_token_ids, sampling.processor_settings()
        return {
            MLX_LM: [*decode_mlx_lm(path, ids, max_tokens, stops, processors, target.adapter_path, dtype=target.dtype)]
        }
