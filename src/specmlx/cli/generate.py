"""`specmlx generate`: one answer to one prompt."""

import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import click
import mlx.core as mx

from specmlx.cli.flags import as_json, command, written
from specmlx.cli.launched import joined
from specmlx.cli.options import DEMO, DRAFT_MODEL, DraftFlags, ModelFlags, RequestFlags
from specmlx.cli.sampling import SamplingFlags
from specmlx.cli.template import TemplateFlags
from specmlx.cli.terminal import note, prefill_status, say
from specmlx.formats.values import option

# A held-out question of the demo's: its training never saw it.
PROMPT = "Please write a class Trip in Python that has map and lamp and picture."
# What `--json` prints beside the text and its tokens.
FIELDS = """prompt_tokens cached_tokens generation_tokens rounds draft_passes proposed accepted acceptance_length
    accept_histogram prefill_seconds decode_seconds phases prompt_tps generation_tps end_to_end_tps peak_memory
    finish_reason mode reason""".split()


def _unsupported(ctx: click.Context, param: click.Parameter, value: Any) -> None:
    if value:
        raise click.UsageError(f"{param.opts[0]} is not supported yet: leave it out.")


# Options of mlx_lm.generate that are taken and refused, so that nothing is silently ignored.
@click.option("--quantize-activations", "-qa", is_flag=True, hidden=True, expose_value=False, callback=_unsupported)
@click.option("--image", multiple=True, hidden=True, expose_value=False, callback=_unsupported)
@command("Print one JSON object instead of the text.")
class Generate:
    """Answer one prompt: the text on stdout, everything else on stderr.

    \b
    Examples:
      specmlx generate --prompt "Can you count from 62 up to 73?" --num-draft-tokens full --profile
      specmlx generate --model owner/name --draft-model owner/drafter --temp 0.7 --seed 1 -m 500 --trace trace.json
    """

    target: ModelFlags
    draft_model: str = DRAFT_MODEL
    drafting: DraftFlags
    request: RequestFlags
    prompt: str = option(PROMPT, "- reads stdin, without its last line end.", names=("-p",))
    template: TemplateFlags
    prefill_response: str | None = option(None, "How the answer begins.", metavar="TEXT")
    sampling: SamplingFlags
    stop: tuple[str, ...] = option((), "Ends the answer; may be repeated.", metavar="TEXT")
    extra_eos_token: tuple[str, ...] = option((), "Also a stop token; may be repeated.", metavar="TOKEN")
    prompt_cache_file: str | None = option(
        None, "A saved conversation to go on from, or saved prompts.", metavar="FILE"
    )
    verbose: bool = option(True, "False prints the answer only.", type=bool)
    trace: Path | None = option(
        None, "Keep what each round did, and --profile's phases: specmlx view.", callback=written
    )
    profile: bool = option(False, "Print decoding's seconds by phase; waits for each, so it is slower.")

    def run(self) -> None:
        self.sampling.check()
        kv_format = self.request.kv_format()
        with joined() as group:
            prompt = self._prompt(group)
            target, conversation = _saved(self.prompt_cache_file, self.target)
            model, tokenizer = target.load(self.draft_model, self.drafting, group)
            from specmlx import PromptCache, stream_generate
            from specmlx.evaluation import account
            from specmlx.evaluation.trace import Recorder, write_trace
            from specmlx.generation.responses import summary

            prompt_cache = conversation
            if self.prompt_cache_file and conversation is None:
                prompt_cache = PromptCache()
                prompt_cache.load(self.prompt_cache_file, model.fingerprint)
            for token in self.extra_eos_token:
                _add_stop_token(tokenizer, token, model.vocab_size)
            ids = self.template.ids(tokenizer, prompt, self.prefill_response, suffix=conversation is not None)
            sampling, number = self.sampling.options(tokenizer), self.request.num_draft_tokens
            if mx.default_device() == mx.cpu:
                # mlx compiles fused kernels with the system's compiler, once per machine: seconds that are no decoding.
                for _ in stream_generate(model, tokenizer, [0, 0], 2, num_draft_tokens=number, calibrate=False):
                    pass
            text, tokens, response, shown = "", [], None, []
            # One file of all processes is enough.
            recorder = Recorder() if self.trace and (group is None or group.rank() == 0) else None
            options = sampling | asdict(self.request) | {"stop": self.stop, "profile": self.profile}
            options |= {"prompt_cache": prompt_cache, "prompt_progress_callback": prefill_status}
            for response in stream_generate(model, tokenizer, ids, **options):
                if not tokens:
                    if _defaulted("prompt"):
                        shown.append(f'no --prompt (- reads stdin), so this one is answered: "{prompt}"')
                    where = f" in {group.size()} processes" if group else ""
                    shown.append(f"{target.model}{where}: {_mode(model, number, response.stats)}")
                    # mlx.launch forwards both outputs by pipes of their own: what is said now would land in the answer.
                    if self.verbose and group is None:
                        note("\n".join(shown))
                        shown = []
                tokens.append(response.token)
                text += response.text
                if recorder:
                    recorder.add(response)
                if not as_json():
                    say(response.text, nl=False)
            say(json.dumps(_object(text, tokens, response)) if as_json() else "")
            if self.verbose:
                note("\n".join([*shown, summary(response)]))
            if self.profile:
                note(_phases(response.stats.phases))
            if recorder:
                drafter = None if model.draft_model is None else type(model.draft_model).__name__
                moved = account(model, response.stats, kv_format=kv_format)
                write_trace(self.trace, recorder.trace(target.model, drafter, prompt, moved))
                note(f"{self.trace}: specmlx view {self.trace} makes a page of it")

    def _prompt(self, group: Any) -> str:
        """The prompt's text. Raises ValueError for an empty one, and for flags that several processes can't honour."""
        if group and self.prompt == "-":
            raise ValueError(
                "--prompt - can't be used in several processes: mlx.launch leaves their standard input open"
            )
        if group and self.prompt_cache_file is not None:
            raise ValueError("--prompt-cache-file can't be used in several processes, which keep a part each")
        if self.prompt == "-":
            prompt = sys.stdin.read().removesuffix("\n")
        else:
            prompt = self.prompt.replace("\\n", "\n").replace("\\t", "\t")
        if not prompt.strip():
            raise ValueError("the prompt is empty: give --prompt a text")
        return prompt


