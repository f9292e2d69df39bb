"""LLVM IR, as text, with a call before every access to memory that threads share, and with counted arithmetic."""

import re
from dataclasses import dataclass

SITE = str(0x5EED517E)  # MSL_SITE in include/msl/types.h
STDLIB = "/include/msl/"
NAME = r'%(?:[\w.$-]+|"[^"]*")'
# What is misaligned is reported and goes on: the CPU's instructions must not ask for alignment.
ALIGN = re.compile(r"\balign \d+")
LOAD = re.compile(rf"^\s+{NAME} = load (?:volatile )?(.+), ptr addrspace\((\d)\) ({NAME}), align (\d+)")
STORE = re.compile(rf"^\s+store (?:volatile )?(.+), ptr addrspace\((\d)\) ({NAME}), align (\d+)")
COPY = re.compile(r"^\s+(?:tail )?call void @llvm\.mem(cpy|move|set)[\w.]*\((.*)\)")
POINTER = re.compile(rf"ptr(?: addrspace\((\d)\))?[\w ()]*?(?:align (\d+) )?({NAME})$")
BLOCK = re.compile(r'^(?:[\w.$-]+|"[^"]*"):')
FLOATING = re.compile(
    r"= (?:fadd|fsub|fmul|fdiv)(?: \w+)* (<(\d+) x )?(?:float|half|bfloat)"
    r"|@llvm\.(?:fma|fmuladd)\.(v(\d+))?b?f(?:16|32)\("
)
CONVERSION = re.compile(r"= (?:fptrunc|fpext|sitofp|uitofp|fptosi|fptoui)(?: \w+)* (<(\d+) x )?")
OTHER = re.compile(
    r"= (?:add|sub|mul|and|or|xor|shl|lshr|ashr|[us]div|[us]rem|icmp|fcmp|select|fneg)(?: \w+)* (<(\d+) x )?"
)
DEBUG = re.compile(r"!dbg !(\d+)")
METADATA = re.compile(
    r"^!(\d+) = (?:distinct )?!(DILocation|DISubprogram|DILexicalBlock\w*|DIFile)\((.*)\)", re.MULTILINE
)


@dataclass(frozen=True)
class Site:
    size: int = 0
    align: int = 1
    line: int = 0
    flags: int = 0  # 1 a store, 2 the pointer may lead elsewhere than into buffers (constant tables, generic)


def size_of(kind: str) -> int:
    if m := re.match(r"[<\[](\d+) x (.*)[>\]]$", kind):
        return int(m[1]) * size_of(m[2])
    if kind in ("half", "bfloat"):
        return 2
    if m := re.match(r"i(\d+)$", kind):
        return (int(m[1]) + 7) // 8
    return {"float": 4, "double": 8}.get(kind, 8)


def first_type(text: str) -> str:
    """`<4 x float> %x` -> `<4 x float>`."""
    depth = 0
    for i, c in enumerate(text):
        depth += (c in "<[{") - (c in ">]}")
        if c == " " and depth == 0:
            return text[:i]
    return text


class Locations:
    """Which line of the kernel an instruction comes from: the innermost one outside the standard library."""

    def __init__(self, ir: str):
        self.nodes = {m[1]: (m[2], m[3]) for m in METADATA.finditer(ir)}

    def field(self, node: str, name: str) -> str | None:
        m = re.search(rf'\b{name}: (?:!(\d+)|(\d+)|"([^"]*)")', self.nodes[node][1])
        return m and (m[1] or m[2] or m[3])

    def file(self, scope: str) -> str:
        file = self.field(scope, "file")
        return self.field(file, "filename") or "" if file else ""

    def function(self, line: str) -> str:
        """Name of the innermost function if it belongs to the standard library, else ''."""
        m = DEBUG.search(line)
        if not m or m[1] not in self.nodes:
            return ""
        scope = self.field(m[1], "scope")
        if STDLIB not in self.file(scope):
            return ""
        while self.nodes[scope][0] != "DISubprogram":
            scope = self.field(scope, "scope")
        return self.field(scope, "name") or ""

    def line(self, line: str) -> int:
        m = DEBUG.search(line)
        at = m[1] if m else None
        found = 0
        while at and at in self.nodes:
            found = int(self.field(at, "line") or 0)
            if STDLIB not in self.file(self.field(at, "scope")):
                break
            at = self.field(at, "inlinedAt")
        return found


