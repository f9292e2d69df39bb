"""Lossless speculative decoding for hybrid Gated DeltaNet/attention language models on MLX.

The names below are loaded when they are first used: `import specmlx` imports neither mlx nor a model.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from specmlx.cache.store import PromptCache
    from specmlx.decoding.processors import make_logits_processors
    from specmlx.decoding.sampling import make_sampler
    from specmlx.drafters.pairing import check_pair
    from specmlx.generation.batch import BatchResponse, batch_generate
    from specmlx.generation.engine import Engine, QueueFull
    from specmlx.generation.generate import generate, stream_generate
    from specmlx.generation.prompt_cache import (
        can_trim_prompt_cache,
        load_prompt_cache,
        make_prompt_cache,
        save_prompt_cache,
        trim_prompt_cache,
    )
    from specmlx.generation.responses import GenerationResponse
    from specmlx.loading.load import load, load_drafter

__version__ = "0.1.0"

_HOME = {
    "BatchResponse": "specmlx.generation.batch",
    "Engine": "specmlx.generation.engine",
    "GenerationResponse": "specmlx.generation.responses",
    "PromptCache": "specmlx.cache.store",
    "QueueFull": "specmlx.generation.engine",
    "batch_generate": "specmlx.generation.batch",
    "can_trim_prompt_cache": "specmlx.generation.prompt_cache",
    "check_pair": "specmlx.drafters.pairing",
    "generate": "specmlx.generation.generate",
    "load": "specmlx.loading.load",
    "load_drafter": "specmlx.loading.load",
    "load_prompt_cache": "specmlx.generation.prompt_cache",
    "make_logits_processors": "specmlx.decoding.processors",
    "make_prompt_cache": "specmlx.generation.prompt_cache",
    "make_sampler": "specmlx.decoding.sampling",
    "save_prompt_cache": "specmlx.generation.prompt_cache",
    "stream_generate": "specmlx.generation.generate",
    "trim_prompt_cache": "specmlx.generation.prompt_cache",
}

__all__ = [
    "BatchResponse",
    "Engine",
    "GenerationResponse",
    "PromptCache",
    "QueueFull",
    "__version__",
    "batch_generate",
    "can_trim_prompt_cache",
    "check_pair",
    "generate",
    "load",
    "load_drafter",
    "load_prompt_cache",
    "make_logits_processors",
    "make_prompt_cache",
    "make_sampler",
    "save_prompt_cache",
    "stream_generate",
    "trim_prompt_cache",
]


def __getattr__(name: str):
    if name not in _HOME:
        raise AttributeError(f"module 'specmlx' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__():
    return sorted({*globals(), *__all__})
