"""Lossless speculative decoding for hybrid Gated DeltaNet/attention language models on MLX.

The names are loaded when they are first used: `import specmlx` imports neither mlx nor a model.
"""

import ast
from importlib import import_module
from pathlib import Path

__version__ = "0.1.0"

# Each public name and its module, as the stub beside this file lists them for editors too.
_MODULES = {
    alias.name: f"specmlx.{statement.module}"
    for statement in ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8")).body
    if isinstance(statement, ast.ImportFrom)
    for alias in statement.names
}

__all__ = ["__version__", *_MODULES]


def __getattr__(name: str):
    if name not in _MODULES:
        raise AttributeError(f"module 'specmlx' has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


def __dir__():
    return sorted({*globals(), *__all__})
