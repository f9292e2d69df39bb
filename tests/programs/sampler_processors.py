"""Greedy answers under penalties and a bias: `python sampler_processors.py MODEL_DIRECTORY`."""

import sys

from mlx_lm import generate, load
from mlx_lm.sample_utils import make_logits_processors, make_sampler

model, tokenizer = load(sys.argv[1])
comma = tokenizer.encode(",")[0]
settings = [
    {"repetition_penalty": 1.3, "repetition_context_size": 24},
    {"presence_penalty": 0.8, "frequency_penalty": 0.4},
    {"logit_bias": {comma: 6.0}},
]
for question in [
    "Write the capital letters from G to W.",
    "Copy the words clean, bank, bird, truck, good, hill, wheel, carrot, clock.",
]:
    messages = [{"role": "user", "content": question}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    for setting in settings:
        processors = make_logits_processors(**setting)
        sampler = make_sampler(temp=0.0)
        text = generate(model, tokenizer, prompt, max_tokens=48, sampler=sampler, logits_processors=processors)
        print(setting.keys())
        print(text)
