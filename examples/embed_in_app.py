"""A chat inside an application: one object that holds the model, its drafter and the conversation so far."""

from collections.abc import Iterator

from specmlx import load, make_prompt_cache, stream_generate


class Assistant:
    """One ChatML conversation. A turn feeds only its own new tokens: earlier turns are in the cache."""

    def __init__(self, model=None, tokenizer=None, max_tokens: int = 256):
        # Two assistants may share one loaded model: what belongs to a conversation is in its cache.
        self.model, self.tokenizer = (model, tokenizer) if model else load()
        self.max_tokens = max_tokens
        self.cache = make_prompt_cache(self.model)
        self.closing = ""  # what the template puts between the last token in the cache and the next turn
        self.stats = None

    def ask(self, question: str) -> Iterator[str]:
        """Yield the answer in pieces; leaving the loop early keeps the conversation usable."""
        turn = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
        )
        prompt = self.tokenizer.encode(self.closing + turn, add_special_tokens=False)
        self.closing = "<|im_end|>\n"
        for response in stream_generate(
            self.model, self.tokenizer, prompt, max_tokens=self.max_tokens, prompt_cache=self.cache
        ):
            if response.finish_reason == "stop":
                self.closing = "\n"  # the answer's own <|im_end|> is in the cache
            self.stats = response.stats
            yield response.text


if __name__ == "__main__":
    assistant = Assistant()
    for question in [
        "Good evening! My name is Ida and this is my pillow.",
        "Can you count from 62 up to 73?",
    ]:
        print(f"> {question}")
        for piece in assistant.ask(question):
            print(piece, end="", flush=True)
        print(f"\n  ({assistant.stats.acceptance_length:.2f} tokens a target pass)")
