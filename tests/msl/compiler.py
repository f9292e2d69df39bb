"""Metal source to a shared library: clang (of the machine, or the one in the ziglang wheel), a cache by hash."""

import ctypes
import functools
import hashlib
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from unittest import SkipTest

import mlx.core as mx

from .instrument import Site, instrument
from .rewrite import pointers_without_space, rewrite

HERE = Path(__file__).parent
MLX_INCLUDE = Path(mx.__file__).parent / "include"
OLDEST = 19
FRONT_END = (
    "-x cl -cl-std=clc++2021 -cl-no-stdinc -cl-single-precision-constant -Xclang -ffake-address-space-map"
    " -Xclang -ffloat16-excess-precision=none -Xclang -fbfloat16-excess-precision=none -ffp-contract=on -fno-vectorize"
    " -Xclang -fnative-half-type -Xclang -fnative-half-arguments-and-returns"
    " -fno-slp-vectorize -mllvm -disable-vector-combine"
    " -fno-builtin -mllvm -disable-loop-idiom-all -gline-tables-only -fno-discard-value-names"
)
WARNINGS = "-Wno-everything -Wimplicit-float-conversion -Wimplicit-int-conversion -fno-caret-diagnostics"
MACHINE = "--target=x86_64-unknown-linux-gnu -march=x86-64-v3 -fPIC -fvisibility=hidden"
FREESTANDING = "-std=c++20 -O2 -ffreestanding -fno-exceptions -fno-rtti"


class Unsupported(SkipTest):
    """Not a machine that the simulator knows; pytest skips a test that raises it."""


class CompileError(Exception):
    """The Metal source doesn't compile; the text is clang's."""


@dataclass(frozen=True)
class Clang:
    command: tuple[str, ...]
    link: tuple[str, ...]
    version: str


@functools.cache
def find_clang() -> Clang:
    """The newest clang in PATH that is new enough, else the ziglang wheel's; raises RuntimeError if there is none.

    MSL_CLANG=wheel takes the wheel's in any case.
    """
    if sys.platform != "linux" or platform.machine() != "x86_64":
        raise Unsupported(f"Metal is simulated on Linux on x86-64, this is {sys.platform} on {platform.machine()}")
    names = [*(f"clang-{v}" for v in range(30, OLDEST - 1, -1)), "clang"]
    if os.environ.get("MSL_CLANG") == "wheel":
        names = []
    for name in names:
        if path := shutil.which(name):
            text = subprocess.run([path, "--version"], capture_output=True, text=True).stdout
            m = re.search(r"version (\d+)\S*", text)
            if m and int(m[1]) >= OLDEST:
                return Clang((path,), (path, "-shared", "-nostdlib"), text.splitlines()[0])
    if spec := importlib.util.find_spec("ziglang"):
        zig = str(Path(spec.submodule_search_locations[0]) / "zig")
        text = subprocess.run([zig, "clang", "--version"], capture_output=True, text=True).stdout
        return Clang((zig, "clang"), (zig, "ld.lld", "-shared"), text.splitlines()[0])
    raise RuntimeError(f"no clang {OLDEST} or newer in PATH and no ziglang wheel: pip install ziglang")


def cache_directory() -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "specmlx-msl"


def _run(command: list[str], text: str | None = None) -> tuple[str, str]:
    done = subprocess.run(command, input=text, capture_output=True, text=True)
    if done.returncode:
        raise CompileError(done.stderr.strip() or f"{command[0]} failed")
    return done.stdout, done.stderr


@functools.cache
def _tool_hash() -> str:
    files = sorted([*HERE.glob("*.py"), *HERE.glob("runtime/*"), *HERE.glob("include/**/*")])
    digest = hashlib.sha256(find_clang().version.encode())
    for file in files:
        if file.is_file():
            digest.update(file.read_bytes())
    return digest.hexdigest()


@functools.cache
def _runtime() -> Path:
    return _cached(f"runtime {_tool_hash()}", ".o", _compile_runtime)


def _compile_runtime(target: Path) -> None:
    _run(
        [
            *find_clang().command,
            *FREESTANDING.split(),
            *MACHINE.split(),
            "-c",
            str(HERE / "runtime" / "runtime.cpp"),
            "-o",
            str(target),
        ]
    )


