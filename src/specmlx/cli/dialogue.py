"""A chat over several turns, each of which gives the model its new tokens only."""

from collections.abc import Callable, Iterator
from typing import Any

from specmlx.cli.template import Message, next_turn
from specmlx.generation import GenerationResponse, make_prompt_cache, stream_generate


class Dialogue:
    """Messages, and the conversation that holds them as the model saw them: answers as generated, thoughts included."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        system_prompt: str | None = None,
        template_config: dict[str, Any] | None = None,
        **options: Any,
    ):
        """`options` are `stream_generate`'s."""
        self.model = model
        self.tokenizer = tokenizer
        self.template_config = template_config or {}
        self.options = options
        self.messages: list[Message] = []
        if system_prompt is not None:
            self.messages.append({"role": "system", "content": system_prompt})
        self.conversation = make_prompt_cache(model)
        self._lost: list[int] = []

    def ask(self, question: str, progress: Callable[[int, int], None] | None = None) -> Iterator[GenerationResponse]:
        """Answer the next question; `progress` gets (processed, total) of its prompt.

        Whenever the iterator is closed, the dialogue holds what it gave, and can go on.
        A question that was stopped before its first token, or whose template fails (ValueError), is as if never asked.
        """
        messages = [*self.messages, {"role": "user", "content": question}]
        turn = next_turn(self.tokenizer, messages, **self.template_config)
        before = self._lost + self.conversation.tokens
        ids = self._lost + self.tokenizer.encode(turn, add_special_tokens=False)
        answer, response = "", None
        stream = stream_generate(
            self.model,
            self.tokenizer,
            ids,
            prompt_cache=self.conversation,
            prompt_progress_callback=progress,
            **self.options,
        )
        try:
            for response in stream:
                answer += response.text
                yield response
        finally:
            stream.close()
            if response is not None:
                self._lost = []
                self.messages = [*messages, {"role": "assistant", "content": answer}]
                before = self.conversation.tokens
                if response.finish_reason == "stop":
                    # Not in the state yet, and not shown: the template's own closing comes in its place.
                    self.conversation.pending = None
            if self.conversation.states.broken or (response is None and self.conversation.tokens != before):
                # A recurrent state can't go back: the next question brings everything before it again.
                self.conversation, self._lost = make_prompt_cache(self.model), before
