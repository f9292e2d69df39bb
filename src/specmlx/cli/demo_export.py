"""`specmlx demo-export`: the demo pair as a model directory."""

import click

from specmlx.cli.terminal import answers, say


@click.command(short_help="Write the demo pair as a model directory.")
@click.argument("directory")
@click.option("--dtype", type=click.Choice(["float32", "float16", "bfloat16"]), default="float32", show_default=True)
@click.option("--bits", type=click.Choice(["2", "3", "4", "5", "6", "8"]), help="Quantize the target's matrices.")
@click.option("--group-size", type=click.Choice(["32", "64", "128"]), default="64", show_default=True)
def demo_export(directory: str, dtype: str, bits: str | None, group_size: str) -> None:
    """Write the demo pair to a new DIRECTORY that specmlx and mlx_lm load."""
    from specmlx.demo.export import write_demo

    with answers() as out:
        path = write_demo(directory, dtype, None if bits is None else int(bits), int(group_size))
        say(str(path), out)
