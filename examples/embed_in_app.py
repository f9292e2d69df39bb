"""A chat inside an application: one object that holds the model, its drafter and the conversation so far."""

from collections.abc import Iterator

from specmlx import load, make_prompt_cache, stream_generate


class Assistant:
    """One conversation. Each turn feeds only its own new tokens; earlier turns are in the cache."""

    def __init__(self, model=None, tokenizer=None, max_tokens: int = 256):
        # Two assistants may share one loaded model: what belongs to a conversation is in its cache.
        self.model, self.tokenizer = (model, tokenizer) if model else load()
        self.max_tokens = max_tokens
        self.cache = make_prompt_cache(self.model)
        self.messages: list[dict] = []
        self.stats = None

    def ask(self, question: str) -> Iterator[str]:
        """Yield the answer in pieces; leaving the loop early keeps the conversation usable."""
        old = self._render(self.messages)
        self.messages.append({"role": "user", "content": question})
        new = self._render(self.messages, add_generation_prompt=True)[len(old) :]
        # The cache ends with the last answer's <|im_end|>; the template's line break after it is still to come.
        prompt = self.tokenizer.encode(("\n" if old else "") + new, add_special_tokens=False)
        answer = ""
        try:
            for response in stream_generate(
                self.model, self.tokenizer, prompt, max_tokens=self.max_tokens, prompt_cache=self.cache
            ):
                answer += response.text
                self.stats = response.stats
                yield response.text
        finally:
            self.messages.append({"role": "assistant", "content": answer})

    def _render(self, messages: list[dict], **options) -> str:
        if not messages:
            return ""
        return self.tokenizer.apply_chat_template(messages, tokenize=False, **options)


if __name__ == "__main__":
    assistant = Assistant()
    for question in ["Good morning, I am Ada and I like my lamp.", "Count from 41 to 52."]:
        print(f"> {question}")
        for piece in assistant.ask(question):
            print(piece, end="", flush=True)
        print(f"\n  ({assistant.stats.acceptance_length:.2f} tokens a target pass)")
