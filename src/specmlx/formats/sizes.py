"""How many bytes a tensor takes in each format."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

BITS = (2, 3, 4, 5, 6, 8)
GROUPS = (32, 64, 128)


@dataclass(frozen=True)
class Format:
    """A way to store weights `[..., N, K]`: codes, and scales that `group` weights along K share.

    Args:
        bits: of a code.
        group: weights that share a scale; 0 where none do.
        scale_bytes: of a group's scale, with its bias where there is one.
        tensor_scale_bytes: of the scale of a whole matrix.
        rows: matrix rows that share a group's scale.
    """

    name: str
    bits: int
    group: int = 0
    scale_bytes: int = 0
    tensor_scale_bytes: int = 0
    rows: int = 1

    def code_bytes(self, shape: Sequence[int]) -> int:
        """Bytes of the codes of a tensor `[..., K]`; each row starts at a byte."""
        *outer, K = shape
        return math.prod(outer) * -(-K * self.bits // 8)

    def all_scale_bytes(self, shape: Sequence[int]) -> int:
        """Bytes of everything but the codes."""
        if not self.group:
            return self.tensor_scale_bytes
        *outer, N, K = (1, *shape)[-max(2, len(shape)) :]
        groups = math.prod(outer) * -(-N // self.rows) * -(-K // self.group)
        return groups * self.scale_bytes + self.tensor_scale_bytes

    def nbytes(self, shape: Sequence[int]) -> int:
        return self.code_bytes(shape) + self.all_scale_bytes(shape)

    @property
    def bits_per_weight(self) -> float:
        """Of a long row; a tensor's own scale counts nothing."""
        return self.bits + (8 * self.scale_bytes / (self.group * self.rows) if self.group else 0.0)


# nvfp4 and fp8 as NVIDIA's ModelOpt writes them, with a float32 scale a matrix. mlx's nvfp4 has none.
FORMATS = {
    fmt.name: fmt
    for fmt in (
        Format("fp32", 32),
        Format("bf16", 16),
        Format("fp16", 16),
        Format("fp8", 8, tensor_scale_bytes=4),
        Format("fp8-block", 8, group=128, scale_bytes=4, rows=128),
        Format("nvfp4", 4, group=16, scale_bytes=1, tensor_scale_bytes=4),
        Format("mlx-nvfp4", 4, group=16, scale_bytes=1),
        Format("mxfp4", 4, group=32, scale_bytes=1),
        Format("mxfp8", 8, group=32, scale_bytes=1),
    )
}


def affine(bits: int, group: int = 64, dtype_bytes: int = 2) -> Format:
    """mlx's affine format: a scale and a bias a group, each in the weights' own dtype."""
    if bits not in BITS or group not in GROUPS:
        raise ValueError(f"affine-{bits}-{group}: bits are one of {str(BITS)[1:-1]}, groups one of {str(GROUPS)[1:-1]}")
    return Format(f"affine-{bits}-{group}", bits, group, 2 * dtype_bytes)


def format_named(name: str, others: Sequence[str] = ()) -> Format:
    """The format of a name: one of FORMATS, or affine-BITS or affine-BITS-GROUP. Raises ValueError, one line.

    others: further names that the caller knows, for the error.
    """
    if name in FORMATS:
        return FORMATS[name]
    if found := re.fullmatch(r"affine-(\d+)(?:-(\d+))?", name):
        return affine(int(found[1]), int(found[2] or 64))
    known = ", ".join(["affine-BITS", "affine-BITS-GROUP", *FORMATS, *others])
    raise ValueError(f"unknown format {name!r}: there are {known}")


def quantized(mode: str, bits: int, group: int) -> Format:
    """The format of an entry of mlx's `quantization` settings. Raises ValueError for a mode that mlx does not have."""
    if mode == "affine":
        return affine(bits, group)
    if mode not in ("nvfp4", "mxfp4", "mxfp8"):
        raise ValueError(f"unknown quantization mode {mode!r}: mlx has affine, mxfp4, mxfp8 and nvfp4")
    return FORMATS["mlx-nvfp4" if mode == "nvfp4" else mode]
