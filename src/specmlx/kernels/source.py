"""A Metal kernel made of the source files beside it, and its launch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import mlx.core as mx

_HERE = Path(__file__).parent


@dataclass(frozen=True)
class Source:
    """Of one kernel: its name, its inputs and outputs by name, the files of its body and of what stands before that.

    Names are separated by spaces, files by their path in this folder without `.metal`. define: a macro.
    """

    name: str
    inputs: str
    outputs: str
    body: str
    header: str = ""
    define: str = ""

    def __call__(
        self,
        factory: Callable,
        inputs: Sequence[mx.array],
        outputs: Sequence[tuple[tuple[int, ...], mx.Dtype]],
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int] | None = None,
        **template: Any,
    ) -> list[mx.array]:
        """Outputs of these shapes and dtypes; grid (threads in all) and the rest as `mx.fast.metal_kernel` has them.

        threadgroup: by default a whole row of the grid.
        """
        shapes, dtypes = zip(*outputs, strict=True)
        return made(self, factory)(
            inputs=inputs,
            template=list(template.items()),
            grid=grid,
            threadgroup=threadgroup or (grid[0], 1, 1),
            output_shapes=shapes,
            output_dtypes=dtypes,
        )


@lru_cache
def made(source: Source, factory: Callable) -> Callable:
    """The kernel of this source, made once."""

    def text(files: str) -> str:
        return "".join((_HERE / f"{file}.metal").read_text() for file in files.split())

    return factory(
        name=f"specmlx_{source.name}",
        input_names=source.inputs.split(),
        output_names=source.outputs.split(),
        source=text(source.body),
        header=text(source.header) + (f"#define {source.define}\n" if source.define else ""),
    )
