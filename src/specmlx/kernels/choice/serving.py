"""What an operator asks when it is called: may its kernel run?"""

from collections.abc import Callable
from functools import lru_cache
from typing import Protocol, runtime_checkable

import mlx.core as mx

from specmlx.kernels.backend import metal_factory
from specmlx.kernels.choice.chooser import Chooser, to_stderr
from specmlx.kernels.choice.operator import STOCK


class Serve(Protocol):
    """What answers it."""

    def __call__(self, operator: str, dtype: mx.Dtype, **key: int | str) -> Callable | None:
        """What makes the operator's kernel for this shape, or None where mlx's operations serve."""


@runtime_checkable
class Served(Protocol):
    """A layer that calls such an operator.

    operator: what it is called.
    """

    operator: str

    def serve_by(self, serve: Serve) -> None:
        """Ask this one from now on."""

    def on_kernel(self, dtype: mx.Dtype) -> bool:
        """Whether a kernel runs it for rows of this dtype."""


def kernel_factory(operator: str, dtype: mx.Dtype, **key: int | str) -> Callable | None:
    """None: not on Metal, off, wrong or slower."""
    return _factory(False, operator, dtype, key)


def consistent_factory(operator: str, dtype: mx.Dtype, **key: int | str) -> Callable | None:
    """None: not on Metal. Raises ValueError on Metal where the kernel is off or wrong."""
    return _factory(True, operator, dtype, key)


def _factory(consistent: bool, operator: str, dtype: mx.Dtype, key: dict) -> Callable | None:
    factory = metal_factory()
    if factory is None:
        return None
    named = {**key, "dtype": str(dtype).removeprefix("mlx.core.")}
    return factory if _serves(consistent, operator, tuple(named.items())) else None


@lru_cache
def _serves(consistent: bool, operator: str, key: tuple) -> bool:
    # Operators know their kernels, and the kernels' packages call this module.
    from specmlx.kernels.choice.operators import OPERATORS

    known = {each.name: each for each in OPERATORS}
    return _chooser(consistent).choose(known[operator], dict(key)).variant(1) != STOCK


@lru_cache
def _chooser(consistent: bool) -> Chooser:
    return Chooser(consistent=consistent, tell=to_stderr)
