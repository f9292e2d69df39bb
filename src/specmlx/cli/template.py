"""Chat templates: from messages to the text that the model is given."""

import secrets
from typing import Any

Message = dict[str, str]


def render(tokenizer: Any, messages: list[Message], answer_begun: bool = False, **config: Any) -> str:
    """The text of messages, up to where the answer begins, or within the last one if that is a begun answer.

    Raises ValueError in one line where the tokenizer has no template or the template refuses the messages, and as
    `check_text`.
    """
    from specmlx.prompts import check_text

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


def next_turn(tokenizer: Any, messages: list[Message], **config: Any) -> str:
    """The text between the end of the last answer in `messages` and the beginning of the one that is asked for.

    The template itself says what closes an answer. Raises ValueError where it leaves earlier answers out.
    """
    if not any(message["role"] == "assistant" for message in messages):
        return render(tokenizer, messages, **config)
    last = max(i for i, message in enumerate(messages) if message["role"] == "assistant")
    marker = f"answer-{secrets.token_hex(8)}"
    marked = [*messages[:last], {"role": "assistant", "content": marker}, *messages[last + 1 :]]
    _, found, rest = render(tokenizer, marked, **config).partition(marker)
    if not found:
        raise ValueError("the chat template leaves earlier answers out, so the conversation can't go on")
    return rest
