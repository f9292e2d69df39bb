"""Stands in for mx.fast.metal_kernel: the same call, run by the compiled source on this CPU."""

import ctypes
import math

import mlx.core as mx
import numpy as np

from .compiler import compile_kernel, find_clang
from .report import FAULTS, Report, Traffic
from .source import MAX_BUFFERS, Source, generate

INPUT, OUTPUT, THREADGROUP = range(3)
NONE = 0xFFFFFFFF
MAX_FINDINGS = 64


class Findings(AssertionError):
    """A kernel did what it must not do; the text lists it."""


class _Buffer(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("size", ctypes.c_uint64),
        *((n, ctypes.c_uint32) for n in ("kind", "granule", "initialised", "unused")),
        *((n, ctypes.c_uint64) for n in ("loads_bytes", "simd_bytes", "threadgroup_bytes", "loads", "lines")),
        *((n, ctypes.c_uint64) for n in ("stores_bytes", "stores", "store_simd_bytes", "store_lines")),
        *((n, ctypes.c_uint64) for n in ("base", "cells", "seen", "touched", "n_touched")),
    ]


class _Finding(ctypes.Structure):
    _fields_ = [
        *((n, ctypes.c_uint32) for n in ("fault", "site", "buffer", "thread", "other", "count")),
        ("group", ctypes.c_uint32 * 3),
        ("offset", ctypes.c_int64),
    ]


class _Launch(ctypes.Structure):
    _fields_ = [
        ("buffers", ctypes.POINTER(_Buffer)),
        ("n_buffers", ctypes.c_uint32),
        ("grid", ctypes.c_uint32 * 3),
        ("group", ctypes.c_uint32 * 3),
        ("n_findings", ctypes.c_uint32),
        ("max_findings", ctypes.c_uint32),
        ("findings", ctypes.POINTER(_Finding)),
        *((n, ctypes.c_uint64) for n in ("barriers", "simd_ops", "matrix_ops", "threadgroups", "memory", "wild")),
    ]


class Simulator:
    """`metal_kernel` is the factory to pass to launch code; `last` and `reports` tell what the launches did.

    strict: raise Findings after a launch that did something wrong. Raises RuntimeError where there is no clang, and
    Unsupported (which pytest takes for a skip) elsewhere than on Linux on x86-64.
    """

    def __init__(self, strict: bool = True):
        find_clang()
        self.strict = strict
        self.reports: list[Report] = []

    @property
    def last(self) -> Report:
        return self.reports[-1]

    def metal_kernel(
        self,
        name: str,
        input_names: list[str],
        output_names: list[str],
        source: str,
        header: str = "",
        ensure_row_contiguous: bool = True,
        atomic_outputs: bool = False,
        compile_options: dict | None = None,
    ) -> "Kernel":
        return Kernel(self, name, input_names, output_names, source, header, ensure_row_contiguous, atomic_outputs)


class Kernel:
    """What mx.fast.metal_kernel returns."""

    def __init__(
        self, simulator, name, input_names, output_names, source, header, ensure_row_contiguous, atomic_outputs
    ):
        self.simulator = simulator
        self.name = name
        self.input_names, self.output_names = list(input_names), list(output_names)
        self.source, self.header = source, header
        self.contiguous, self.atomic_outputs = ensure_row_contiguous, atomic_outputs

    def __call__(
        self,
        *,
        inputs,
        output_shapes,
        output_dtypes,
        grid,
        threadgroup,
        template=None,
        init_value=None,
        verbose=False,
        stream=None,
    ) -> list[mx.array]:
        if not self.contiguous:
            raise NotImplementedError("the simulator only knows ensure_row_contiguous=True")
        inputs = [x if isinstance(x, mx.array) else mx.array(x) for x in inputs]
        if len(inputs) != len(self.input_names) or len(output_shapes) != len(self.output_names):
            raise ValueError(
                f"{self.name} has inputs {self.input_names} and outputs {self.output_names},"
                f" got {len(inputs)} and {len(output_shapes)}"
            )
        generated = generate(
            self.name, self.input_names, self.output_names, self.source, self.header, self.atomic_outputs,
            inputs, template or [], output_dtypes,
        )  # fmt: skip
        if verbose:
            print(generated.text)
        report, outputs = launch(
            self.name, generated, dict(zip(self.input_names, inputs, strict=True)),
            dict(zip(self.output_names, zip(output_shapes, output_dtypes, strict=True), strict=True)),
            grid, threadgroup, init_value,
        )  # fmt: skip
        self.simulator.reports.append(report)
        if report.findings and self.simulator.strict:
            raise Findings(f"{self.name}:\n  " + "\n  ".join(report.findings))
        return outputs


def to_numpy(x: mx.array) -> np.ndarray:
    """The array's bytes, row-major; bfloat16 as uint16."""
    x = mx.contiguous(x)
    return np.array(x.view(mx.uint16) if x.dtype == mx.bfloat16 else x, order="C")


def from_numpy(x: np.ndarray, dtype: mx.Dtype) -> mx.array:
    return mx.array(x).view(dtype) if dtype == mx.bfloat16 else mx.array(x)


