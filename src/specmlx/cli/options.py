"""Flags that several commands share, each group of them one value of a command."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specmlx.cache.quantized import KVFormat
from specmlx.cli.flags import FILE, arguments, written
from specmlx.cli.terminal import status
from specmlx.formats.values import option
from specmlx.parallel.group import FailedElsewhere

DEMO = "demo"
DTYPES = ("float32", "float16", "bfloat16")
JSON = "Print one JSON object."
DRAFT_MODEL = option(
    "auto", "Drafter; auto takes what the target names, none decodes plainly.", metavar="auto|none|mtp|ngram|PATH_OR_ID"
)
PROMPTS = option(None, "A file, one a line.", type=FILE)
BITS = option(None, "Bits of the target's matrices; default: as they are.", type=("2", "3", "4", "5", "6", "8"))
GROUP_SIZE = option("64", type=("32", "64", "128"))


def plot_option(help: str) -> Any:
    """The option of a picture to be drawn."""
    return option(None, help, metavar="FILE", callback=written)


@dataclass(frozen=True)
class DraftFlags:
    """What makes drafting cheaper; the fields are those of `drafters.settings.DraftSettings`."""

    draft_window: int | None = option(
        None,
        "Tokens that a block drafter looks back at; default: its config's, 4096 for layers that have none.",
        least=1,
        metavar="N",
    )
    draft_quantize: str | None = option(
        None,
        "The drafter's projections in so many bits; default: 4 on Metal, none elsewhere.",
        type=("4", "8", "nvfp4", "mxfp4", "none"),
    )
    draft_vocab: int | None = option(
        None, "The drafter's head for the N most frequent tokens only.", least=1, metavar="N"
    )
    draft_vocab_file: str | None = option(
        None,
        "JSON list of token ids, the most frequent first; default: token_frequencies.json beside the models.",
        metavar="FILE",
    )
    draft_markov_top_k: int | None = option(
        None,
        "DSpark: the Markov bias of a slot's K best tokens only; the others are not drafted.",
        least=1,
        metavar="K",
    )


@dataclass(frozen=True)
class ModelFlags:
    """Which target, and how it is loaded."""

    model: str = option(
        DEMO, "Target: a directory, a Hub id (owner/name, or owner/name@revision), or demo.", metavar="PATH_OR_ID"
    )
    dtype: str | None = option(None, "Instead of the files' own.", type=DTYPES)
    adapter_path: str | None = option(None, "LoRA or DoRA adapters, mlx-lm's or PEFT's.", metavar="DIR")
    trust_remote_code: bool = option(False, "Run the tokenizer's own code.")
    consistent: bool = option(False, "On Metal: one kernel for every number of rows, for equal bits.")

    def check(self, *draft_models: str | None) -> None:
        """Raise ValueError for what is wrong with a pair by its small files, before what takes seconds to import."""
        from specmlx.loading.resolve import check_names

        for draft_model in draft_models:
            check_names(self.model, draft_model)

    def load(self, draft_model: str | None = "auto", drafting: DraftFlags | None = None, group: Any = None):
        """(model, tokenizer), the drafter kept on the model; `draft_model` may be "none". Raises ValueError.

        group: of mlx's, where several processes run the model together.
        """
        draft_model = None if draft_model == "none" else draft_model
        if group is None:
            self.check(draft_model)
        from specmlx.loading.load import load

        settings = arguments(load, self, drafting or DraftFlags())
        with loading(self.model):
            return load(self.model, draft_model=draft_model, group=group, **settings)


def prompt_lines(path: Path) -> list[str]:
    """The prompts in a file of one a line. Raises ValueError for one without any, or that is no UTF-8."""
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no text in UTF-8 ({error.reason} at byte {error.start})") from None
    if not lines:
        raise ValueError(f"{path} holds no prompt: write one a line")
    return lines


@contextlib.contextmanager
def loading(name: str) -> Iterator[None]:
    """Say that a checkpoint is being loaded, and turn whatever that raises into an error with its name."""
    with status(f"loading {name}"):
        try:
            yield
        except (ValueError, OSError, FailedElsewhere):
            raise
        # Settings in a checkpoint may be of any type, and so may what reading them raises.
        except Exception as error:
            raise ValueError(f"can't load {name}: {error!r}") from error


@dataclass(frozen=True)
class RequestFlags:
    """How an answer is made; the fields are keywords of `stream_generate`."""

    num_draft_tokens: int | str = option(
        "auto",
        "Drafted tokens checked in a pass: as many as is fastest, all that the drafter makes, or N.",
        metavar="auto|full|N",
    )
    max_tokens: int = option(100, "Most tokens of an answer; -1 is no limit.", names=("-m",))
    prefill_step_size: int = option(2048, "Prompt tokens per step, rounded up to a multiple of 64.")
    max_kv_size: int | None = option(
        None, "Most tokens of a conversation; default: the model's positions. What is longer is refused.", metavar="N"
    )
    kv_bits: int | str | None = option(None, "Keys and values in 2 to 8 bits, or int8.", metavar="N|int8")
    kv_group_size: int = option(64, "Elements that share a scale.")
    quantized_kv_start: int = option(5000, "Keys and values in fewer bits from this many tokens on.")
    calibrate: bool = option(True, "Measure what rounds take, once for a pair on this machine, in up to 5 seconds.")

    def kv_format(self) -> KVFormat | None:
        """How keys and values are kept, None for the model's dtype. Raises ValueError for bad values."""
        return KVFormat.read(**arguments(KVFormat.read, self))
