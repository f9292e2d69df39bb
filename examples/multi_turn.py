"""A chat whose turns run their new tokens only: `python examples/multi_turn.py`."""

from specmlx import PromptCache, load, stream_generate

model, tokenizer = load()
# One cache serves many chats at once; prompts stay whole conversations, so nothing has to be kept but the messages.
cache = PromptCache(max_bytes=1 << 30)
messages = [{"role": "system", "content": "You answer in short forms. " * 12}]

for question in [
    "Please say the alphabet from h to q in small letters.",
    "Show me a Python function that removes every boat from a list.",
    "Emma learns the times table of 8. Write it from 5 to 10.",
]:
    messages.append({"role": "user", "content": question})
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    answer = ""
    for response in stream_generate(model, tokenizer, prompt, max_tokens=64, prompt_cache=cache):
        answer += response.text
    messages.append({"role": "assistant", "content": answer})
    print(f"> {question}\n{answer}")
    print(f"  {response.prompt_tokens} prompt tokens, {response.cached_tokens} of them were not run again")
