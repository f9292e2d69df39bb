"""Flags that several commands share, each group of them one value of a command."""

import contextlib
import secrets
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from specmlx.cli.flags import grouped, json_object
from specmlx.cli.template import check_template_config, render
from specmlx.cli.terminal import status
from specmlx.values import check

if TYPE_CHECKING:
    from specmlx.cli.drafting import DraftFlags
    from specmlx.state.quantized_kv import KVFormat

DEMO = "demo"


@dataclass(frozen=True)
class ModelFlags:
    """Which target, and how it is loaded."""

    model: str
    dtype: str | None
    adapter_path: str | None
    trust_remote_code: bool
    consistent: bool = False

    def check(self, *draft_models: str | None) -> None:
        """Raise ValueError for what is wrong with a pair by its small files, before what takes seconds to import."""
        from specmlx.places import check_names

        for draft_model in draft_models:
            check_names(self.model, draft_model)

    def load(
        self,
        draft_model: str | None = "auto",
        drafting: "DraftFlags | None" = None,
        group: Any = None,
    ):
        """(model, tokenizer), the drafter kept on the model; `draft_model` may be "none". Raises ValueError.

        group: of mlx's, where several processes run the model together.
        """
        draft_model = None if draft_model == "none" else draft_model
        if group is None:
            self.check(draft_model)
        from specmlx.loading import load

        with loading(self.model):
            return load(
                self.model,
                draft_model=draft_model,
                **({} if drafting is None else asdict(drafting)),
                dtype=self.dtype,
                adapter_path=self.adapter_path,
                trust_remote_code=self.trust_remote_code,
                consistent=self.consistent,
                group=group,
            )


@dataclass(frozen=True)
class TemplateFlags:
    """How a prompt becomes text: through the chat template unless that is ignored or there is none."""

    system_prompt: str | None
    ignore_chat_template: bool
    use_default_chat_template: bool
    chat_template_config: dict[str, Any] | None

    def ids(self, tokenizer: Any, prompt: str, prefill_response: str | None = None, suffix: bool = False) -> list[int]:
        """Token ids of a prompt; with `suffix`, from the user's words on: what is before them is in a prompt cache.

        Raises ValueError in one line for template errors.
        """
        if self.ignore_chat_template or not (tokenizer.has_chat_template or self.use_default_chat_template):
            from specmlx.prompts import check_text

            check_text(prompt)
            return tokenizer.encode(prompt)
        system = [] if self.system_prompt is None else [{"role": "system", "content": self.system_prompt}]
        begun = [] if prefill_response is None else [{"role": "assistant", "content": prefill_response}]

        def text(content: str) -> str:
            messages = [*system, {"role": "user", "content": content}, *begun]
            return render(tokenizer, messages, self.chat_template_config or {}, answer_begun=bool(begun))

        rendered = text(prompt)
        if suffix:
            marker = f"prompt-{secrets.token_hex(8)}"
            rendered = rendered[text(marker).index(marker) :]
        return tokenizer.encode(rendered, add_special_tokens=False)


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
    from specmlx.distributed import FailedElsewhere

    with status(f"loading {name}"):
        try:
            yield
        except (ValueError, OSError, FailedElsewhere):
            raise
        # Settings in a checkpoint may be of any type, and so may what reading them raises.
        except Exception as error:
            raise ValueError(f"can't load {name}: {error!r}") from error


def checked(ctx: click.Context, param: click.Parameter, value: Any) -> Any:
    """A callback that checks an option as the functions that take it do; a text that is a number becomes one."""
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            value = int(value)
    return check(param.name, value)


def max_tokens_option(default: int) -> Callable:
    return click.option(
        "--max-tokens",
        "-m",
        type=int,
        default=default,
        show_default=True,
        callback=checked,
        help="Most tokens of an answer; -1 is no limit.",
    )


def unsupported(*declarations: str, **attrs: Any) -> Callable:
    """An option of mlx_lm.generate that is taken and refused, so that nothing is silently ignored."""

    def refuse(ctx: click.Context, param: click.Parameter, value: Any) -> None:
        given = ctx.get_parameter_source(param.name) is not click.core.ParameterSource.DEFAULT
        if given:
            raise click.UsageError(f"{param.opts[0]} is not supported yet: leave it out.")

    return click.option(*declarations, hidden=True, expose_value=False, callback=refuse, **attrs)


