"""`specmlx chat`: a conversation in the terminal."""

import contextlib
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

import click

from specmlx.cli import options
from specmlx.cli.flags import grouped, options_of
from specmlx.cli.sampling import SamplingFlags
from specmlx.cli.terminal import answers, handled, note, prefill_status, say, show_status
from specmlx.formats.atomic import check_folder

HELP = "q (quit, exit, /exit) quits, r forgets the conversation, h (/help) shows this; Ctrl-C stops an answer"
# Lines that are no questions: mlx_lm's letters, and what other programs call them.
QUIT, HELP_ME = ("q", "quit", "exit", "/exit"), ("h", "/help")
# What ends a chat from outside; there is one process, so that no rank waits in mlx where no handler runs.
_ENDINGS = (signal.SIGTERM, signal.SIGHUP)


@click.command(short_help="Talk with a model.")
@grouped("target", options.ModelFlags)
@options.draft_model_option
@grouped("drafting", options.DraftFlags)
@grouped("request", options.RequestFlags, max_tokens=256)
@options_of(options.TemplateFlags, "system_prompt", "chat_template_config")
@grouped("sampling", SamplingFlags)
@click.option(
    "--prompt-cache-bytes",
    type=click.IntRange(min=0),
    metavar="N",
    help="What snapshots of prompts may take; default: a quarter of the memory that the device recommends to use.",
)
@click.option(
    "--prompt-cache-file",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Begin with the prompts in this file, if it is there, and write it at the end.",
)
@click.option("--show-draft", is_flag=True, help="Colour the tokens that the drafter guessed.")
@click.option("--color/--no-color", default=None, help="Colours even into a pipe, or none; default: on terminals.")
def chat(
    target: options.ModelFlags,
    sampling: SamplingFlags,
    request: options.RequestFlags,
    draft_model: str,
    drafting: options.DraftFlags,
    system_prompt: str | None,
    chat_template_config: dict[str, Any] | None,
    prompt_cache_bytes: int | None,
    prompt_cache_file: Path | None,
    show_draft: bool,
    color: bool | None,
) -> None:
    """Talk with a model. In it, q (or exit) quits, r forgets the conversation, h is help; Ctrl-C stops answers."""
    sampling.check()
    check_folder("--prompt-cache-file", prompt_cache_file)
    request.kv_format()
    with answers():
        model, tokenizer = target.load(draft_model, drafting=drafting)
    from specmlx.cli.dialogue import Dialogue
    from specmlx.generation.draft_options import check_width
    from specmlx.generation.generate import PromptCache, summary

    check_width(model.draft_model, request.num_draft_tokens, model.no_draft_reason)
    if not tokenizer.has_chat_template:
        raise ValueError(f"the tokenizer of {target.model} has no chat template: use specmlx generate")

    cache = PromptCache(prompt_cache_bytes, keep_answers=True)
    if prompt_cache_file is not None and prompt_cache_file.exists():
        cache.load(prompt_cache_file, model.fingerprint)

    def begin() -> Dialogue:
        return Dialogue(
            model,
            tokenizer,
            system_prompt,
            chat_template_config,
            cache,
            seed=sampling.seed,
            sampler=sampling.sampler(tokenizer),
            logits_processors=sampling.processors(),
            **asdict(request),
        )

    dialogue = begin()
    note(f"{target.model}: {HELP}")
    if show_draft:
        note("This colour: guessed by the drafter, confirmed by the target.", fg="green")
    with handled(_ENDINGS, _end):
        try:
            for line in _lines():
                word = line.strip()
                if word in QUIT:
                    break
                if word in HELP_ME:
                    note(HELP)
                elif word == "r":
                    dialogue = begin()
                    note("The conversation is forgotten.")
                elif word:
                    with answers() as out:
                        last = _answer(dialogue, line, out, show_draft, color)
                    if last is not None:
                        note(summary(last))
        finally:
            if prompt_cache_file is not None:
                with _postponed() as check_signals:
                    cache.save(prompt_cache_file, {"model": target.model})
                    check_signals()


def _answer(dialogue: Any, question: str, out: TextIO, show_draft: bool, color: bool | None) -> Any:
    """Print an answer as it comes and return its last response; None where there is none."""
    last, colored = None, out.isatty() if color is None else color
    try:
        with _postponed() as check_signals:

            def progress(processed: int, total: int) -> None:
                prefill_status(processed, total)
                check_signals()

            with contextlib.closing(dialogue.ask(question, progress)) as responses:
                for last in responses:
                    drafted = show_draft and last.from_draft
                    say(last.text, out, nl=False, fg="green" if drafted and colored else None)
                    check_signals()
    except KeyboardInterrupt:
        show_status("")
        say(out=out)
        note("Stopped.")
    except (ValueError, RuntimeError) as error:
        if last is not None:
            say(out=out)
        note(f"Error: {' '.join(str(error).split())}")
    else:
        say(out=out)
    return last


def _end(signum: int, *_: Any) -> None:
    if signum == signal.SIGINT:
        raise KeyboardInterrupt
    raise SystemExit(128 + signum)


@contextlib.contextmanager
def _postponed() -> Iterator[Callable[[], None]]:
    """Signals are noted, to be obeyed by the function given, where everything is consistent; a second one at once."""
    seen: list[int] = []

    def note_it(signum: int, *_: Any) -> None:
        if seen:
            _end(signum)
        seen.append(signum)

    def obey() -> None:
        if seen:
            _end(seen[0])

    with handled((signal.SIGINT, *_ENDINGS), note_it):
        yield obey


def _lines() -> Iterator[str]:
    """What the user types, up to the end of input; Ctrl-C at a terminal's prompt gives a new one."""
    terminal = sys.stdin.isatty() and sys.stdout.isatty()
    if terminal:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  (input() edits lines with it)
    while True:
        try:
            if terminal:
                yield input("> ")
            elif line := sys.stdin.readline():
                yield line.removesuffix("\n")
            else:
                return
        except EOFError:
            note("")
            return
        except KeyboardInterrupt:
            if not terminal:
                raise
            note("\nq quits.")
