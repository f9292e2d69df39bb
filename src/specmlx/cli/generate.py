"""`specmlx generate`: one answer to one prompt."""

import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import click

from specmlx.cli import options
from specmlx.cli.flags import grouped
from specmlx.cli.launched import joined
from specmlx.cli.sampling import SamplingFlags
from specmlx.cli.terminal import answers, note, prefill_status, say
from specmlx.formats.atomic import check_folder

EPILOG = """\b
Examples:
  specmlx generate --prompt "Can you count from 62 up to 73?" --num-draft-tokens full --profile
  specmlx generate --model owner/name --draft-model owner/drafter --temp 0.7 --seed 1 -m 500 --trace trace.json
"""

# A held-out question of the demo's: its training never saw it.
PROMPT = "Please write a class Trip in Python that has map and lamp and picture."


@click.command(short_help="Answer one prompt.", epilog=EPILOG)
@grouped("target", options.ModelFlags)
@options.draft_model_option
@grouped("drafting", options.DraftFlags)
@grouped("request", options.RequestFlags)
@click.option("--prompt", "-p", default=PROMPT, show_default=True, help="- reads stdin, without its last line end.")
@grouped("template", options.TemplateFlags)
@click.option("--prefill-response", metavar="TEXT", help="How the answer begins.")
@grouped("sampling", SamplingFlags)
@click.option("--stop", multiple=True, metavar="TEXT", help="Ends the answer; may be repeated.")
@click.option("--extra-eos-token", multiple=True, metavar="TOKEN", help="Also a stop token; may be repeated.")
@click.option("--prompt-cache-file", metavar="FILE", help="A saved conversation to go on from, or saved prompts.")
@click.option("--verbose", type=bool, default=True, show_default=True, help="False prints the answer only.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of the text.")
@click.option(
    "--trace",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Keep what each round did, and --profile's phases: specmlx view.",
)
@click.option("--profile", is_flag=True, help="Print decoding's seconds by phase; waits for each, so it is slower.")
@options.unsupported("--quantize-activations", "-qa", is_flag=True)
@options.unsupported("--image", multiple=True)
def generate(
    target: options.ModelFlags,
    sampling: SamplingFlags,
    template: options.TemplateFlags,
    request: options.RequestFlags,
    draft_model: str,
    drafting: options.DraftFlags,
    prompt: str,
    prefill_response: str | None,
    stop: tuple[str, ...],
    extra_eos_token: tuple[str, ...],
    prompt_cache_file: str | None,
    verbose: bool,
    as_json: bool,
    trace: Path | None,
    profile: bool,
) -> None:
    """Answer one prompt: the text on stdout, everything else on stderr."""
    sampling.check()
    kv_format = request.kv_format()
    with joined() as group, answers() as out:
        if group is not None:
            _check_together(prompt, prompt_cache_file)
            # One file of all is enough.
            trace = trace if group.rank() == 0 else None
        prompt = _read(prompt)
        recorder = _recorder(trace)
        target, prompt_cache = _cached(prompt_cache_file, target)
        model, tokenizer = target.load(draft_model, drafting, group)
        from specmlx.generation.generate import stream_generate, summary

        goes_on = prompt_cache is not None
        if prompt_cache_file and prompt_cache is None:
            prompt_cache = _prompts(prompt_cache_file, model)
        for token in extra_eos_token:
            _add_stop_token(tokenizer, token, model.vocab_size)
        _warm_up(model, tokenizer, request.num_draft_tokens)
        text, tokens, response, mode = "", [], None, ""
        for response in stream_generate(
            model,
            tokenizer,
            template.ids(tokenizer, prompt, prefill_response, suffix=goes_on),
            seed=sampling.seed,
            stop=stop,
            sampler=sampling.sampler(tokenizer),
            logits_processors=sampling.processors(),
            prompt_cache=prompt_cache,
            prompt_progress_callback=prefill_status,
            profile=profile,
            **asdict(request),
        ):
            if verbose and not tokens:
                where = "" if group is None else f" in {group.size()} processes"
                mode = (
                    f"{target.model}{where}: {options.effective_mode(model, request.num_draft_tokens, response.stats)}"
                )
                if _defaulted("prompt"):
                    mode = f'no --prompt (- reads stdin), so this one is answered: "{prompt}"\n{mode}'
                # mlx.launch forwards both outputs by pipes of their own: what is said now would land in the answer.
                if group is None:
                    note(mode)
            tokens.append(response.token)
            text += response.text
            if recorder:
                recorder.add(response)
            if not as_json:
                say(response.text, out, nl=False)
        say(json.dumps(record(text, tokens, response)) if as_json else "", out)
        if verbose:
            if group is not None:
                note(mode)
            note(summary(response))
        if profile:
            note(_phases(response.stats.phases))
        if recorder:
            _write_trace(trace, recorder, target.model, model, prompt, response.stats, kv_format)


def _check_together(prompt: str, prompt_cache_file: str | None) -> None:
    if prompt == "-":
        raise ValueError("--prompt - can't be used in several processes: mlx.launch leaves their standard input open")
    if prompt_cache_file is not None:
        raise ValueError("--prompt-cache-file can't be used in several processes, which keep a part each")