model_options = grouped(
    "target",
    ModelFlags,
    click.option(
        "--model",
        default=DEMO,
        show_default=True,
        metavar="PATH_OR_ID",
        help="Target: a directory, a Hub id (owner/name, or owner/name@revision), or demo.",
    ),
    click.option("--dtype", type=click.Choice(["float32", "float16", "bfloat16"]), help="Instead of the files' own."),
    click.option("--adapter-path", metavar="DIR", help="LoRA or DoRA adapters, mlx-lm's or PEFT's."),
    click.option("--trust-remote-code", is_flag=True, help="Run the tokenizer's own code."),
    click.option("--consistent", is_flag=True, help="On Metal: one kernel for every number of rows, for equal bits."),
)

draft_model_option = click.option(
    "--draft-model",
    default="auto",
    show_default=True,
    metavar="auto|none|mtp|ngram|PATH_OR_ID",
    help="Drafter; auto takes what the target names, none decodes plainly.",
)


def num_draft_tokens_option(default: str) -> Callable:
    return click.option(
        "--num-draft-tokens",
        callback=checked,
        default=default,
        show_default=True,
        metavar="auto|full|N",
        help="Drafted tokens checked in a pass: as many as is fastest, all that the drafter makes, or N.",
    )


prefill_step_size_option = click.option(
    "--prefill-step-size",
    type=int,
    callback=checked,
    default=2048,
    show_default=True,
    help="Prompt tokens per step, rounded up to a multiple of 64.",
)


@dataclass(frozen=True)
class KVFlags:
    """How much of a conversation is kept, and how."""

    max_kv_size: int | None
    kv_bits: int | str | None
    kv_group_size: int
    quantized_kv_start: int

    def settings(self) -> dict[str, Any]:
        """Keywords of `stream_generate`. Raises ValueError for bad values."""
        self.format()
        return asdict(self)

    def format(self) -> "KVFormat | None":
        """How keys and values are kept, None for the model's dtype. Raises ValueError for bad values."""
        from specmlx.state.quantized_kv import KVFormat

        return KVFormat.read(self.kv_bits, self.kv_group_size, self.quantized_kv_start)


kv_options = grouped(
    "kv",
    KVFlags,
    click.option(
        "--max-kv-size",
        type=int,
        callback=checked,
        metavar="N",
        help="Most tokens of a conversation; default: the model's positions. What is longer is refused.",
    ),
    click.option("--kv-bits", metavar="N|int8", callback=checked, help="Keys and values in 2 to 8 bits, or int8."),
    click.option("--kv-group-size", type=int, default=64, show_default=True, help="Elements that share a scale."),
    click.option(
        "--quantized-kv-start",
        type=int,
        default=5000,
        show_default=True,
        help="From this many tokens on.",
    ),
)

prompt_cache_bytes_option = click.option(
    "--prompt-cache-bytes",
    type=click.IntRange(min=0),
    metavar="N",
    help="What snapshots of prompts may take; default: a quarter of the memory that the device recommends to use.",
)

system_prompt_option = click.option("--system-prompt", metavar="TEXT", help="System message of the chat.")


def _template_config(ctx: click.Context, param: click.Parameter, value: str | None) -> dict[str, Any] | None:
    parsed = json_object(ctx, param, value)
    try:
        check_template_config(parsed or {})
    except ValueError as error:
        raise click.BadParameter(f"{error}.") from None
    return parsed


chat_template_config_option = click.option(
    "--chat-template-config", metavar="JSON", callback=_template_config, help='Like {"enable_thinking": false}.'
)

template_options = grouped(
    "template",
    TemplateFlags,
    system_prompt_option,
    click.option("--ignore-chat-template", is_flag=True, help="Give the model the raw prompt."),
    click.option("--use-default-chat-template", is_flag=True, help="Fail where the tokenizer has no chat template."),
    chat_template_config_option,
)


def effective_mode(model: Any, num_draft_tokens: int | str, stats: Any) -> str:
    """How a request is really decoded, and why."""
    why = f" ({stats.reason})" if stats.reason else ""
    if model.draft_model is None or num_draft_tokens == 0:
        return f"plain decoding{why}"
    drafter, most = type(model.draft_model).__name__, model.draft_model.max_width
    if num_draft_tokens == "auto":
        return f"{drafter} drafts, auto width: 0 (plain decoding) to {most} tokens a pass, whatever is fastest"
    width = most if isinstance(num_draft_tokens, str) else num_draft_tokens
    return f"speculative decoding with {drafter}, up to {width} drafted tokens a pass{why}"
