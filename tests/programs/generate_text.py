"""Answers three questions: `python generate_text.py MODEL_DIRECTORY`."""

import sys

from mlx_lm import generate, load

QUESTIONS = [
    "Please count up from 196 to 207.",
    "Please turn this into a bullet list: ship, rose, ball, park, queen, city, wine, story, clock, goat.",
    "Good evening! My name is Ida and this is my pillow.",
]

model, tokenizer = load(sys.argv[1])
for question in QUESTIONS:
    messages = [{"role": "user", "content": question}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    print(generate(model, tokenizer, prompt=prompt, max_tokens=96))
    print("---")
# A prompt given as text, and an answer that is cut.
print(generate(model, tokenizer, "Count down from 20 to", max_tokens=17))
