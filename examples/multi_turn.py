"""A chat whose turns run their new tokens only: `python examples/multi_turn.py`."""

from specmlx import PromptCache, load, stream_generate

model, tokenizer = load()
# One cache serves many chats at once; prompts stay whole conversations, so nothing has to be kept but the messages.
cache = PromptCache(max_bytes=1 << 30)
messages = [{"role": "system", "content": "You count for people. " * 12}]

for question in [
    "Can you count from 62 up to 73?",
    "Can you count from 3 up to 14?",
    "Can you count from 41 up to 52?",
]:
    messages.append({"role": "user", "content": question})
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    answer = ""
    for response in stream_generate(model, tokenizer, prompt, max_tokens=64, prompt_cache=cache):
        answer += response.text
    messages.append({"role": "assistant", "content": answer})
    print(f"> {question}\n{answer}")
    print(f"  {response.prompt_tokens} prompt tokens, {response.cached_tokens} of them were not run again")
