"""Kernels with one planted fault each. With `fault` 0 the same source is sound."""

from dataclasses import dataclass

import mlx.core as mx

T = "uint t = thread_position_in_threadgroup.x, i = thread_position_in_grid.x;"


@dataclass(frozen=True)
class Planted:
    finding: str
    source: str
    grid: int = 64
    threadgroup: int = 32


PLANTED = {
    "a read past the end": Planted("out of bounds in x at byte 256", "y[i] = x[i + fault];"),
    "a read before the start": Planted("out of bounds in x at byte -4", "y[i] = x[int(i) - (i == 0 ? fault : 0)];"),
    "a write past the end": Planted("out of bounds in y at byte 256", "y[i] = x[i]; if (fault && i == 63) y[64] = 0;"),
    "a step out of one threadgroup array into the next": Planted(
        "out of bounds in threadgroup memory",
        "threadgroup float a[32], b[32]; a[t] = x[i]; b[t] = 0;"
        "threadgroup_barrier(mem_flags::mem_threadgroup); y[i] = a[31 - t + fault];",
    ),
    "a wild pointer": Planted("wild pointer", "y[i] = x[i + ulong(fault) * 0x100000000000];"),
    "a write to an input": Planted("write to input in x", "y[i] = x[i]; if (fault) ((device float*)x)[i] = 0;"),
    "a vector load at an odd element": Planted(
        "misaligned in x", "y[i] = ((const device float2*)(x + fault))[t % 16].x;"
    ),
    "threadgroup memory nobody wrote": Planted(
        "uninitialised read in threadgroup memory",
        "threadgroup float a[33]; a[t] = x[i];"
        "threadgroup_barrier(mem_flags::mem_threadgroup); y[i] = a[31 - t + fault];",
    ),
    "an output read before it is written": Planted(
        "uninitialised read in y", "float a = fault ? y[i] : 0; y[i] = x[i] + a;"
    ),
    "an output never written": Planted("output not written in y at byte 4", "if (!fault || i != 1) y[i] = x[i];"),
    "no barrier between simdgroups": Planted(
        "race in threadgroup memory",
        "threadgroup float a[64]; a[t] = x[i];"
        "if (!fault) threadgroup_barrier(mem_flags::mem_threadgroup);"
        "else simdgroup_barrier(mem_flags::mem_threadgroup);"
        "y[i] = a[63 - t];",
        threadgroup=64,
    ),
    "a barrier for device memory only": Planted(
        "race in threadgroup memory",
        "threadgroup float a[32]; a[t] = x[i];"
        "threadgroup_barrier(fault ? mem_flags::mem_device : mem_flags::mem_threadgroup); y[i] = a[31 - t];",
    ),
    "no barrier between lanes": Planted(
        "race in threadgroup memory",
        "threadgroup float a[32]; a[t] = x[i];"
        "if (!fault) simdgroup_barrier(mem_flags::mem_threadgroup); y[i] = a[31 - t];",
    ),
    "a write over what others still read": Planted(
        "race in threadgroup memory",
        "threadgroup float a[32]; a[t] = x[i]; threadgroup_barrier(mem_flags::mem_threadgroup); float b = a[31 - t];"
        "if (!fault) threadgroup_barrier(mem_flags::mem_threadgroup); a[t] = b; y[i] = a[t];",
    ),
    "two threadgroups write one element": Planted("race in y", "y[i] = x[i]; if (fault && t == 0) y[5] = 1;"),
    "a barrier that some threads don't reach": Planted(
        "divergent barrier",
        "threadgroup float a[32]; a[t] = x[i];"
        "if (fault && t < 16) threadgroup_barrier(mem_flags::mem_threadgroup);"
        "else threadgroup_barrier(mem_flags::mem_threadgroup); y[i] = a[t];",
    ),
    "a barrier after some threads returned": Planted(
        "barrier after exit",
        "y[i] = x[i]; if (fault && t == 3) return; threadgroup_barrier(mem_flags::mem_threadgroup);",
    ),
    "a matrix operation by half a simdgroup": Planted(
        "partial simdgroup operation",
        "simdgroup_float8x8 a, b = make_filled_simdgroup_matrix<float, 8, 8>(1.0f);"
        "if (t < 32 - 16 * fault) simdgroup_load(a, x);"
        "else a = b; if (!fault || t < 16) simdgroup_multiply(a, a, b); y[i] = a.thread_elements()[0];",
    ),
    "a read past the end of a small input, in the constant space": Planted(
        "out of bounds in fault at byte 4", "y[i] = x[i] + ((&fault)[fault] == 7 ? 1 : 0);"
    ),
    "a wild pointer in the constant space": Planted(
        "wild pointer", "y[i] = x[i] + ((&fault)[ulong(fault) * 0x40000000000] == 7 ? 1 : 0);"
    ),
    "a vector of 16 bytes at an odd element": Planted(
        "misaligned in x", "y[i] = dot(((const device float4*)(x + fault))[t % 15], float4(1));"
    ),
    "an atomic past the end": Planted(
        "out of bounds in y at byte 256",
        "y[i] = x[i]; if (fault && i == 0) atomic_fetch_add_explicit((device atomic<uint>*)(y + 64), 1u,"
        "memory_order_relaxed);",
    ),
    "a matrix load past the end": Planted(
        "out of bounds in x at byte 256",
        "simdgroup_float8x8 a; simdgroup_load(a, x + fault); y[i] = a.thread_elements()[0] + a.thread_elements()[1];",
    ),
    "matrices of two simdgroups in one place": Planted(
        "race in threadgroup memory",
        "threadgroup float a[128]; simdgroup_float8x8 m = make_filled_simdgroup_matrix<float, 8, 8>(1.0f);"
        "simdgroup_store(m, a + 64 * (fault ? 0 : t / 32));"
        "threadgroup_barrier(mem_flags::mem_threadgroup); y[i] = a[t];",
        threadgroup=64,
    ),
    "all lanes write one element": Planted(
        "race in threadgroup memory",
        "threadgroup float a[1]; if (fault || t == 0) a[0] = x[0];"
        "threadgroup_barrier(mem_flags::mem_threadgroup); y[i] = a[0];",
    ),
    "device memory behind a barrier for threadgroup memory only": Planted(
        "race in y",
        "y[i] = x[i]; threadgroup_barrier(fault ? mem_flags::mem_threadgroup : mem_flags::mem_device);"
        "if (y[63 - t] < 0) y[i] = 1;",
        threadgroup=64,
    ),
    "what the threadgroup before left": Planted(
        "uninitialised read in threadgroup memory",
        "threadgroup float a[32]; if (!fault || i < 32) a[t] = x[i];"
        "threadgroup_barrier(mem_flags::mem_threadgroup); y[i] = a[31 - t];",
    ),
    "a barrier in a loop that some threads leave early": Planted(
        "barrier after exit",
        "for (uint j = 0; j < (fault ? 1 + t % 2 : 2); j++) threadgroup_barrier(mem_flags::mem_threadgroup);"
        "y[i] = x[i];",
    ),
    "a simdgroup barrier in a branch": Planted(
        "partial simdgroup operation", "if (!fault || t < 16) simdgroup_barrier(mem_flags::mem_none); y[i] = x[i];"
    ),
    "a matrix operation in a threadgroup of half a simdgroup": Planted(
        "partial simdgroup operation",
        "simdgroup_float8x8 a = make_filled_simdgroup_matrix<float, 8, 8>(1.0f);"
        "if (fault || i < 32) simdgroup_multiply(a, a, a); y[i] = a.thread_elements()[0];",
        grid=48,
    ),
    "a sum in a branch": Planted(
        "partial simdgroup operation", "y[i] = x[i]; if (!fault || t < 7) y[i] = simd_sum(x[i]);"
    ),
    "a shuffle from a lane that doesn't exist": Planted(
        "shuffle from a lane", "y[i] = simd_shuffle(x[i], (t ^ 1) + 32 * fault);"
    ),
    "too much threadgroup memory": Planted(
        "threadgroup memory over 32 KB (40960)",
        "threadgroup float a[8192]; a[t] = x[i]; if (fault) { threadgroup float b[2048]; b[t] = 0; } y[i] = a[t];",
    ),
}


def run(factory, name: str, fault: bool) -> mx.array:
    planted = PLANTED[name]
    kernel = factory(
        name=f"planted_{list(PLANTED).index(name)}",
        input_names=["x", "fault"],
        output_names=["y"],
        source=f"{T}\n{planted.source.replace(';', ';' + chr(10))}",
    )
    return kernel(
        inputs=[mx.arange(planted.grid, dtype=mx.float32), mx.array(int(fault))],
        grid=(planted.grid, 1, 1),
        threadgroup=(planted.threadgroup, 1, 1),
        output_shapes=[(planted.grid,)],
        output_dtypes=[mx.float32],
    )[0]
