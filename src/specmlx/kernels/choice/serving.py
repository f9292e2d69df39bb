"""What an operator asks when it is called: may its kernel run?"""

from collections.abc import Callable
from functools import lru_cache

import mlx.core as mx

from specmlx.kernels.backend import metal_factory
from specmlx.kernels.choice.chooser import Chooser, to_stderr
from specmlx.kernels.choice.operator import STOCK


def kernel_factory(operator: str, dtype: mx.Dtype, **key: int | str) -> Callable | None:
    """What makes the operator's kernel, or None where mlx's operations serve: not on Metal, off, wrong or slower."""
    factory = metal_factory()
    if factory is None:
        return None
    named = {**key, "dtype": str(dtype).removeprefix("mlx.core.")}
    return factory if _serves(operator, tuple(named.items())) else None


@lru_cache
def _serves(operator: str, key: tuple) -> bool:
    # Operators know their kernels, and the kernels' packages call this module.
    from specmlx.kernels.choice.operators import OPERATORS

    known = {each.name: each for each in OPERATORS}
    return Chooser(tell=to_stderr).choose(known[operator], dict(key)).variant(1) != STOCK