def _cached(key: str, suffix: str, make) -> Path:
    path = cache_directory() / (hashlib.sha256(key.encode()).hexdigest()[:32] + suffix)
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as work:
            make(Path(work) / f"new{suffix}")
            os.replace(Path(work) / f"new{suffix}", path)
    return path


@functools.cache
def _prelude() -> tuple[Path, Path]:
    """The standard library and mlx's utils.h, rewritten, and the same precompiled."""
    text = _cached(f"prelude {_tool_hash()}", ".clcpp", _write_prelude)
    return text, _cached(f"prelude {_tool_hash()}", ".pch", functools.partial(_precompile, text))


def _write_prelude(target: Path) -> None:
    target.write_text(rewrite(_preprocess("", "-include", str(HERE / "include" / "prelude.h"))))


def _precompile(text: Path, target: Path) -> None:
    _run([*_front_end(), "-Wno-everything", "-Xclang", "-emit-pch", "-c", str(text), "-o", str(target)])


def _preprocess(text: str, *prelude: str) -> str:
    options = "-E -x c++ -undef -nostdinc -Wno-everything".split()
    include = ["-I", str(HERE / "include"), "-I", str(MLX_INCLUDE)]
    return _run([*find_clang().command, *options, *include, *prelude, "-"], f'# 1 "source.metal"\n{text}\n')[0]


def _front_end() -> list[str]:
    return [*find_clang().command, *FRONT_END.split(), *MACHINE.split(), "-O2"]


def translate(source: str, function: str) -> str:
    """Metal source -> C++ for OpenCL with `msl_entry`, which calls `function` with the kernel's arguments."""
    text = _preprocess(source, "-imacros", str(HERE / "include" / "prelude.h"))
    if bare := pointers_without_space(text):
        raise CompileError("Metal wants an address space in:\n" + "\n".join(bare))
    signature = Signature.parse(text, function.split("<")[0])
    return rewrite(signature.mark(text)) + rewrite(signature.entry(function))


@dataclass(frozen=True)
class Signature:
    """A kernel's parameters, as (type and declarator without the name, name, attribute)."""

    start: int
    end: int
    parameters: tuple[tuple[str, str, str], ...]
    returns: int  # where the kernel's declaration starts

    @classmethod
    def parse(cls, text: str, name: str) -> "Signature":
        m = re.search(rf"(?:\[\[kernel\]\]|\bkernel\b)[^;{{}}]*?\b{re.escape(name)}\s*\(", text)
        if not m:
            raise CompileError(f"no kernel {name} in the source")
        depth, at, parts = 1, m.end(), [""]
        while depth:
            c = text[at]
            depth += (c in "([{<") - (c in ")]}>")
            if depth == 1 and c == ",":
                parts.append("")
            elif depth:
                parts[-1] += c
            at += 1
        parameters, buffers = [], 0
        for part in parts:
            attribute = re.search(r"\[\[\s*(.*?)\s*\]\]", part, re.DOTALL)
            plain = re.sub(r"\[\[.*?\]\]", "", re.sub(r"^\s*#.*$", "", part, flags=re.MULTILINE), flags=re.DOTALL)
            m2 = re.match(r"\s*(.*?)\s*(\w+)\s*$", plain, re.DOTALL)
            if not m2:
                raise CompileError(f"not a parameter of a kernel: {part.strip()}")
            parameters.append((m2[1], m2[2], attribute[1] if attribute else f"buffer({buffers})"))
            buffers += parameters[-1][2].startswith("buffer")
        return cls(m.end(), at - 1, tuple(parameters), m.start())

    def mark(self, text: str) -> str:
        """Buffers don't overlap (mlx sees to it), and what a kernel writes may change at every barrier."""
        lines = text[self.start : self.end].count("\n")
        pointers = [(kind, name) for kind, name, _ in self.parameters if kind.endswith("*")]
        plain = ", ".join(
            f"{kind} __restrict msl_{name}" if (kind, name) in pointers else f"{kind} {name}"
            for kind, name, _ in self.parameters
        )
        brace = text.index("{", self.end)
        copies = "".join(f" {kind} {name} = msl_{name};" for kind, name in pointers)
        escapes = "".join(f" msl_escape({name});" for kind, name in pointers if "const" not in kind.split())
        head = text[self.returns : self.start].replace("[[kernel]]", "").replace("kernel ", "", 1)
        return (
            text[: self.returns] + "__attribute__((noinline)) " + head + plain + "\n" * lines
            + text[self.end : brace + 1] + copies + escapes + text[brace + 1 :]
        )  # fmt: skip

    def entry(self, function: str) -> str:
        arguments = []
        for kind, _, attribute in self.parameters:
            if m := re.match(r"buffer\((\d+)\)", attribute):
                arguments.append(f"msl_{'reference' if kind.endswith('&') else 'pointer'}{{buffers[{m[1]}]}}")
            else:
                arguments.append(f"msl_attribute<{kind}>(at + {ATTRIBUTE_OFFSETS[attribute]})")
        return (
            'extern "C" __attribute__((visibility("default"))) void msl_entry(const thread ulong* buffers,'
            f" const thread uint* at) {{ {function}({', '.join(arguments)}); }}\n"
        )


