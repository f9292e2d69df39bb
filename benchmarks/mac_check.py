"""`make mac-check`: the kernels' tests on this Mac's GPU and their speed, in one file to attach to an issue."""

import json
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

import click

import specmlx
from specmlx.evaluation.machine import this_machine
from specmlx.kernels.dispatch import on_metal

sys.path.insert(0, str(Path(__file__).parent))

from kernels import measured  # noqa: E402

HERE = Path(__file__).parent.parent
TESTS = HERE / "tests" / "kernels" / "test_on_metal.py"


def run_tests() -> dict[str, str]:
    """Each test by name: passed, skipped, or the first line of its failure."""
    with tempfile.TemporaryDirectory() as work:
        report = Path(work) / "tests.xml"
        subprocess.run([sys.executable, "-m", "pytest", "-q", str(TESTS), f"--junitxml={report}"], cwd=HERE)
        if not report.exists():
            return {"pytest": "wrote no report"}
        cases = ElementTree.parse(report).iter("testcase")
        return {case.get("name"): _outcome(case) for case in cases}


def _outcome(case: ElementTree.Element) -> str:
    for kind in ("failure", "error"):
        if (found := case.find(kind)) is not None:
            return f"{kind}: {found.get('message', '').splitlines()[0][:300]}"
    return "skipped" if case.find("skipped") is not None else "passed"


@click.command()
@click.option("--out", type=click.Path(path_type=Path), default=Path("mac-check.json"), show_default=True)
@click.option("--no-speed", is_flag=True, help="Only the tests.")
def main(out: Path, no_speed: bool) -> None:
    """Run the kernels' tests on the GPU and measure their speed; write one JSON object."""
    if not on_metal():
        raise click.ClickException("mac-check needs a Mac whose GPU mlx runs on; `make test` covers the rest")
    tests = run_tests()
    report = {
        "machine": asdict(this_machine()),
        "versions": {"specmlx": specmlx.__version__, "mlx": version("mlx"), "mlx-lm": version("mlx-lm")},
        "tests": tests,
        "kernels": [] if no_speed else measured(progress=True),
    }
    out.write_text(json.dumps(report, indent=1))
    failed = {name: why for name, why in tests.items() if why not in ("passed", "skipped")}
    for name, why in failed.items():
        click.echo(f"{name}: {why}", err=True)
    click.echo(f"{len(tests) - len(failed)} of {len(tests)} tests passed; written to {out}")
    raise SystemExit(bool(failed))


if __name__ == "__main__":
    main()
