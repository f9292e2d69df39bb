"""Prints an answer as it comes, then why it ended: `python stream_text.py MODEL_DIRECTORY`."""

import sys

from mlx_lm import load, stream_generate

model, tokenizer = load(sys.argv[1])
for question, max_tokens in [
    ("Write the capital letters from G to W.", 128),
    ("Can you count from 62 up to 73?", 11),
]:
    messages = [{"role": "user", "content": question}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    tokens = []
    for response in stream_generate(model, tokenizer, prompt, max_tokens=max_tokens):
        tokens.append(response.token)
        print(response.text, end="", flush=True)
    print()
    print(tokens)
    print(response.prompt_tokens, response.generation_tokens, response.finish_reason)
