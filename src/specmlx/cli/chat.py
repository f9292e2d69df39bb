"""`specmlx chat`: a conversation in the terminal."""

import contextlib
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from specmlx.cli.flags import command, like, written
from specmlx.cli.options import DRAFT_MODEL, DraftFlags, ModelFlags, RequestFlags
from specmlx.cli.sampling import SamplingFlags
from specmlx.cli.template import TemplateFlags
from specmlx.cli.terminal import handled, note, prefill_status, say, show_status, stdout
from specmlx.formats.values import option

HELP = "q (quit, exit, /exit) quits, r forgets the conversation, h (/help) shows this; Ctrl-C stops an answer"
# Lines that are no questions: mlx_lm's letters, and what other programs call them.
QUIT, HELP_ME = ("q", "quit", "exit", "/exit"), ("h", "/help")
# What ends a chat from outside; there is one process, so that no rank waits in mlx where no handler runs.
_ENDINGS = (signal.SIGTERM, signal.SIGHUP)


@command()
class Chat:
    """Talk with a model. In it, q (or exit) quits, r forgets the conversation, h is help; Ctrl-C stops answers."""

    target: ModelFlags
    draft_model: str = DRAFT_MODEL
    drafting: DraftFlags
    request: RequestFlags = RequestFlags(max_tokens=256)
    system_prompt: str | None = like(TemplateFlags, "system_prompt")
    chat_template_config: dict[str, Any] | None = like(TemplateFlags, "chat_template_config")
    sampling: SamplingFlags
    prompt_cache_bytes: int | None = option(
        None,
        "What snapshots of prompts may take; default: a quarter of the memory that the device recommends to use.",
        least=0,
        metavar="N",
    )
    prompt_cache_file: Path | None = option(
        None,
        "Begin with the prompts in this file, if it is there, and write it at the end.",
        metavar="FILE",
        callback=written,
    )
    show_draft: bool = option(False, "Colour the tokens that the drafter guessed.")
    color: bool | None = option(None, "Colours even into a pipe, or none; default: on terminals.")

    def run(self) -> None:
        self.sampling.check()
        self.request.kv_format()
        model, tokenizer = self.target.load(self.draft_model, self.drafting)
        from specmlx.cache.store import PromptCache
        from specmlx.cli.dialogue import Dialogue
        from specmlx.generation.responses import summary
        from specmlx.generation.settings import check_width

        check_width(model.draft_model, self.request.num_draft_tokens, model.no_draft_reason)
        if not tokenizer.has_chat_template:
            raise ValueError(f"the tokenizer of {self.target.model} has no chat template: use specmlx generate")
        cache = PromptCache(self.prompt_cache_bytes, keep_answers=True)
        if self.prompt_cache_file is not None and self.prompt_cache_file.exists():
            cache.load(self.prompt_cache_file, model.fingerprint)
        settings = self.sampling.options(tokenizer) | asdict(self.request)

        def begin() -> Dialogue:
            return Dialogue(model, tokenizer, self.system_prompt, self.chat_template_config, cache, **settings)

        dialogue = begin()
        note(f"{self.target.model}: {HELP}")
        if self.show_draft:
            note("This colour: guessed by the drafter, confirmed by the target.", fg="green")
        colored = self.show_draft and (stdout().isatty() if self.color is None else self.color)
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
                    elif word.startswith("/") and word[1:].isalpha():
                        note(f"There is no {word} here: {HELP}")
                    elif word and (last := _answer(dialogue, line, colored)) is not None:
                        note(summary(last))
            finally:
                if self.prompt_cache_file is not None:
                    with _postponed() as check_signals:
                        cache.save(self.prompt_cache_file, {"model": self.target.model})
                        check_signals()


def _answer(dialogue: Any, question: str, colored: bool) -> Any:
    """Print an answer as it comes and return its last response; None where there is none."""
    last = None
    try:
        with _postponed() as check_signals:

            def progress(processed: int, total: int) -> None:
                prefill_status(processed, total)
                check_signals()

            with contextlib.closing(dialogue.ask(question, progress)) as responses:
                for last in responses:
                    say(last.text, nl=False, fg="green" if colored and last.from_draft else None)
                    check_signals()
    except KeyboardInterrupt:
        show_status("")
        say()
        note("Stopped.")
    except (ValueError, RuntimeError) as error:
        if last is not None:
            say()
        note(f"Error: {' '.join(str(error).split())}")
    else:
        say()
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
    terminal = sys.stdin.isatty() and stdout().isatty()
    if terminal:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  (input() edits lines with it)
    while True:
        try:
            if terminal:
                with contextlib.redirect_stdout(stdout()):
                    line = input("> ")
                yield line
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
