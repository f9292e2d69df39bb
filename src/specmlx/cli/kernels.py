"""`specmlx kernels`: which kernel serves which shape on this machine, and why."""

from collections.abc import Iterator
from typing import Any

import click

from specmlx.cli.flags import command, report
from specmlx.cli.options import JSON
from specmlx.formats.values import option


@command(JSON)
class Kernels:
    """Show which kernel serves which shape: kernels of ours are raced against stock mlx when a shape is first seen.

    \b
    Examples:
      specmlx kernels                          what was chosen on this machine
      specmlx kernels --race                   race every known shape again
      specmlx kernels --off quantized_matmul   let stock mlx serve it from now on

    SPECMLX_KERNELS=0 switches all kernels off for one command.
    """

    race: bool = option(False, "Race every known shape again.")
    off: str | None = option(None, "Let stock mlx serve this operator from now on.", metavar="NAME")
    on: str | None = option(None, "Undo --off.", metavar="NAME")

    def run(self) -> None:
        from specmlx.kernels.choice.operators import OPERATORS
        from specmlx.kernels.choice.table import entry_name
        from specmlx.kernels.dispatch import Chooser

        chooser = Chooser()
        known = {operator.name: operator for operator in OPERATORS}
        if wrong := [name for name in (self.off, self.on) if name is not None and name not in known]:
            raise click.BadParameter(f"{wrong[0]!r}: there are {', '.join(known)}.", param_hint="--off / --on")
        for name in filter(None, (self.on, self.off)):
            chooser.table.switch(name, name == self.off)
        shapes, rows = [(known[name], key) for name, key in chooser.table.keys() if name in known], []
        for operator, key in shapes:
            if self.race and chooser.off(operator) is None:
                chooser.race_again(operator, key)
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
        stock = {name: reason for name, operator in known.items() if (reason := chooser.off(operator))}
        found = {"chip": chooser.table.chip, "file": str(chooser.table.path), "off": stock, "shapes": rows}
        report(found, _lines(found))


def _lines(found: dict[str, Any]) -> Iterator[str]:
    yield f"{found['chip']}, kept in {found['file']}"
    for name, reason in found["off"].items():
        yield f"{name}: stock mlx, {reason}"
    if not found["shapes"]:
        yield "No shape has been raced yet: the first load of a quantized model does it."
    for row in found["shapes"]:
        shape = " ".join(f"{name} {value}" for name, value in row["shape"].items())
        yield f"\n{row['operator']}  {shape}\n  by rows   {row['choice']}"
        for n, times in row["microseconds"].items():
            best = min(times.values())
            marked = (f"{v} {us:.1f}{'*' if us == best else ''}" for v, us in times.items())
            yield f"  {n:>2} rows   {', '.join(marked)} µs"
        for variant, why in row["dropped"].items():
            yield f"  not {variant}: {why}"
