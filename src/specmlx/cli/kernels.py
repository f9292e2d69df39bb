"""`specmlx kernels`: which kernel serves which shape on this machine, and why."""

import json
from typing import TYPE_CHECKING

import click

from specmlx.cli.terminal import say

if TYPE_CHECKING:
    from specmlx.kernels.choice.operator import Operator
    from specmlx.kernels.dispatch import Chooser

EPILOG = """\b
Examples:
  specmlx kernels                          what was chosen on this machine
  specmlx kernels --race                   race every known shape again
  specmlx kernels --off quantized_matmul   let stock mlx serve it from now on

SPECMLX_KERNELS=0 switches all kernels off for one command.
"""


@click.command(short_help="Which kernel serves which shape on this machine.", epilog=EPILOG)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--race", "again", is_flag=True, help="Race every known shape again.")
@click.option("--off", metavar="NAME", help="Let stock mlx serve this operator from now on.")
@click.option("--on", metavar="NAME", help="Undo --off.")
def kernels(as_json: bool, again: bool, off: str | None, on: str | None) -> None:
    """Show which kernel serves which shape: kernels of ours are raced against stock mlx when a shape is first seen."""
    from specmlx.kernels.choice.operators import OPERATORS
    from specmlx.kernels.dispatch import Chooser

    chooser = Chooser()
    known = {operator.name: operator for operator in OPERATORS}
    for name in (off, on):
        if name is not None and name not in known:
            raise click.BadParameter(f"{name!r}: there are {', '.join(known)}.", param_hint="--off / --on")
    for name, switched_off in ((on, False), (off, True)):
        if name is not None:
            chooser.table.switch(name, switched_off)
    shapes = [(known[name], key) for name, key in chooser.table.keys() if name in known]
    if again:
        for operator, key in shapes:
            if chooser.off(operator) is None:
                chooser.race_again(operator, key)
    report = as_dict(chooser, known, shapes)
    say(json.dumps(report, ensure_ascii=False) if as_json else as_text(report))


def as_dict(chooser: "Chooser", known: "dict[str, Operator]", shapes: list) -> dict:
    from specmlx.kernels.choice.table import entry_name

    rows = []
    for operator, key in shapes:
        outcome = chooser.table.entries[entry_name(operator, key)]
        rows.append(
            {
                "operator": operator.name,
                "shape": dict(key),
                "choice": str(chooser.choose(operator, key)),
                "microseconds": {n: {v: s * 1e6 for v, s in times.items()} for n, times in outcome.seconds.items()},
                "dropped": outcome.dropped,
            }
        )
    off = {name: reason for name, operator in known.items() if (reason := chooser.off(operator))}
    return {"chip": chooser.table.chip, "file": str(chooser.table.path), "off": off, "shapes": rows}


def as_text(report: dict) -> str:
    lines = [f"{report['chip']}, kept in {report['file']}"]
    lines += [f"{name}: stock mlx, {reason}" for name, reason in report["off"].items()]
    if not report["shapes"]:
        lines.append("No shape has been raced yet: the first load of a quantized model does it.")
    for row in report["shapes"]:
        shape = " ".join(f"{name} {value}" for name, value in row["shape"].items())
        lines += ["", f"{row['operator']}  {shape}", f"  by rows   {row['choice']}"]
        for n, times in row["microseconds"].items():
            best = min(times.values())
            marked = (f"{v} {us:.1f}{'*' if us == best else ''}" for v, us in times.items())
            lines.append(f"  {n:>2} rows   {', '.join(marked)} µs")
        lines += [f"  not {variant}: {why}" for variant, why in row["dropped"].items()]
    return "\n".join(lines)
