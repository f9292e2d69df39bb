"""The former name of `specmlx.evaluation`: `account` is documented here."""

from specmlx.evaluation import account

__all__ = ["account"]
