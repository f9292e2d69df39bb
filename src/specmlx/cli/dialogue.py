"""A chat over several turns, each of which runs its new tokens only."""

from collections.abc import Callable, Iterator
from typing import Any

from specmlx.cache.store import PromptCache
from specmlx.cli.template import Message, next_turn
from specmlx.generation.generate import stream_generate
from specmlx.generation.responses import GenerationResponse


class Dialogue:
    """Messages, and their token ids as the model saw them: answers as generated, thoughts included."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        system_prompt: str | None = None,
        template_config: dict[str, Any] | None = None,
        prompt_cache: PromptCache | None = None,
        **options: Any,
    ):
        """`prompt_cache` keeps what the turns leave, for other dialogues too; `options` are `stream_generate`'s."""
        self.model, self.tokenizer, self.template_config = model, tokenizer, template_config or {}
        self.prompt_cache = PromptCache(keep_answers=True) if prompt_cache is None else prompt_cache
        self.options = options
        self.tokens: list[int] = []
        self.messages: list[Message] = [] if system_prompt is None else [{"role": "system", "content": system_prompt}]

    def ask(self, question: str, progress: Callable[[int, int], None] | None = None) -> Iterator[GenerationResponse]:
        """Answer the next question; `progress` gets (processed, total) of the whole conversation.

        Whenever the iterator is closed, the dialogue holds what it gave, and can go on.
        A question that was stopped before its first token, or whose template fails (ValueError), is as if never asked.
        """
        messages = [*self.messages, {"role": "user", "content": question}]
        turn = next_turn(self.tokenizer, messages, self.template_config)
        prompt = self.tokens + self.tokenizer.encode(turn, add_special_tokens=False)
        options = self.options | {"prompt_cache": self.prompt_cache, "prompt_progress_callback": progress}
        stream = stream_generate(self.model, self.tokenizer, prompt, **options)
        answer, given, response = "", [], None
        try:
            for response in stream:
                answer += response.text
                given.append(response.token)
                yield response
        finally:
            stream.close()
            if response is not None:
                # A stop token was not shown: the template's own closing comes in its place.
                self.tokens = prompt + (given[:-1] if response.finish_reason == "stop" else given)
                self.messages = [*messages, {"role": "assistant", "content": answer}]
