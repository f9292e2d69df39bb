"""The choice of kernels: real races in real child processes, of operators that misbehave."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from pkgutil import resolve_name

import fake_operators
import mlx.core as mx
import msl
import pytest
import rig
from click.testing import CliRunner

from specmlx.cli import main
from specmlx.kernels import dispatch
from specmlx.kernels.choice import child
from specmlx.kernels.choice.operator import FIXED, STOCK
from specmlx.kernels.choice.operators import GATED_DELTA_PREFILL, OPERATORS, QUANTIZED_MATMUL
from specmlx.kernels.choice.race import NoRace, interpreter, race
from specmlx.kernels.choice.table import Outcome, Table, entry_name
from specmlx.kernels.chosen import choose_kernels
from specmlx.kernels.dispatch import Chooser

KEY = {"N": 32, "K": 16}


@pytest.fixture
def file(tmp_path):
    return tmp_path / "kernels.json"


def chooser(file, chip="Apple M99", **options):
    def quick_race(operator, key):
        return race(operator, key, seconds=2.0)

    return Chooser(table=Table.read(file, chip), race=options.pop("race", quick_race), available=True, **options)


def no_race(operator, key):
    raise AssertionError(f"{operator.name} {key} is raced again")


def test_the_fastest_correct_kernel_is_chosen_and_kept(file):
    assert str(chooser(file).choose(fake_operators.quick, KEY)) == "quick"
    assert str(chooser(file, race=no_race).choose(fake_operators.quick, KEY)) == "quick"


def test_a_kernel_that_loses_the_race_leaves_stock(file):
    choice = chooser(file).choose(fake_operators.slow, KEY)
    assert [choice.variant(rows) for rows in (1, 8, 32, 33)] == [STOCK] * 4


@pytest.mark.parametrize(
    "name, why",
    [
        ("wrong", "wrong by .* for 4 rows"),
        ("broken", "unknown type name 'bfloot'"),
        ("hangs", "hangs"),
        ("dies", "with 3"),
    ],
)
def test_a_kernel_that_misbehaves_is_dropped_with_one_warning(file, name, why):
    with pytest.warns(UserWarning, match=f"kernel {name} of fake .* is not used on Apple M99: .*{why}") as warned:
        assert str(chooser(file).choose(getattr(fake_operators, name), KEY)) == STOCK
    assert len(warned) == 1
    assert str(chooser(file, race=no_race).choose(getattr(fake_operators, name), KEY)) == STOCK


def test_a_kernel_that_hangs_does_not_take_the_others_with_it(file):
    with pytest.warns(UserWarning, match="kernel hangs"):
        assert str(chooser(file).choose(fake_operators.hangs_quick, KEY)) == "quick"


def test_a_kernel_whose_fault_loses_the_device_does_not_take_the_others_with_it(file):
    with pytest.warns(UserWarning, match="kernel faults .* GPU Timeout") as warned:
        assert str(chooser(file).choose(fake_operators.faults_quick, KEY)) == "quick"
    assert len(warned) == 1


def test_an_operator_of_mlxs_that_is_checked_and_wrong_leaves_a_slower_kernel_of_ours(file):
    with pytest.warns(UserWarning, match="kernel stock of fake .* is not used on Apple M99: wrong by 0.001") as warned:
        assert str(chooser(file).choose(fake_operators.stock_slow, KEY)) == "slow"
    assert len(warned) == 1
    assert str(chooser(file, race=no_race).choose(fake_operators.stock_slow, KEY)) == "slow"


@pytest.mark.parametrize(
    "damage", ["cut", "of another version", "of another chip", "a list", "deeply nested", "a string for seconds"]
)
def test_a_table_that_can_not_be_used_is_made_anew(file, damage):
    races = []

    def counted(operator, key):
        races.append(key)
        return Outcome({32: {"quick": 1.0, STOCK: 2.0}})

    chooser(file, race=counted).choose(fake_operators.quick, KEY)
    text = file.read_text()
    edited = {
        "cut": text[: len(text) // 2],
        "of another version": text.replace("specmlx ", "specmlx 0."),
        "of another chip": text.replace("Apple M99", "Apple M1"),
        "a list": "[]",
        "deeply nested": "[" * 200_000,
        "a string for seconds": text.replace("1.0", '"soon"'),
    }[damage]
    assert edited != text
    file.write_text(edited)
    assert str(chooser(file, race=counted).choose(fake_operators.quick, KEY)) == "quick"
    assert len(races) == 2
    assert file.read_text() == text


def test_row_counts_may_have_different_kernels_unless_consistent(file):
    outcome = Outcome({1: {"quick": 3.0, STOCK: 1.0}, 4: {"quick": 1.0, STOCK: 2.0}, 32: {"quick": 4.0, STOCK: 9.0}})
    choice = chooser(file, race=lambda *_: outcome).choose(fake_operators.quick, KEY)
    assert str(choice) == "1: stock, 2-32: quick"
    consistent = chooser(file, race=no_race, consistent=True).choose(fake_operators.quick, KEY)
    assert [consistent.variant(rows) for rows in (1, 32, 8 * 17)] == ["quick"] * 3


def test_consistent_leaves_out_kernels_whose_order_depends_on_the_rows(file):
    operator = fake_operators.Fake("other")
    outcome = Outcome({1: {"quick": 1.0, "other": 2.0, STOCK: 3.0}})
    assert str(chooser(file, race=lambda *_: outcome, consistent=True).choose(operator, KEY)) == "other"


def test_of_an_operator_that_is_not_raced_the_first_right_kernel_serves_all_row_counts(file):
    assert str(chooser(file).choose(fake_operators.checked_slow, KEY)) == "slow"
    with pytest.warns(UserWarning, match="kernel wrong of fake"):
        assert str(chooser(file).choose(fake_operators.checked_wrong_quick, {**KEY, "N": 64})) == "quick"
        assert str(chooser(file).choose(fake_operators.checked_wrong, {**KEY, "N": 128})) == STOCK
    assert not any(outcome.seconds for outcome in Table.read(file, "Apple M99").entries.values())
    kept = chooser(file, race=no_race)
    assert str(kept.choose(fake_operators.checked_wrong_quick, {**KEY, "N": 64})) == "quick"


@pytest.fixture
def on_this_chip(monkeypatch):
    """Let `dispatch` ask this chooser, as on a Metal device."""

    def ask(chooser: Chooser) -> None:
        dispatch.serves.cache_clear()
        monkeypatch.setattr(dispatch, "_chooser", lambda: chooser)

    monkeypatch.setattr(dispatch, "on_metal", lambda: True)
    yield ask
    dispatch.serves.cache_clear()


def refusal(chooser: Chooser) -> str:
    model = rig.tiny(dtype=mx.bfloat16, num_hidden_layers=2, full_attention_interval=2, head_dim=64)
    with pytest.raises(ValueError, match="^consistent can't be had: the kernel of attention ") as raised:
        choose_kernels(model, mx.bfloat16, chooser)
    return str(raised.value)


@pytest.mark.filterwarnings("ignore:kernel")
def test_consistent_without_a_kernel_is_refused_or_mlx_held_to_one_number_of_rows(file, on_this_chip):
    key, asked = KEYS["quantized_matmul"], []

    def lost(operator, key):
        asked.append(operator.name)
        return Outcome({}, dict.fromkeys(operator.variants(key), "hangs"))

    losing = chooser(file, race=lost, consistent=True)
    on_this_chip(losing)
    assert str(losing.choose(QUANTIZED_MATMUL, key)) == FIXED
    assert refusal(losing).endswith("is not used on Apple M99: hangs")
    assert dispatch.kernel("accept", {"dtype": mx.float32}) is dispatch.kernel("accept", {"dtype": mx.float32}) is None
    assert asked.count("accept") == 1
    on_this_chip(chooser(file.with_name("right.json"), race=lambda *_: Outcome()))
    assert dispatch.kernel("accept", {"dtype": mx.float32}) is mx.fast.metal_kernel
    assert dispatch.kernel("gated_delta_prefill", {"Hk": 1, "Hv": 2, "Dk": 64, "Dv": 32, "dtype": mx.float32}) is None


def test_everything_can_be_switched_off(file, monkeypatch, on_this_chip):
    monkeypatch.setenv("SPECMLX_KERNELS", "0")
    assert str(chooser(file, race=no_race).choose(fake_operators.quick, KEY)) == STOCK
    consistent = chooser(file, race=no_race, consistent=True)
    on_this_chip(consistent)
    assert str(consistent.choose(fake_operators.quick, KEY)) == FIXED
    assert dispatch.kernel("accept", {"dtype": mx.float32}) is None and dispatch.metal_factory() is None
    assert refusal(consistent).endswith("is off: SPECMLX_KERNELS=0")
    monkeypatch.delenv("SPECMLX_KERNELS")
    consistent.table.off.append("attention")
    assert refusal(consistent).endswith("switched off (specmlx kernels --on attention undoes it)")


def test_what_others_have_written_meanwhile_is_kept(file):
    outcome = Outcome({32: {"quick": 1.0, STOCK: 2.0}})
    early, late = (chooser(file, race=lambda *_: outcome) for _ in range(2))
    early.choose(fake_operators.quick, KEY)
    Table.read(file, "Apple M99").switch("experts", off=True)
    late.choose(fake_operators.quick, {**KEY, "N": 64})
    kept = Table.read(file, "Apple M99")
    assert len(kept.entries) == 2 and kept.off == ["experts"]


ALONE = """
import sys, fake_operators
from specmlx.kernels.choice.race import NoRace, interpreter, race
outcome = race(fake_operators.quick, {"N": 32, "K": 16}, rows=(1,))
print("ran", *outcome.dropped, file=sys.stderr)
"""


@pytest.mark.parametrize("way", ["-c", "-", "script.py"])
def test_a_race_starts_from_a_command_a_pipe_and_a_script_without_a_guard(way, tmp_path):
    # Files beside the user's own that are named like modules, and a site that prints.
    (tmp_path / "queue.py").write_text("raise SystemExit('imported')")
    (tmp_path / "script.py").write_text(ALONE)
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text("print(1); print('hello')")
    path = os.pathsep.join([str(tmp_path / "site"), str(Path(__file__).parents[1]), *sys.path])
    command = [sys.executable, "-P", way, *([ALONE] if way == "-c" else [])]
    options = {"cwd": tmp_path, "env": {**os.environ, "PYTHONPATH": path}, "input": ALONE, "text": True}
    done = subprocess.run(command, capture_output=True, **options)
    assert done.returncode == 0 and done.stderr.split() == ["ran"], done.stderr


def test_where_no_race_can_be_held_mlx_serves_and_nothing_is_kept(file):
    tries = []

    def none(operator, key):
        tries.append(key)
        raise NoRace("the process that checks them can't be started")

    choosing = chooser(file, race=none)
    with pytest.warns(UserWarning, match="not checked before are not used: .* can't be started") as warned:
        assert [str(choosing.choose(fake_operators.quick, {**KEY, "N": n})) for n in (8, 16)] == [STOCK] * 2
    assert len(warned) == len(tries) == 1 and not file.exists()
    known = Outcome({32: {"quick": 1.0, STOCK: 2.0}})
    chooser(file, race=lambda *_: known).choose(fake_operators.quick, KEY)
    with pytest.warns(UserWarning, match="can't be started"):
        assert str(chooser(file, race=none).race_again(fake_operators.quick, KEY)) == "quick"
    with pytest.raises(NoRace, match="No module named 'nowhere'"):
        race(replaced_address("nowhere:quick"), KEY)
    for executable, frozen in (
        (sys.executable, True),
        ("/Applications/Chat.app/Contents/MacOS/Chat", False),
        ("", False),
    ):
        with pytest.raises(NoRace, match="an app"):
            interpreter(executable, frozen)


def replaced_address(address: str) -> fake_operators.Fake:
    operator = fake_operators.Fake("quick")
    operator.address = address
    return operator


def test_an_operator_can_be_switched_off_for_good(file):
    table = Table.read(file, "Apple M99")
    table.switch("fake", off=True)
    assert str(chooser(file, race=no_race).choose(fake_operators.quick, KEY)) == STOCK
    file.write_text(file.read_text().replace("specmlx ", "specmlx 0."))
    assert Table.read(file, "Apple M99").off == ["fake"]


def test_a_table_that_can_not_be_written_is_no_error(tmp_path):
    (tmp_path / "file").write_text("")
    outcome = Outcome({32: {"quick": 1.0, STOCK: 2.0}})
    choice = chooser(tmp_path / "file" / "kernels.json", race=lambda *_: outcome).choose(fake_operators.quick, KEY)
    assert str(choice) == "quick"


def test_where_there_is_no_metal_device_mlx_serves():
    assert (
        str(Chooser(table=Table.read(chip="none"), race=no_race, available=False).choose(fake_operators.quick, KEY))
        == STOCK
    )


KEYS = {
    "quantized_matmul": {"N": 40, "K": 320, "mode": "affine", "bits": 4, "group_size": 64, "dtype": "bfloat16"},
    "gate_up": {"N": 40, "K": 320, "mode": "affine", "bits": 4, "group_size": 64, "dtype": "bfloat16"},
    "experts": {"E": 6, "N": 48, "K": 128, "mode": "affine", "bits": 4, "group_size": 64, "dtype": "bfloat16"},
    "gated_delta": {"Hk": 1, "Hv": 2, "Dk": 64, "Dv": 32, "dtype": "bfloat16"},
    "gated_delta_prefill": {"Hk": 1, "Hv": 2, "Dk": 64, "Dv": 32, "dtype": "float32"},
    "attention": {"Hq": 6, "Hkv": 2, "D": 64, "kv": "int8", "dtype": "bfloat16"},
    "draft_head": {"dtype": "bfloat16"},
    "accept": {"dtype": "bfloat16"},
}


@pytest.mark.parametrize("operator", OPERATORS, ids=lambda operator: operator.name)
def test_every_kernel_passes_the_check_and_the_row_counts_can_be_timed(operator):
    key = KEYS[operator.name]
    variants = list(operator.variants(key))
    simulated = replace(operator, factory=msl.Simulator().metal_kernel)
    assert resolve_name(operator.address) is operator
    assert child.check(simulated, key, (1, 16), variants) == variants
    for rows in operator.rows if operator.raced else ():
        assert operator.run(STOCK, operator.inputs(key, rows, seed=0, exact=False)).size


def test_a_wrong_kernel_does_not_pass_the_check():
    def off_by_a_little(**made):
        kernel = msl.Simulator(strict=False).metal_kernel(**made)
        return lambda **call: [x + 1 for x in kernel(**call)]

    for operator in OPERATORS:
        key = KEYS[operator.name]
        wrong = replace(operator, factory=off_by_a_little)
        ours = [variant for variant in operator.variants(key) if variant != STOCK]
        assert child.check(wrong, key, (4,), ours) == []


def test_mlxs_delta_rule_does_not_pass_the_check_in_tf32():
    def tf32(x):
        return ((x.view(mx.uint32) + 0x1000) & 0xFFFFE000).view(mx.float32)

    class OnTensorUnits(type(GATED_DELTA_PREFILL)):
        def run(self, variant, inputs):
            S, q, k, *rest = inputs
            return super().run(variant, (S, tf32(q), tf32(k), *rest) if variant == STOCK else inputs)

    for operator, right in ((GATED_DELTA_PREFILL, [STOCK]), (OnTensorUnits(), [])):
        assert child.check(operator, KEYS["gated_delta_prefill"], (24,), [STOCK]) == right


def kernels(*args):
    return CliRunner().invoke(main, ["kernels", *args])


def test_the_command_shows_what_is_kept_and_switches_operators_off(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECMLX_CACHE", str(tmp_path))
    monkeypatch.setenv("SPECMLX_KERNELS", "0")
    assert "No shape has been raced yet" in kernels().stdout
    table = Table.read()
    name = entry_name(QUANTIZED_MATMUL, KEY)
    table.entries[name] = Outcome({1: {"A": 2e-6, STOCK: 1e-6}, 32: {"A": 1e-6, STOCK: 3e-6}}, {"V": "hangs"})
    table.write()
    shown = json.loads(kernels("--json").stdout)
    assert shown["shapes"] == [
        {
            "operator": "quantized_matmul",
            "shape": KEY,
            "choice": STOCK,
            "microseconds": {"1": {"A": 2.0, STOCK: 1.0}, "32": {"A": 1.0, STOCK: 3.0}},
            "dropped": {"V": "hangs"},
        }
    ]
    assert "not V: hangs" in kernels("--off", "quantized_matmul").stdout
    assert Table.read().off == ["quantized_matmul"]
    assert kernels("--on", "quantized_matmul").exit_code == 0 and Table.read().off == []
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SPECMLX_CACHE", str(tmp_path / "file"))
    lost = kernels("--off", "experts")
    assert (lost.exit_code, lost.stderr.count("\n")) == (2, 1) and str(tmp_path / "file") in lost.stderr
    unknown = kernels("--off", "softmax")
    assert (unknown.exit_code, unknown.stderr.count("\n")) == (2, 1) and "quantized_matmul" in unknown.stderr
