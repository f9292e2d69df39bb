"""Bytes moved by a generation: arrays in memory against shapes and formats, and counts against hand-made ones."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from rig import EXPERTS, NEXT, generate_tokens, tiny

import specmlx
from specmlx.cache.conversation import Conversation
from specmlx.cache.quantized import KVFormat
from specmlx.decoding.draft_length import FixedLength
from specmlx.decoding.policy import Policy
from specmlx.decoding.stats import Stats
from specmlx.drafters.mtp import MTP, MTPHead
from specmlx.drafters.ngram import NGram
from specmlx.drafters.proposal import Drafter, Proposal
from specmlx.evaluation import account, machine
from specmlx.evaluation.geometry import drafter_geometry
from specmlx.evaluation.machine import MEASURED, Bandwidth, Machine, known_bandwidth
from specmlx.evaluation.roofline import Roofline
from specmlx.evaluation.tensors import Scheme, draft_groups, scheme_named
from specmlx.formats.sizes import affine

MATRICES = {
    "GDN in-projection": "GDN in-projection",
    "GDN out-projection": "GDN out-projection",
    "attention in-projection": "attention in-projection q, gate, k, v",
    "attention out-projection": "attention out-projection",
    "MLP": "SwiGLU gate, up, down",
    "LM head": "LM head",
}
# Three passes over 1 + 7, 1 + 7 and 1 row after 10, 14 and 16 rows; eight tokens left.
STATS = Stats(
    "speculative",
    rounds=3,
    proposed=14,
    accepted=5,
    generation_tokens=8,
    decode_seconds=0.5,
    context=40,
    draft_passes=2,
)


def moved(found):
    return {group.label: group for group in found.moved}


@pytest.mark.parametrize("dtype, bits", [(mx.bfloat16, None), (mx.float32, None), (mx.bfloat16, 4), (mx.float32, 8)])
def test_weights_in_memory_are_what_shapes_and_formats_say(dtype, bits):
    model = tiny(dtype=dtype, bits=bits)
    fmt = affine(bits, 32, dtype.size) if bits else scheme_named({2: "bf16", 4: "fp32"}[dtype.size]).mlp
    line = Roofline(model.config, Scheme("all", *6 * [fmt]), kv="bf16" if dtype.size == 2 else "fp32")
    groups = {group.label: group for group in line.target}
    found = moved(account(model, Stats(rounds=3, context=1)))
    for ours, theirs in MATRICES.items():
        assert (found[ours].nbytes, found[ours].times) == (groups[theirs].nbytes, 3), ours
    assert found["keys and values"].nbytes == line.kv_token_bytes
    recurrent, conv = line.state.recurrent_bytes, line.state.conv_bytes * dtype.size // 2
    assert found["GDN state, read and written"].total == 3 * 2 * (recurrent + conv)


def test_counts_become_bytes():
    model = tiny()
    found = account(model, Stats(rounds=3, proposed=14, generation_tokens=8, decode_seconds=0.5, context=40))
    groups = moved(found)
    # Two attention layers, two heads of 32, keys and values, float32: 1,024 bytes. 40 rows are read, the passes' own 17
    # are written and read.
    assert groups["keys and values"].total == 1024 * (40 + 2 * 17)
    everything = sum(x.nbytes for path, x in tree_flatten(model.parameters()) if "embed_tokens" not in path)
    others = groups["keys and values"].total + groups["GDN state, read and written"].total
    assert found.total == 3 * everything + others
    assert found.bytes_per_token == found.total / 8 and found.bytes_per_round == found.total / 3
    assert found.gigabytes_per_second == found.total / 0.5 / 1e9


@pytest.mark.parametrize("kv_bits, row", [("int8", 32 + 4), (8, 32 + 8), (4, 16 + 8)])
def test_quantized_keys_and_values_count_from_their_start_on(kv_bits, row):
    model, stats = tiny(), Stats(rounds=2, generation_tokens=2, context=200)
    for start, each in ((0, row), (64, row), (128, 4 * 32)):
        kept = KVFormat.read(kv_bits, 32, start)
        groups = moved(account(model, stats, kv_format=kept))
        assert groups["keys and values"].total == 2 * 2 * 2 * each * (200 + 2 * 2), start


def test_a_tied_embedding_is_the_head():
    model = tiny(tie_word_embeddings=True)
    groups = moved(account(model, Stats(rounds=2)))
    assert groups["LM head"].total == 2 * 96 * 64 * 4 and "token embedding" not in groups


def test_experts_count_as_many_as_the_rows_can_choose():
    model = tiny(**EXPERTS)
    nbytes = sum(x.nbytes for path, x in tree_flatten(model.parameters()) if "switch_mlp" in path)
    few, many = (moved(account(model, Stats(rounds=4, proposed=4 * width)))["experts, at most"] for width in (0, 3))
    assert few.nbytes == many.nbytes == nbytes
    # Three of eight experts a row: one row reads three eighths, four rows all.
    assert (few.times, many.times) == (4 * 3 / 8, 4)


@pytest.mark.parametrize("changes", [EXPERTS, NEXT])
def test_mixtures_in_memory_are_what_shapes_say(changes):
    model = tiny(**changes)
    line = Roofline(model.config, Scheme("all", *6 * [scheme_named("fp32").mlp], gated_norm=scheme_named("fp32").mlp))
    for lanes in (1, 2):
        # Plain decoding of so many lanes has so many rows a pass.
        found = account(model, Stats(rounds=5, proposed=5 * (lanes - 1)))
        weights = sum(
            group.total for group in found.moved if "GDN state" not in group.label and "keys" not in group.label
        )
        # Shapes count norms and convolutions as bfloat16.
        vectors = moved(found)["norms, conv taps, others"]
        ours = (weights - vectors.total) / 5 + sum(g.nbytes for g in line.target if g.kind == "small")
        assert ours == replace(line, lanes=lanes).target_bytes(drafting=False)


@pytest.mark.parametrize("name", ["demo/dflash", "demo/dspark"])
def test_a_drafter_is_read_with_the_head_once_a_proposal_and_where_it_observes(name):
    model, _ = specmlx.load(draft_model=name)
    groups = moved(account(model, STATS))
    head = model.model.embed_tokens.weight.nbytes
    assert groups["LM head, for the drafter"].total == 2 * head and groups["LM head"].total == 3 * head
    weights = draft_groups(drafter_geometry(name), scheme_named("fp32").drafter)
    ours = sum(groups[label].nbytes for label in groups if label.startswith(("draft ", "Markov")))
    # Tables that are gathered move nothing to speak of; vectors are float32 here.
    shapes = sum(4 * group.parameters for group in weights if group.reads)
    assert ours == shapes
    layers = model.draft_model.model.layers
    pair = sum(x.nbytes for layer in layers for x in (layer.self_attn.k_proj.weight, layer.self_attn.v_proj.weight))
    assert groups["draft keys and values"].total == pair * (2 + 2)
    assert groups["draft context projection"].times == 2
    if name == "demo/dspark":
        assert groups["Markov W2"].times == 14


def test_a_drafter_that_seldom_proposes_reads_what_it_missed_once():
    class Counting:
        observed = 0

        def __init__(self, drafter: Drafter, vocab_size: int):
            self.new_context, self.tap_ids, self.max_width = drafter.new_context, drafter.tap_ids, drafter.max_width
            self.drafter, self.vocab_size = drafter, vocab_size

        def propose(self, *args) -> Proposal:
            return Proposal((self.drafter.propose(*args).tokens + 1) % self.vocab_size)

        def observe(self, *args) -> None:
            self.observed += 1
            self.drafter.observe(*args)

    class Seldom(FixedLength):
        rounds = 0

        def choose(self) -> int:
            self.rounds += 1
            return 0 if self.rounds % 10 else self.most

    model, _ = specmlx.load()
    by, stats = Counting(model.draft_model, model.vocab_size), Stats()
    options = dict(stats=stats, max_tokens=45, lookahead=False)
    given = generate_tokens(model, Conversation(model.new_states()), [5, 6, 7], Policy(), by, Seldom(8), **options)
    assert len([*given]) == 45 and stats.draft_passes == by.observed == 4
    assert moved(account(model, stats))["draft context projection"].times == 4
    assert account(model, stats, drafter=by).left_out == "what the drafter reads"
    assert account(model, stats).left_out is account(model, stats, drafter=NGram()).left_out is None


def test_a_shortlist_is_the_head_that_a_drafter_reads(tmp_path):
    file = tmp_path / "frequencies.json"
    file.write_text(json.dumps(list(range(64))))
    model, _ = specmlx.load(draft_model="demo/dspark", draft_vocab=64, draft_vocab_file=str(file), draft_markov_top_k=8)
    groups = moved(account(model, STATS))
    assert groups["draft head"].total == 2 * 64 * 128 * 4
    assert "LM head, for the drafter" not in groups and "Markov W2" not in groups


def test_an_mtp_head_is_read_with_the_head_once_a_slot():
    model = tiny()
    drafter = MTP(MTPHead(model.config), model)
    groups = moved(account(model, STATS, drafter=drafter))
    assert groups["LM head, for the drafter"].total == 14 * model.language_model.lm_head.weight.nbytes
    fc, layer = drafter.model.fc.weight.nbytes, drafter.model.layers[0]
    pair = layer.self_attn.k_proj.weight.nbytes + layer.self_attn.v_proj.weight.nbytes
    everything = sum(x.nbytes for _, x in tree_flatten(drafter.model.parameters()))
    assert groups["draft context projection"].total == fc * (14 + 2)
    assert groups["draft keys and values"].total == pair * (14 + 2)
    assert groups["draft layers"].total == (everything - fc - pair) * 14


def test_plain_decoding_moves_no_drafter():
    model, _ = specmlx.load()
    labels = moved(account(model, Stats(rounds=5, generation_tokens=5, decode_seconds=1.0)))
    assert not any("draft" in label or "Markov" in label for label in labels)


def test_the_share_of_the_bus_needs_a_bandwidth():
    model = tiny()
    found = account(model, STATS, bandwidth=Bandwidth(2.0, "given"), drafter=object())
    assert found.share == pytest.approx(found.total / 0.5 / 2e9)
    assert found.ceiling(2.0) == pytest.approx(2e9 / found.bytes_per_token)


def test_a_bandwidth_is_the_measured_one_else_apples_else_unknown(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECMLX_CACHE", str(tmp_path / "none" / "yet"))
    mac = Machine("macOS 26.1 arm64", "Apple M5 Max", 2**36, 40, 18, "Metal")
    other = Machine("Linux 6.1 x86_64", "Some CPU", 2**36, None, 2, "CPU")
    assert known_bandwidth(mac) == Bandwidth(614, "Apple's figure of M5 Max 40-core")
    assert known_bandwidth(other) is None
    measured = machine.measure_bandwidth(2**20, seconds=0)
    assert measured.gigabytes_per_second > 0
    assert known_bandwidth() == measured == Bandwidth(measured.gigabytes_per_second, MEASURED)
    kept = machine.cache_file()
    assert list(json.loads(kept.read_text())) == [machine.this_machine().key]
    for damaged in ("{broken", json.dumps({other.key: math.inf})):
        kept.write_text(damaged)
        assert known_bandwidth(other) is None
    # Where it can't be kept, it is told all the same.
    monkeypatch.setenv("SPECMLX_CACHE", str(kept))
    assert machine.measure_bandwidth(2**20, seconds=0).gigabytes_per_second > 0


def test_gpu_cores_are_read_from_ioreg():
    assert machine.gpu_cores_of('    "gpu-core-count" = 40\n    "IOClass" = "AGXAcceleratorG16X"\n') == 40
    assert machine.gpu_cores_of("") is None


@pytest.mark.linux_bits
def test_the_documentation_shows_what_its_program_prints(capsys):
    text = (Path(__file__).parents[2] / "docs" / "receipts.md").read_text(encoding="utf-8")
    ((program, shown),) = re.findall(r"```python\n(.+?)\n```\n\n```\n(.+?)\n```", text, re.S)
    exec(program, {})
    assert capsys.readouterr().out.rstrip() == shown
