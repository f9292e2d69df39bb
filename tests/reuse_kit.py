"""Running prompts cold and warm, and what snapshots hold of them."""

import mlx.core as mx
from rig import collect, tokens

from specmlx import PromptCache
from specmlx.generation.generate import stream_generate

# Thoughts are asked for, and dropped from the history.
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + (m.content.split('</think>')[-1]"
    " if m.role == 'assistant' else m.content) + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"
)


def ids(seed: int, n: int) -> list[int]:
    return tokens(seed, n, 282)[0].tolist()


def run(model, tokenizer, prompt, cache=None, n=6, drafter=None, **options):
    """Ids and the last response; without a cache, a cold run."""
    stream = stream_generate(model, tokenizer, prompt, n, draft_model=drafter, prompt_cache=cache, **options)
    _, given, last = collect(stream)
    return given, last


def everything(snapshot) -> list[mx.array]:
    """All that a snapshot holds of the target, keys and values in one piece."""
    pieces = snapshot.piece.chain()
    kvs = [mx.concatenate([piece.kvs[i][part] for piece in pieces], axis=2) for i in pieces[0].kvs for part in (0, 1)]
    return kvs + [x for layer in snapshot.recurrent.values() for x in layer[:2]]


def after(cache, text: list[int]):
    """The cache's snapshot of just these ids."""
    return next(s for _, s, _ in cache.snapshots() if s.ids.tolist() == text)


def cold_and_warm(model, tokenizer, prompt, cache):
    """Runs a prompt without and with what the cache holds; both end states, and the warm run's last response."""
    fresh, cache.keep_answers = PromptCache(keep_answers=True), True
    cold, _ = run(model, tokenizer, prompt, fresh)
    warm, last = run(model, tokenizer, prompt, cache)
    assert warm == cold
    text = prompt + cold[:-1]
    return everything(after(fresh, text)), everything(after(cache, text)), last
