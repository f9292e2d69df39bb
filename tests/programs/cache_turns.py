"""Three turns of one chat on one prompt cache: `python cache_turns.py MODEL_DIRECTORY`."""

import sys

from mlx_lm import load, stream_generate
from mlx_lm.models.cache import make_prompt_cache

TURNS = [
    "Please count up from 196 to 207.",
    "Good morning! My name is Tom and this is my rope.",
    "Can you count from 62 up to 73?",
]

model, tokenizer = load(sys.argv[1])
cache = make_prompt_cache(model)
for turn, question in enumerate(TURNS):
    # Only what is new goes in; the cache ends with the <|im_end|> of the last answer.
    new = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    prompt = tokenizer.encode(("\n" if turn else "") + new)
    answer = ""
    for response in stream_generate(model, tokenizer, prompt, max_tokens=96, prompt_cache=cache):
        answer += response.text
    print(answer)
    print(response.prompt_tokens, response.generation_tokens, response.finish_reason)
