"""What an import costs and brings, and that every mlx-lm name we build on exists in the installed mlx-lm."""

import ast
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

import specmlx

SOURCE = Path(specmlx.__file__).parent


def python(*args: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, *args], capture_output=True, text=True, check=True)


def test_import_brings_no_model_library():
    heavy = ["transformers", "mlx_lm", "mlx", "numpy", "huggingface_hub"]
    code = f"import sys, specmlx; print([m for m in {heavy} if m in sys.modules])"
    assert python("-c", code).stdout.strip() == "[]"


def test_import_takes_less_than_300_ms():
    report = python("-X", "importtime", "-c", "import specmlx").stderr
    took_us = int(re.search(r"\|\s*(\d+) \| specmlx$", report, re.M).group(1))
    assert took_us < 300_000


@pytest.mark.parametrize("name", specmlx.__all__)
def test_every_public_name_resolves(name):
    assert getattr(specmlx, name) is not None
    assert name in dir(specmlx)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        specmlx.nothing  # noqa: B018


def test_the_module_runs_as_the_command():
    assert python("-m", "specmlx", "--help").stdout.startswith("Usage:")


def mlx_lm_names() -> set[tuple[str, str | None]]:
    found = set()
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "mlx_lm":
                found |= {(node.module, alias.name) for alias in node.names}
            elif isinstance(node, ast.Import):
                found |= {(a.name, None) for a in node.names if a.name.split(".")[0] == "mlx_lm"}
    return found


def test_every_mlx_lm_name_in_the_source_exists():
    names = mlx_lm_names()
    assert names, "the source uses mlx_lm somewhere; this test no longer sees it"
    missing = []
    for module, name in sorted(names, key=str):
        home = importlib.import_module(module)
        if name is not None and not hasattr(home, name):
            try:
                importlib.import_module(f"{module}.{name}")
            except ImportError:
                missing.append(f"{module}.{name}")
    assert missing == []


# A folder imports those before it, and those that share its line.
ORDER = [{"formats"}, {"kernels"}, {"cache"}, {"drafters", "targets"}, {"decoding"}, {"parallel"}, {"loading"}]
ORDER += [{"generation"}, {"evaluation"}, {"training"}, {"cli"}]


def test_imports_run_downward():
    rank = {folder: i for i, level in enumerate(ORDER) for folder in level}
    # The demo is data that is measured, and what measures it.
    assert {path.name for path in SOURCE.iterdir() if path.is_dir()} - {"__pycache__", "demo", "receipts"} == set(rank)
    upward = []
    for path in SOURCE.rglob("*.py"):
        folder = path.relative_to(SOURCE).parts[0]
        for node in ast.walk(ast.parse(path.read_text())):
            module = (node.module or "") if isinstance(node, ast.ImportFrom) else ""
            imported = module.split(".")[1] if module.startswith("specmlx.") else folder
            if folder in rank and imported in rank and rank[imported] > rank[folder]:
                upward.append(f"{path.relative_to(SOURCE)} imports {module}")
    assert upward == []
