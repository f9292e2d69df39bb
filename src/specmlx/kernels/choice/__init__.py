"""Which kernel serves an operator: checked against its reference, raced on the user's chip, kept in a file."""

from specmlx.kernels.choice.chooser import Choice, Chooser, to_stderr
from specmlx.kernels.choice.operator import FIXED, STOCK, Key, Operator, Outcome
from specmlx.kernels.choice.table import Table, this_chip

__all__ = [
    "FIXED",
    "STOCK",
    "Choice",
    "Chooser",
    "Key",
    "Operator",
    "Outcome",
    "Table",
    "this_chip",
    "to_stderr",
]