def empty(shape, dtype: mx.Dtype) -> np.ndarray:
    return np.empty(shape, np.uint16 if dtype == mx.bfloat16 else np.array(mx.zeros((), dtype)).dtype)


def launch(
    name: str,
    source: Source,
    inputs: dict[str, mx.array],
    outputs: dict[str, tuple[tuple[int, ...], mx.Dtype]],
    grid: tuple[int, int, int],
    threadgroup: tuple[int, int, int],
    init_value: float | None = None,
) -> tuple[Report, list[mx.array]]:
    """Run the kernel over `grid` threads in groups of min(threadgroup, grid), as mlx launches it."""
    group = [min(t, g) for t, g in zip(threadgroup, grid, strict=True)]
    if math.prod(group) > 1024:
        raise ValueError(f"{name}: a threadgroup has at most 1024 threads, got {tuple(threadgroup)}")
    if len(source.buffers) > MAX_BUFFERS:
        raise ValueError(f"{name}: {len(source.buffers)} buffers, Metal has {MAX_BUFFERS}")
    library = compile_kernel(source.text, source.function)

    arrays = {n: to_numpy(x) for n, x in inputs.items()}
    results = {}
    for n, (shape, dtype) in outputs.items():
        results[n] = empty(shape, dtype)
        if init_value is not None:
            results[n][...] = to_numpy(mx.full(shape, init_value, dtype))
    slots = (_Buffer * (len(source.buffers) + 1))()
    keep = []
    for slot, (n, of) in zip(slots, source.buffers, strict=False):
        if not n:  # nothing bound: a null pointer
            continue
        if n in results:
            data = results[n]
            slot.kind, slot.granule = OUTPUT, min(data.itemsize, 4)
            slot.initialised = init_value is not None
        else:
            data = arrays[n]
            shape = inputs[n].shape
            if of == "shape":
                data = np.array(shape, np.int32)
            elif of == "strides":
                data = np.array([math.prod(shape[i + 1 :]) for i in range(len(shape))], np.int64)
            elif of == "ndim":
                data = np.array(len(shape), np.int32)
            slot.kind, slot.granule = INPUT, 4
        keep.append(data)
        slot.data, slot.size = data.ctypes.data, data.nbytes
    slots[-1].kind, slots[-1].granule = THREADGROUP, 1

    found = (_Finding * MAX_FINDINGS)()
    run = _Launch(slots, len(slots), tuple(grid), tuple(group), 0, MAX_FINDINGS, found)
    if library.msl_run(ctypes.byref(run)):
        raise MemoryError("the simulator needs 4 GiB of addresses a buffer")

    names = [f"{n}_{of}" if of else n for n, of in source.buffers] + ["threadgroup memory"]
    operations = (ctypes.c_uint64 * 3).in_dll(library, "msl_operations")
    kept = [f for f, _ in Traffic.__dataclass_fields__.items() if f != "nbytes"]
    report = Report(
        name=name,
        findings=[_in_words(library, f, names, source.text, group) for f in found[: run.n_findings]],
        buffers={n: Traffic(s.size, *(getattr(s, f) for f in kept)) for n, s in zip(names[:-1], slots, strict=False)},
        matrix_ops=run.matrix_ops,
        flops=operations[0],
        instructions=operations[1],
        conversions=operations[2],
        simd_ops=run.simd_ops,
        loads_in_flight=ctypes.c_uint32.in_dll(library, "msl_in_flight").value,
        barriers=run.barriers,
        threadgroups=run.threadgroups,
        threads=math.prod(grid),
        threadgroup_memory=run.memory,
        threadgroup_loads=slots[-1].loads_bytes,
        threadgroup_stores=slots[-1].stores_bytes,
    )
    dtypes = [dtype for _, dtype in outputs.values()]
    return report, [from_numpy(results[n], d) for n, d in zip(outputs, dtypes, strict=True)]


def _in_words(library, f: _Finding, names: list[str], text: str, group: list[int]) -> str:
    words = [FAULTS[f.fault]]
    if f.buffer != NONE:
        words.append(f"in {names[f.buffer]} at byte {f.offset}")
    elif f.offset:
        words.append(f"({f.offset:#x})" if FAULTS[f.fault].startswith("wild") else f"({f.offset})")
    if f.thread != NONE:
        words.append(f"by thread {f.thread} of threadgroup {tuple(f.group)}")
    if f.other != NONE:
        who = f.other & 0x7FFF
        several = "threads of several simdgroups" if f.other == 0xFFFF else f"threads of simdgroup {who}"
        words.append(f"with {several if f.other & 0x8000 else f'thread {who}'}")
    if f.site:
        line = (ctypes.c_uint32 * (4 * f.site + 4)).in_dll(library, "msl_sites")[4 * f.site + 2]
        lines = text.splitlines()
        if 0 < line <= len(lines):
            words.append(f"line {line}: {lines[line - 1].strip()}")
    if f.count > 1:
        words.append(f"({f.count} times)")
    return " ".join(words)
