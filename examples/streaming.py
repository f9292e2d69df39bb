"""Print an answer while it is generated, then what speculation did: `python examples/streaming.py [MODEL]`.

Without MODEL the demo pair answers; a model directory or Hub id brings its own drafter where it names one.
"""

import sys

from specmlx import load, stream_generate

model, tokenizer = load(*sys.argv[1:2])
messages = [{"role": "user", "content": "Write the capital letters from G to W."}]
prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True)

for response in stream_generate(model, tokenizer, prompt, max_tokens=128):
    print(response.text, end="", flush=True)
print()

stats = response.stats
print(
    f"{response.generation_tokens} tokens in {stats.rounds} target passes: "
    f"{stats.acceptance_length:.2f} tokens a pass ({stats.mode})",
    file=sys.stderr,
)
if stats.reason:
    print(stats.reason, file=sys.stderr)
