"""`specmlx demo-export`: the demo pair as a model directory."""

from specmlx.cli.flags import argument, command
from specmlx.cli.options import BITS, DTYPES, GROUP_SIZE
from specmlx.cli.terminal import say
from specmlx.formats.values import option


@command()
class DemoExport:
    """Write the demo pair to a new DIRECTORY that specmlx and mlx_lm load."""

    directory: str = argument()
    dtype: str = option("float32", type=DTYPES)
    bits: str | None = BITS
    group_size: str = GROUP_SIZE

    def run(self) -> None:
        from specmlx.demo.export import write_demo

        say(
            str(
                write_demo(
                    self.directory, self.dtype, None if self.bits is None else int(self.bits), int(self.group_size)
                )
            )
        )
