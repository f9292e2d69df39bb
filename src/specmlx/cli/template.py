"""Chat templates: from messages to the text that the model is given."""

import secrets
from dataclasses import dataclass
from typing import Any

import click

from specmlx.cli.flags import json_object
from specmlx.formats.values import option

Message = dict[str, str]
# What a template is given by name besides a user's settings, and how it is run (transformers' `apply_chat_template`).
_TAKEN = frozenset(
    "self messages conversation chat_template add_generation_prompt continue_final_message tokenize "
    "sanitize_control_tokens padding truncation max_length return_tensors return_dict return_assistant_tokens_mask "
    "tokenizer_kwargs".split()
)


def _config(value: str) -> dict[str, Any]:
    """The type of an option that holds settings of a template."""
    parsed = json_object(value)
    if taken := sorted(_TAKEN & parsed.keys()):
        raise click.BadParameter(f"{taken[0]} is no setting of a chat template: leave it out.")
    return parsed


@dataclass(frozen=True)
class TemplateFlags:
    """How a prompt becomes text: through the chat template unless that is ignored or there is none."""

    system_prompt: str | None = option(None, "System message of the chat.", metavar="TEXT")
    ignore_chat_template: bool = option(False, "Give the model the raw prompt.")
    use_default_chat_template: bool = option(False, "Fail where the tokenizer has no chat template.")
    chat_template_config: dict[str, Any] | None = option(
        None, 'Like {"enable_thinking": false}.', metavar="JSON", type=_config
    )

    def ids(self, tokenizer: Any, prompt: str, prefill_response: str | None = None, suffix: bool = False) -> list[int]:
        """Token ids of a prompt; with `suffix`, from the user's words on: what is before them is in a prompt cache.

        Raises ValueError in one line for template errors.
        """
        if self.ignore_chat_template or not (tokenizer.has_chat_template or self.use_default_chat_template):
            from specmlx.generation.prompts import check_text

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


def render(tokenizer: Any, messages: list[Message], config: dict[str, Any], answer_begun: bool = False) -> str:
    """The text of messages, up to where the answer begins, or within the last one if that is a begun answer.

    config: the template's settings by name.
    Raises ValueError in one line where the tokenizer has no template or the template refuses the messages, and as
    `check_text`.
    """
    from specmlx.generation.prompts import check_text

    if not tokenizer.has_chat_template:
        raise ValueError("the tokenizer has no chat template: use specmlx generate --ignore-chat-template")
    for message in messages:
        check_text(message["content"])
    try:
        return tokenizer.apply_chat_template(
            messages,
            tokenize=False,
            continue_final_message=answer_begun,
            add_generation_prompt=not answer_begun,
            **config,
        )
    # A template is a program that came with the model: it may raise anything.
    except Exception as error:
        raise ValueError(f"the chat template fails on these messages: {error}") from error


def next_turn(tokenizer: Any, messages: list[Message], config: dict[str, Any]) -> str:
    """The text between the end of the last answer in `messages` and the beginning of the one that is asked for.

    The template itself says what closes an answer. Raises ValueError where it leaves earlier answers out.
    """
    if not any(message["role"] == "assistant" for message in messages):
        return render(tokenizer, messages, config)
    last = max(i for i, message in enumerate(messages) if message["role"] == "assistant")
    marker = f"answer-{secrets.token_hex(8)}"
    marked = [*messages[:last], {"role": "assistant", "content": marker}, *messages[last + 1 :]]
    _, found, rest = render(tokenizer, marked, config).partition(marker)
    if not found:
        raise ValueError("the chat template leaves earlier answers out, so the conversation can't go on")
    return rest