def instrument(ir: str) -> tuple[str, list[Site]]:
    where = Locations(ir)
    sites, out = [Site()], []
    serial = 0
    block: list[str] = []
    counts = [0, 0, 0]
    flight = most_in_flight = 0

    def access(space: str | None, pointer: str, site: Site) -> None:
        nonlocal serial
        if space is None or space == "0":
            return
        sites.append(site)
        serial += 1
        block.append(f"  %msl.p{serial} = addrspacecast ptr addrspace({space}) {pointer} to ptr")
        block.append(f"  call void @msl_access(ptr %msl.p{serial}, i32 {len(sites) - 1})")

    def close_block() -> None:
        nonlocal block, serial
        at = next((i for i, text in enumerate(block) if not BLOCK.match(text) and " = phi " not in text), len(block))
        extra = []
        for i, n in enumerate(counts):
            if n:
                serial += 1
                p = f"getelementptr (i8, ptr @msl_operations, i64 {8 * i})"
                extra += [
                    f"  %msl.o{serial} = load i64, ptr {p}",
                    f"  %msl.n{serial} = add i64 %msl.o{serial}, {n}",
                    f"  store i64 %msl.n{serial}, ptr {p}",
                ]
        out.extend(block[:at] + extra + block[at:])
        block = []
        counts[:] = [0, 0, 0]
        nonlocal flight
        flight = 0

    inside = False
    for line in ir.splitlines():
        if not inside:
            out.append(line)
            inside = line.startswith("define ")
            continue
        if line.startswith("}"):
            close_block()
            out.append(line)
            inside = False
            continue
        if BLOCK.match(line):
            close_block()
            block.append(line)
            continue
        if m := LOAD.match(line):
            flags = 2 if m[2] in "24" else 0
            access(m[2], m[3], Site(size_of(m[1]), int(m[4]), where.line(line), flags))
            flight += m[2] == "1"
            most_in_flight = max(most_in_flight, flight)
            line = ALIGN.sub("align 1", line)
        elif m := STORE.match(line):
            flags = 1 | (2 if m[2] in "24" else 0)
            access(m[2], m[3], Site(size_of(first_type(m[1])), int(m[4]), where.line(line), flags))
            line = ALIGN.sub("align 1", line)
        elif m := COPY.match(line):
            to, source, length = m[2].split(", ")[:3]
            size = int(length.split()[-1])
            for i, operand in enumerate((to, source) if m[1] != "set" else (to,)):
                if p := POINTER.match(operand):
                    access(
                        p[1], p[3], Site(size, int(p[2] or 1), where.line(line), (1 - i) | (2 if p[1] == "4" else 0))
                    )
            line = ALIGN.sub("align 1", line)
        elif SITE in line:
            flight = 0
            sites.append(Site(line=where.line(line)))
            line = line.replace(f"i32 noundef {SITE}", f"i32 {len(sites) - 1}").replace(
                f"i32 {SITE}", f"i32 {len(sites) - 1}"
            )
        if m := FLOATING.search(line):
            counts[0] += int(m[2] or m[4] or 1)
        elif (m := CONVERSION.search(line)) and not where.function(line).startswith("simdgroup_"):
            counts[2] += int(m[2] or 1)
        elif (m := OTHER.search(line)) and not where.function(line):
            counts[1] += int(m[2] or 1)
        block.append(line)

    table = ", ".join(f"%Site {{ i32 {s.size}, i32 {s.align}, i32 {s.line}, i32 {s.flags} }}" for s in sites)
    out += [
        "%Site = type { i32, i32, i32, i32 }",
        f"@msl_in_flight = constant i32 {most_in_flight}",
        f"@msl_sites = constant [{len(sites)} x %Site] [{table}]",
        "@msl_operations = external global [3 x i64]",
        "declare void @msl_access(ptr, i32)",
    ]
    return "\n".join(out) + "\n", sites
