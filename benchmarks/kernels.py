"""Kernels of few rows: time and bandwidth on a Mac, or traffic on any Linux machine.

`python benchmarks/kernels.py` races, on a Metal device, our kernels and stock mlx on every quantized matrix of
Qwen3.8-27B. `--simulate` counts on the simulator of tests/msl what the kernels load and compute: no speed, no time.
"""

import json
import sys
from pathlib import Path

import click

sys.path.insert(0, str(Path(__file__).parent))

COLUMNS = """weight_reads line_use multiply_adds instructions x_bytes x_line_use scale_reads scale_line_use
    partial_bytes threadgroups loads_in_flight""".split()


@click.command()
@click.option("--simulate", is_flag=True, help="Count traffic on the simulator (Linux on x86-64).")
@click.option("--json", "as_json", is_flag=True, help="Print a list of rows as JSON.")
@click.option("--all", "everything", is_flag=True, help="With --simulate: the model's shapes, scaled down, too.")
@click.option("--shape", metavar="NxK", help="With --simulate: this shape alone, such as 17408x5120 (minutes).")
def main(simulate: bool, as_json: bool, everything: bool, shape: str | None) -> None:
    """Time of the kernels on a Metal device, or their traffic on the simulator."""
    rows = simulated(everything, shape, progress=not as_json) if simulate else measured(progress=not as_json)
    if as_json:
        click.echo(json.dumps(rows))


def measured(progress: bool) -> list[dict]:
    from kernel_speed import speeds

    from specmlx.kernels.dispatch import on_metal

    if not on_metal():
        raise click.ClickException("mlx runs on no Metal device here; --simulate counts traffic on Linux")
    rows = []
    for row in speeds():
        rows.append(row)
        if progress:
            times = ", ".join(f"{v} {us:.0f}" for v, us in row["microseconds"].items())
            rate = f"{row['gigabytes_per_second']:.0f} GB/s"
            share = f", {row['share']:.0%} of the bus" if row["share"] else ""
            shape = f"{row['shape']:<12} {row['N']:>6} x {row['K']:<5} {row['format']:<8} M {row['M']:>2}"
            click.echo(f"{shape}: {times} µs; {row['best']}: {rate}{share}, {row['to_stock']:.2f} x stock's speed")
    return rows


def simulated(everything: bool, shape: str | None, progress: bool) -> list[dict]:
    import kernel_traffic as traffic

    some = {M: traffic.FORMS for M in (1, 4, 5, 8, 16)}
    if shape:
        sources = [traffic.products({M: traffic.FORMS for M in (1, 8, 16)}, {"": numbers(shape)})]
    else:
        sources = [traffic.products({M: some.get(M, ("A",)) for M in range(1, 17)}, {"": traffic.PLAIN})]
        sources += [traffic.products(some, {"long rows": traffic.LONG})]
        sources += [traffic.products({M: ("A",) for M in (1, 8, 16)}, traffic.SHAPES)] if everything else []
        sources += [traffic.others()]
    rows, broken = [], []
    for source in sources:
        for row in source:
            rows.append(row)
            broken += [(row, bound) for bound in traffic.broken_bounds(row)]
            if progress:
                click.echo(in_one_line(row))
    if progress:
        for row in rows:
            if row.get("shape") == "long rows":
                click.echo(ceilings_in_one_line(traffic.ceilings(row), row))
    for row, bound in broken:
        click.echo(f"not kept: {bound}: {in_one_line(row)}", err=True)
    if broken:
        raise SystemExit(1)
    return rows


def numbers(shape: str) -> tuple[int, int]:
    try:
        N, K = map(int, shape.split("x"))
    except ValueError:
        N = K = 0
    if N < 8 or N % 8 or K < 512 or K % 512:
        raise click.BadParameter(f"{shape!r}: N a multiple of 8 and K one of 512, as stock's kernels want: 17408x5120")
    return N, K


def in_one_line(row: dict) -> str:
    """The figures of a row, stock's in brackets."""
    if "M" not in row:
        return ", ".join(f"{name} {value}" for name, value in row.items())
    beside = row["stock"]
    shown = [f"{name} {row[name]}" + (f" [{beside[name]}]" if beside else "") for name in COLUMNS]
    shape = " ".join(filter(None, [row["shape"], f"{row['N']} x {row['K']}"]))
    stock = f" [{beside['kernel']}]" if beside else ""
    return f"{row['kernel']}{stock}, {row['format']} {shape}, M {row['M']}: " + ", ".join(shown)


def ceilings_in_one_line(ceilings: dict, row: dict) -> str:
    chips = (f"{chip} {bus:.0f}, " + ("-" if alus is None else f"{alus:.0f}") for chip, (bus, alus) in ceilings.items())
    what = f"{row['kernel']} {row['format']} M {row['M']}"
    return f"ceilings in 10⁹ weights a second, bus and ALUs, {what}: {'; '.join(chips)}"


if __name__ == "__main__":
    main()
