"""What a launch did: findings in words, bytes and lines per buffer, operations."""

from dataclasses import dataclass, field

FAULTS = (
    "out of bounds",
    "wild pointer",
    "misaligned",
    "write to input",
    "uninitialised read",
    "race",
    "divergent barrier",
    "barrier after exit",
    "partial simdgroup operation",
    "output not written",
    "threadgroup memory over 32 KB",
    "shuffle from a lane that isn't there",
)


@dataclass(frozen=True)
class Traffic:
    """Of one buffer. An instruction is one execution of a load or store by a simdgroup; a line has 128 bytes."""

    nbytes: int
    loads_bytes: int  # summed over lanes
    simd_bytes: int  # distinct within an instruction, summed over instructions
    threadgroup_bytes: int  # distinct within a threadgroup, summed over threadgroups
    loads: int  # instructions
    lines: int  # touched by an instruction, summed over instructions
    stores_bytes: int
    stores: int
    store_simd_bytes: int
    store_lines: int

    @property
    def reads(self) -> float:
        """How often the buffer is read: threadgroup_bytes over its size."""
        return self.threadgroup_bytes / self.nbytes if self.nbytes else 0.0

    @property
    def line_use(self) -> float:
        """Share of the lines touched by a load that the load uses."""
        return self.simd_bytes / (128 * self.lines) if self.lines else 0.0

    @property
    def lines_per_load(self) -> float:
        return self.lines / self.loads if self.loads else 0.0

    @property
    def store_line_use(self) -> float:
        return self.store_simd_bytes / (128 * self.store_lines) if self.store_lines else 0.0


@dataclass(frozen=True)
class Report:
    """Of one launch. Traffic is counted, time is not: none of this is speed."""

    name: str
    findings: list[str] = field(default_factory=list)
    buffers: dict[str, Traffic] = field(default_factory=dict)
    matrix_ops: int = 0  # 8 x 8 x 8 multiply-accumulates of a simdgroup
    flops: int = 0  # scalar fma, add, subtract, multiply, divide outside matrix operations, each as one
    instructions: int = 0  # other arithmetic outside addresses, per lane: shifts, masks, compares, integer arithmetic
    conversions: int = 0
    simd_ops: int = 0
    loads_in_flight: int = 0  # most device loads of a lane in a straight line between two simdgroup operations
    barriers: int = 0
    threadgroups: int = 0
    threads: int = 0
    threadgroup_memory: int = 0  # bytes of one threadgroup
    threadgroup_loads: int = 0  # bytes, summed over lanes
    threadgroup_stores: int = 0

    @property
    def multiply_adds(self) -> int:
        """Floating-point multiply-adds: 512 a matrix operation, and one for every other floating-point operation."""
        return 512 * self.matrix_ops + self.flops
