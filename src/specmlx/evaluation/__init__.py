"""What may be claimed of a generation, and how it is measured."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from specmlx.evaluation.traffic import account

__all__ = ["account"]


def __getattr__(name: str):
    # Loaded when it is first used: `specmlx roofline` needs no model.
    if name != "account":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from specmlx.evaluation.traffic import account

    return account