def _defaulted(option: str) -> bool:
    return click.get_current_context().get_parameter_source(option) is click.core.ParameterSource.DEFAULT


def _mode(model: Any, num_draft_tokens: int | str, stats: Any) -> str:
    """How a request is really decoded, and why."""
    why = f" ({stats.reason})" if stats.reason else ""
    if model.draft_model is None or num_draft_tokens == 0:
        return f"plain decoding{why}"
    drafter, most = type(model.draft_model).__name__, model.draft_model.max_width
    if num_draft_tokens == "auto":
        return f"{drafter} drafts 0 (plain decoding) to {most} tokens a pass, whatever is fastest"
    number = most if isinstance(num_draft_tokens, str) else num_draft_tokens
    return f"speculative decoding with {drafter}, up to {number} drafted tokens a pass{why}"


def _phases(phases: dict[str, float]) -> str:
    from specmlx.decoding.stats import HOST, host_share

    whole = sum(phases.values())
    lines = [f"  {name:<16} {seconds:8.3f} s {seconds / whole:6.1%}" for name, seconds in phases.items()]
    share = f"Python outside model calls ({', '.join(HOST)}): {host_share(phases):.1%}"
    return "\n".join(["decoding by phase, each waited for (without --profile they overlap):", *lines, share])


def _object(text: str, tokens: list[int], last: Any) -> dict[str, Any]:
    """What `--json` prints of an answer, `last` being its last GenerationResponse."""
    stats, found = last.stats, {"text": text, "tokens": tokens}
    speed = last.generation_tokens / max(stats.prefill_seconds + stats.decode_seconds, 1e-9)
    for name in FIELDS:
        found[name] = getattr(last if hasattr(last, name) else stats, name, speed)
    return found


def _add_stop_token(tokenizer: Any, token: str, vocab: int) -> None:
    # mlx_lm would take the tokenizer's unknown token for a word that is none of its tokens.
    if not (token.isdecimal() and int(token) < vocab) and (token.isdecimal() or token not in tokenizer.get_vocab()):
        raise ValueError(f"--extra-eos-token {token!r} is neither a token of this tokenizer nor an id below {vocab}")
    tokenizer.add_eos_token(token)


def _saved(file: str | None, target: ModelFlags) -> tuple[ModelFlags, Any]:
    """The target that goes on with a saved conversation, and the conversation. Raises ValueError for another --model.

    Of a file of prompts only the first: what is in it begins like the whole prompt, where the model is the same.
    What a file names is data: without `--model` only the demo and a directory on this machine are taken by that name.
    """
    if file is None:
        return target, None
    from specmlx.cache.files import holds_prompts, load_prompts
    from specmlx.generation.prompt_cache import load_prompt_cache

    if holds_prompts(file):
        conversation, metadata = None, load_prompts(file)[1]
    else:
        conversation, metadata = load_prompt_cache(file, return_metadata=True)
    name, given = metadata.get("model") or target.model, target.model
    here = name == DEMO or Path(name).is_dir()
    if name != given and not (here and _defaulted("model")):
        raise ValueError(f"{file} belongs to the model {name[:100]}: pass --model {name[:100]}, not {given}")
    return replace(target, model=name), conversation
