"""`specmlx doctor`: right figures, advice that fits, and nothing that names whoever runs it."""

import getpass
import json
import os
import platform
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import pytest

import specmlx
from specmlx.cli.doctor import lines
from specmlx.evaluation import doctor
from specmlx.evaluation.doctor import Demo, Diagnosis, HubCache
from specmlx.evaluation.machine import MEASURED, Bandwidth, Machine

MAC = Diagnosis(
    versions={"specmlx": "0.1.0"},
    machine=Machine("macOS 26.1 arm64", "Apple M4 Pro", 48 * 2**30, 20, 14, "Metal"),
    limits={"recommended_working_set": 40_000_000_000},
    bandwidth=Bandwidth(273, "Apple's figure of M4 Pro"),
    kernels={"attention": "Metal kernel"},
    hub_cache=HubCache(2, 30_000_000_000, False),
    demo=Demo(2, 2, 60, 10, 6.0),
)


@pytest.fixture(scope="module")
def outputs(tmp_path_factory):
    """What it prints for a user with a telling name: as text after a measurement, and then as JSON."""
    home = tmp_path_factory.mktemp("home") / "rosalind-franklin"
    home.mkdir()
    names = {"HOME": str(home), "USER": "rosalind", "LOGNAME": "rosalind", "SPECMLX_CACHE": str(home / "cache")}
    return home, [
        subprocess.run(
            [sys.executable, "-m", "specmlx", "doctor", *args], capture_output=True, text=True, env=os.environ | names
        )
        for args in (["--measure"], ["--json"])
    ]


@pytest.mark.linux_bits
def test_the_demo_pair_passes_here(outputs):
    _, (text, as_json) = outputs
    assert (text.returncode, text.stderr, as_json.returncode, as_json.stderr) == (0, "", 0, "")
    found = json.loads(as_json.stdout)
    demo = found["demo"]
    assert demo["prompts"] == demo["identical"] == 2 and demo["error"] is None
    assert demo["tokens"] > demo["rounds"] > 0
    assert f"2 of 2 prompts the same with and without the drafter, {demo['tokens']} tokens" in text.stdout


def test_figures_are_the_machines(outputs):
    _, (_, as_json) = outputs
    found = json.loads(as_json.stdout)
    assert found["versions"]["specmlx"] == specmlx.__version__ and found["versions"]["mlx"] == mx.__version__
    assert found["versions"]["python"] == platform.python_version()
    assert found["machine"]["cores"] == os.cpu_count()
    folders = {path.parent.name for path in Path(specmlx.__file__).parent.glob("kernels/*/*.metal")}
    assert set(found["kernels"]) == folders
    # What the first run measured, the second one knows.
    assert found["bandwidth"]["gigabytes_per_second"] > 0 and found["bandwidth"]["source"] == MEASURED


def test_nothing_names_the_user_or_a_path(outputs):
    home, results = outputs
    for result in results:
        for secret in ("rosalind", str(home), str(Path.home()), sys.prefix, str(Path(specmlx.__file__).parent)):
            assert secret not in result.stdout
        words = result.stdout.replace('"', " ").split()
        assert getpass.getuser() not in words and platform.node() not in words
        assert not any(word.startswith(("/", "~/")) for word in words)


def test_an_error_is_told_without_its_paths():
    told = doctor._without_paths(f"no such file: {Path.home()}/models/x.safetensors in\n {os.sep}tmp{os.sep}x (cut)")
    assert told == "no such file: … in … (cut)"


def advice(**changes):
    return " ".join(replace(MAC, **changes).advice())


def test_advice_fits_the_machine():
    assert "The GPU may hold 40 GB" in advice() and "fits." in advice()
    assert "does not fit" in advice(limits={"recommended_working_set": 11_000_000_000})
    # 273 GB/s are 485 G weights a second; 4.1 T multiply-adds do 8 rows of them.
    assert "for about 8 rows a pass" in advice()
    m5 = replace(MAC.machine, chip="Apple M5 Pro")
    assert "rows a pass" not in advice(machine=m5)
    assert "doctor --measure" in advice(bandwidth=None) and "doctor --measure" not in advice()
    assert "open an issue" in advice(demo=Demo(2, 1)) and "open an issue" not in advice()
    assert "Rosetta" in advice(machine=replace(MAC.machine, backend="CPU"))
    assert "nothing about a Mac" in advice(machine=replace(MAC.machine, backend="CUDA", system="Linux 6 x86_64"))
    assert "No model has been downloaded" in advice(hub_cache=HubCache(0, 0, False))


def test_text_has_a_line_a_subject():
    found = lines(MAC)
    assert found[1] == "machine    macOS 26.1 arm64, Apple M4 Pro, 14 CPU cores, 20 GPU cores, 48.0 GiB"
    assert found[2] == "backend    Metal, recommended working set 40.0 GB"
    assert found[3] == "bandwidth  273 GB/s, Apple's figure of M4 Pro"
    assert found[4] == "kernels    attention: Metal kernel"
    assert found[5] == "Hub cache  2 models, 30.0 GB"
    assert found[6].startswith("demo pair  2 of 2 prompts the same")
