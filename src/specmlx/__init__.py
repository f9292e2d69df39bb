"""Lossless speculative decoding for hybrid Gated DeltaNet/attention language models on MLX.

The names below are loaded when they are first used: `import specmlx` imports neither mlx nor a model.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from specmlx.batch import BatchResponse, batch_generate
    from specmlx.drafters.pairing import check_pair
    from specmlx.engine import Engine, QueueFull
    from specmlx.generation import generate, stream_generate
    from specmlx.loading import load, load_drafter
    from specmlx.prompt_cache import (
        can_trim_prompt_cache,
        load_prompt_cache,
        make_prompt_cache,
        save_prompt_cache,
        trim_prompt_cache,
    )
    from specmlx.responses import GenerationResponse
    from specmlx.speculation.processors import make_logits_processors
    from specmlx.speculation.sampling import make_sampler
    from specmlx.state.store import PromptCache

__version__ = "0.1.0"

_HOME = {
    "BatchResponse": "specmlx.batch",
    "Engine": "specmlx.engine",
    "GenerationResponse": "specmlx.responses",
    "PromptCache": "specmlx.state.store",
    "QueueFull": "specmlx.engine",
    "batch_generate": "specmlx.batch",
    "can_trim_prompt_cache": "specmlx.prompt_cache",
    "check_pair": "specmlx.drafters.pairing",
    "generate": "specmlx.generation",
    "load": "specmlx.loading",
    "load_drafter": "specmlx.loading",
    "load_prompt_cache": "specmlx.prompt_cache",
    "make_logits_processors": "specmlx.speculation.processors",
    "make_prompt_cache": "specmlx.prompt_cache",
    "make_sampler": "specmlx.speculation.sampling",
    "save_prompt_cache": "specmlx.prompt_cache",
    "stream_generate": "specmlx.generation",
    "trim_prompt_cache": "specmlx.prompt_cache",
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
