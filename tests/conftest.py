"""Settings that must stand before mlx is imported, and the one comparison that depends on the machine."""

import os
import sys
import tempfile

# mx.compile writes C++ into the temporary folder under names that do not depend on the process: two worker
# processes would read each other's half-written files. The tests that need the compiled path switch it on.
os.environ.setdefault("MLX_DISABLE_COMPILE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
if "PYTEST_XDIST_WORKER" in os.environ:
    _own = tempfile.TemporaryDirectory(prefix="specmlx-test-", ignore_cleanup_errors=True)
    os.environ["TMPDIR"] = _own.name

# What is measured of rounds stays out of the user's cache directory, and nothing is measured unless a test wants it.
os.environ["SPECMLX_CALIBRATE"] = "0"
os.environ["SPECMLX_CACHE"] = os.path.join(tempfile.gettempdir(), f"specmlx-test-cache-{os.getpid()}")

import numpy as np
import pytest


def pytest_configure(config):
    config.addinivalue_line("markers", "linux_bits: asserts equal bits; skipped elsewhere than on Linux")
    config.addinivalue_line("markers", "slow: more cases of what other tests run too; runs with -m slow only")
    config.addinivalue_line("markers", "real_file: needs a download from PyPI; runs with -m real_file only")
    config.addinivalue_line("markers", "alone: is about a conversation alone in its batch")


def pytest_generate_tests(metafunc):
    if "batch_size" in metafunc.fixturenames:
        alone = metafunc.definition.get_closest_marker("alone")
        metafunc.parametrize("batch_size", [1] if alone else [1, 3], indirect=True)


@pytest.fixture
def batch_size(request, monkeypatch):
    """How many sequences a scripted conversation is decoded with: itself alone, then two others beside it."""
    from scripted import Run

    monkeypatch.setattr(Run, "batch_size", request.param)
    return request.param


def pytest_collection_modifyitems(items):
    if sys.platform == "linux":
        return
    for item in items:
        if "linux_bits" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="bits are promised by the Linux CPU backend only"))


def _numpy(x) -> np.ndarray:
    if isinstance(x, np.ndarray):
        return x
    import mlx.core as mx

    # numpy has no bfloat16; widening to float32 keeps every bit of it.
    x = mx.array(x)
    return np.array(x.astype(mx.float32) if x.dtype == mx.bfloat16 else x)


@pytest.fixture
def bit_exact():
    """`bit_exact(got, want, atol=1e-4)`: the same dtype, shape and bits on Linux; elsewhere within atol."""

    def check(got, want, atol: float = 1e-4):
        assert getattr(got, "dtype", None) == getattr(want, "dtype", None), (got.dtype, want.dtype)
        got, want = _numpy(got), _numpy(want)
        assert got.shape == want.shape, (got.shape, want.shape)
        if sys.platform == "linux":
            same = np.frombuffer(got.tobytes(), np.uint8) == np.frombuffer(want.tobytes(), np.uint8)
            if not same.all():
                gap = np.abs(got.astype(np.float64) - want.astype(np.float64))
                at = np.unravel_index(np.nanargmax(gap), gap.shape)
                n = int((got != want).sum())
                raise AssertionError(f"{n} of {got.size} values differ, most at {at}: {got[at]}, {want[at]}")
        else:
            np.testing.assert_allclose(got.astype(np.float64), want.astype(np.float64), rtol=0, atol=atol)

    return check


@pytest.fixture(scope="session")
def demo_directory(tmp_path_factory):
    """The demo pair as a user's model directory in float32, whose config names its DSpark drafter."""
    from specmlx.demo.export import write_demo

    return write_demo(tmp_path_factory.mktemp("demo-float32"))
