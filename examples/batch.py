"""Several prompts in the same target passes, each with its own sampling: `python examples/batch.py`."""

import sys

from specmlx import batch_generate, load, make_sampler

model, tokenizer = load()
questions = [
    "Write the capital letters from G to W.",
    "Can you count from 62 up to 73?",
    "Please write a class Trip in Python that has map and lamp and picture.",
]
prompts = [
    tokenizer.apply_chat_template([{"role": "user", "content": question}], add_generation_prompt=True)
    for question in questions
]
# One sampler and seed for each prompt (or one for all); with a seed, a text doesn't depend on what runs beside it.
samplers, seeds = [None, None, make_sampler(0.7)], [None, None, 11]
response = batch_generate(model, tokenizer, prompts, max_tokens=128, sampler=samplers, seed=seeds)

for question, text in zip(questions, response.texts, strict=True):
    print(f"> {question}\n{text}")
stats = response.stats
print(f"{stats.generation_tokens} tokens in {stats.passes} target passes", file=sys.stderr)