def _defaulted(option: str) -> bool:
    return click.get_current_context().get_parameter_source(option) is click.core.ParameterSource.DEFAULT


def _phases(phases: dict[str, float]) -> str:
    from specmlx.decoding.timer import HOST, host_share

    whole = sum(phases.values())
    lines = [f"  {name:<16} {seconds:8.3f} s {seconds / whole:6.1%}" for name, seconds in phases.items()]
    share = f"Python outside model calls ({', '.join(HOST)}): {host_share(phases):.1%}"
    return "\n".join(["decoding by phase, each waited for (without --profile they overlap):", *lines, share])


def _recorder(trace: Path | None) -> Any:
    """What listens to the answer for `--trace`; raises ValueError, before anything is loaded, for a bad place."""
    if trace is None:
        return None
    check_folder("--trace", trace)
    from specmlx.evaluation.trace import Recorder

    return Recorder()


def _write_trace(file: Path, recorder: Any, name: str, model: Any, prompt: str, stats: Any, kv_format: Any) -> None:
    from specmlx.evaluation import account
    from specmlx.evaluation.trace import write_trace

    drafter = model.draft_model
    kind = None if drafter is None else type(drafter).__name__
    moved = account(model, stats, kv_format=kv_format)
    write_trace(file, recorder.trace(name, kind, prompt, moved))
    note(f"{file}: specmlx view {file} makes a page of it")


def _warm_up(model: Any, tokenizer: Any, num_draft_tokens: int | str) -> None:
    # On the CPU mlx compiles fused kernels with the system's compiler, once per machine: seconds that are no decoding.
    import mlx.core as mx

    from specmlx.generation.generate import stream_generate

    if mx.default_device() == mx.cpu:
        for _ in stream_generate(model, tokenizer, [0, 0], 2, num_draft_tokens=num_draft_tokens, calibrate=False):
            pass


def record(text: str, tokens: list[int], last: Any) -> dict[str, Any]:
    """What `--json` prints of an answer, `last` being its last GenerationResponse."""
    stats, sizes = last.stats, ("prompt_tokens", "cached_tokens", "generation_tokens")
    counts = ("rounds", "draft_passes", "proposed", "accepted", "acceptance_length", "accept_histogram")
    return {
        "text": text,
        "tokens": tokens,
        **{name: getattr(last, name) for name in sizes},
        **{name: getattr(stats, name) for name in (*counts, "prefill_seconds", "decode_seconds", "phases")},
        **{name: getattr(last, name) for name in ("prompt_tps", "generation_tps")},
        "end_to_end_tps": last.generation_tokens / max(stats.prefill_seconds + stats.decode_seconds, 1e-9),
        **{name: getattr(last, name) for name in ("peak_memory", "finish_reason")},
        **{name: getattr(stats, name) for name in ("mode", "reason")},
    }


def _read(prompt: str) -> str:
    if prompt == "-":
        prompt = sys.stdin.read().removesuffix("\n")
    else:
        prompt = prompt.replace("\\n", "\n").replace("\\t", "\t")
    if not prompt.strip():
        raise ValueError("the prompt is empty: give --prompt a text")
    return prompt


def _add_stop_token(tokenizer: Any, token: str, vocab: int) -> None:
    # mlx_lm would take the tokenizer's unknown token for a word that is none of its tokens.
    if not (token.isdecimal() and int(token) < vocab) and (token.isdecimal() or token not in tokenizer.get_vocab()):
        raise ValueError(f"--extra-eos-token {token!r} is neither a token of this tokenizer nor an id below {vocab}")
    tokenizer.add_eos_token(token)


def _prompts(file: str, model: Any) -> Any:
    from specmlx.generation.generate import PromptCache

    cache = PromptCache()
    cache.load(file, model.fingerprint)
    return cache


def _cached(file: str | None, target: options.ModelFlags) -> tuple[options.ModelFlags, Any]:
    """The target that goes on with a saved conversation, and the conversation.

    Of a file of prompts only the first: what is in it begins like the whole prompt, where the model is the same.
    """
    if file is None:
        return target, None
    from specmlx.cache.files import holds_prompts, load_prompts
    from specmlx.generation.prompt_cache import load_prompt_cache

    if holds_prompts(file):
        cache, metadata = None, load_prompts(file)[1]
    else:
        cache, metadata = load_prompt_cache(file, return_metadata=True)
    return replace(target, model=_belongs_to(file, metadata.get("model") or target.model, target.model)), cache


def _belongs_to(file: str, made_with: str, given: str) -> str:
    """The model of a saved conversation. Raises ValueError where `--model` is another one.

    What a file names is data: without `--model` only the demo and a directory on this machine are taken by that name.
    """
    here = made_with == options.DEMO or Path(made_with).is_dir()
    if made_with != given and not (here and _defaulted("model")):
        name = made_with[:100]
        raise ValueError(f"{file} belongs to the model {name}: pass --model {name}, not {given}")
    return made_with