# Where runtime/scheduler.h (set_attributes) keeps each attribute.
ATTRIBUTE_OFFSETS = {
    "thread_position_in_grid": 0,
    "thread_position_in_threadgroup": 3,
    "threadgroup_position_in_grid": 6,
    "threadgroups_per_grid": 9,
    "threads_per_grid": 12,
    "grid_size": 12,
    "threads_per_threadgroup": 15,
    "dispatch_threads_per_threadgroup": 15,
    "thread_index_in_threadgroup": 18,
    "simdgroup_index_in_threadgroup": 19,
    "thread_index_in_simdgroup": 20,
    "simdgroups_per_threadgroup": 21,
    "dispatch_simdgroups_per_threadgroup": 21,
    "quadgroup_index_in_threadgroup": 22,
    "thread_index_in_quadgroup": 23,
    "quadgroups_per_threadgroup": 24,
    "dispatch_quadgroups_per_threadgroup": 24,
    "thread_execution_width": 25,
    "threads_per_simdgroup": 25,
    "grid_origin": 26,
}


def _compile(source: str, function: str, target: Path) -> None:
    clang = find_clang()
    work = target.parent
    (work / "kernel.clcpp").write_text(translate(source, function))
    command = [*_front_end(), *WARNINGS.split(), "-Xclang", "-include-pch", "-Xclang", str(_prelude()[1])]
    _, warnings = _run([*command, "-S", "-emit-llvm", str(work / "kernel.clcpp"), "-o", str(work / "kernel.ll")])
    # Metal has no implicit conversion to bfloat; clang has.
    bad = [w for w in warnings.splitlines() if "source.metal" in w and re.search(r"to '(bfloat\w*|__bf16)", w)]
    if bad:
        raise CompileError("Metal doesn't convert to bfloat implicitly:\n" + "\n".join(bad))
    ir, _ = instrument((work / "kernel.ll").read_text())
    (work / "instrumented.ll").write_text(ir)
    # The front end has optimised it: machine code made in half of the time runs as fast.
    _run([*clang.command, *MACHINE.split(), "-O0", "-Xclang", "-disable-llvm-passes", "-Wno-override-module", "-c",
          str(work / "instrumented.ll"), "-o", str(work / "kernel.o")])  # fmt: skip
    _run([*clang.link, str(work / "kernel.o"), str(_runtime()), "-o", str(target)])


@functools.cache
def compile_kernel(source: str, function: str) -> ctypes.CDLL:
    """The kernel's library; raises CompileError with clang's message."""
    ctypes.CDLL("libm.so.6", ctypes.RTLD_GLOBAL)
    path = _cached(f"{_tool_hash()}\n{function}\n{source}", ".so", functools.partial(_compile, source, function))
    return ctypes.CDLL(str(path))


def sites(library: ctypes.CDLL, n: int) -> list[Site]:
    table = (ctypes.c_uint32 * (4 * n)).in_dll(library, "msl_sites")
    return [Site(*table[4 * i : 4 * i + 4]) for i in range(n)]
