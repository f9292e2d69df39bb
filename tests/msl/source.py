"""The Metal source that mx.fast.metal_kernel generates (mlx/backend/common/metal_kernel.cpp)."""

import re
from dataclasses import dataclass

import mlx.core as mx

TYPES = {
    mx.bool_: "bool",
    mx.int8: "int8_t",
    mx.int16: "int16_t",
    mx.int32: "int32_t",
    mx.int64: "int64_t",
    mx.uint8: "uint8_t",
    mx.uint16: "uint16_t",
    mx.uint32: "uint32_t",
    mx.uint64: "uint64_t",
    mx.float16: "float16_t",
    mx.bfloat16: "bfloat16_t",
    mx.float32: "float",
    mx.complex64: "complex64_t",
}
# Metal's attributes, in mlx's order; a kernel gets those that its source names anywhere.
ATTRIBUTES = {
    "dispatch_quadgroups_per_threadgroup": "uint",
    "dispatch_simdgroups_per_threadgroup": "uint",
    "dispatch_threads_per_threadgroup": "uint3",
    "grid_origin": "uint3",
    "grid_size": "uint3",
    "quadgroup_index_in_threadgroup": "uint",
    "quadgroups_per_threadgroup": "uint",
    "simdgroup_index_in_threadgroup": "uint",
    "simdgroups_per_threadgroup": "uint",
    "thread_execution_width": "uint",
    "thread_index_in_quadgroup": "uint",
    "thread_index_in_simdgroup": "uint",
    "thread_index_in_threadgroup": "uint",
    "thread_position_in_grid": "uint3",
    "thread_position_in_threadgroup": "uint3",
    "threadgroup_position_in_grid": "uint3",
    "threadgroups_per_grid": "uint3",
    "threads_per_grid": "uint3",
    "threads_per_simdgroup": "uint",
    "threads_per_threadgroup": "uint3",
}
CONSTANT_BELOW = 8  # elements: smaller inputs are `constant`
MAX_BUFFERS = 31


@dataclass(frozen=True)
class Source:
    text: str
    function: str  # with its template arguments
    buffers: tuple[tuple[str, str], ...]  # (name, "" | "shape" | "strides" | "ndim") in the order of the slots


def generate(
    name: str,
    input_names: list[str],
    output_names: list[str],
    source: str,
    header: str,
    atomic_outputs: bool,
    inputs: list[mx.array],
    template: list[tuple[str, object]],
    output_dtypes: list[mx.Dtype],
) -> Source:
    arguments = [TYPES[v] if isinstance(v, mx.Dtype) else str(int(v)) for _, v in template]
    function = f"custom_kernel_{name}"
    if template:
        function += "_" + "".join("_" + re.sub(r"\W", "_", a) for a in arguments)
    for x in inputs:
        function += "_" + TYPES[x.dtype] + ("s" if x.ndim == 0 else "c" if x.size < CONSTANT_BELOW else "")
    for dtype in output_dtypes:
        function += "_" + TYPES[dtype]

    lines, buffers = [], []

    def slot(text: str, name: str, of: str = "") -> None:
        lines.append(f"  {text} {name}{'_' + of if of else ''} [[buffer({len(buffers)})]]")
        buffers.append((name, of))

    for input_name, x in zip(input_names, inputs, strict=True):
        space = "constant" if x.size < CONSTANT_BELOW else "device"
        slot(f"const {space} {TYPES[x.dtype]}{'*' if x.ndim else '&'}", input_name)
        if x.ndim:
            for of, kind in (("shape", "int*"), ("strides", "int64_t*"), ("ndim", "int&")):
                if f"{input_name}_{of}" in source:
                    slot(f"const constant {kind}", input_name, of)
    for output_name, dtype in zip(output_names, output_dtypes, strict=True):
        kind = f"atomic<{TYPES[dtype]}>" if atomic_outputs else TYPES[dtype]
        slot(f"device {kind}*", output_name)
    lines += [f"  {kind} {a} [[{a}]]" for a, kind in ATTRIBUTES.items() if a in source]

    text = header
    if template:
        kinds = [
            "typename" if isinstance(v, mx.Dtype) else "bool" if isinstance(v, bool) else "int" for _, v in template
        ]
        text += f"template <{', '.join(f'{k} {n}' for k, (n, _) in zip(kinds, template, strict=True))}>\n"
    text += f"[[kernel]] void {function}(\n" + ",\n".join(lines) + ") {\n" + source + "\n}\n"
    if template:
        whole = f"{function}<{', '.join(arguments)}>"
        text += f'\ntemplate [[host_name("{function}")]] [[kernel]] decltype({whole}) {whole};\n'
        return Source(text, whole, tuple(buffers))
    return Source(text, function, tuple(buffers))
