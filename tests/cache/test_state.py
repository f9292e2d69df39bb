"""Deferred commit: whatever is accepted, the state is that of mlx-lm's model stepped over the accepted rows."""

import copy
import random

import mlx.core as mx
import pytest
from rig import by_steps, in_rounds, leaves, mlx_lm_twin, prefilled, same_bits, stock_leaves, tiny, tokens

from specmlx.cache.kv import KV
from specmlx.cache.layers import LayerStates, Origin
from specmlx.cache.recurrent import Recurrent

# Two layers of each kind.
SMALL = dict(num_hidden_layers=4, full_attention_interval=2)
IDS = tokens(11, 48)[0].tolist()
BASE = 5

pytestmark = pytest.mark.linux_bits


class Stepped:
    """A model, and what mlx-lm's has after each of IDS: `leaves[n]` after n of them, `logits[n]` behind IDS[n]."""

    def __init__(self, dtype: mx.Dtype, ids: list[int] = IDS, **changes):
        self.model = tiny(0, dtype, **SMALL, **changes)
        self.ids = ids
        twin = mlx_lm_twin(self.model, **SMALL, **changes)
        caches = twin.make_cache()
        self.leaves, self.logits = [leaves(self.model.new_states())], []
        for token in ids:
            self.logits += by_steps(twin, caches, [token])
            # Copies, since mlx-lm writes its keys in place.
            self.leaves.append([mx.array(x) for x in stock_leaves(caches)])
            mx.eval(self.leaves[-1])

    def base(self) -> LayerStates:
        """States with the first BASE rows in, the last of them on a tape."""
        states = self.model.new_states()
        in_rounds(self.model, states, self.ids[:BASE], seed=0, most=4)
        return states

    def verify(self, states: LayerStates, start: int, T: int):
        verified = self.model.verify(states, mx.array([self.ids[start : start + T]], dtype=mx.int32))
        states.evaluate()
        return verified


@pytest.fixture(scope="module", params=[mx.float32, mx.bfloat16], ids=["fp32", "bf16"])
def stepped(request):
    return Stepped(request.param)


def poison(states: LayerStates, counts: list[int], length: list[int]) -> None:
    """NaN in all that must not count: tape rows and keys from each lane's count on. Values may be anything finite."""

    def spoil(x: mx.array, axis: int, first: list[int], bad: float) -> mx.array:
        shape = [1] * x.ndim
        shape[axis] = x.shape[axis]
        beyond = mx.arange(x.shape[axis]).reshape(shape) >= mx.array(first).reshape(-1, *[1] * (x.ndim - 1))
        return mx.where(beyond, mx.array(bad, dtype=x.dtype), x)

    for i, layer in enumerate(states.layers):
        if isinstance(layer, KV):
            states.layers[i] = KV(spoil(layer.keys, 2, length, mx.nan), spoil(layer.values, 2, length, 77.0))
        else:
            tape = type(layer.tape)(*(spoil(x, 1, counts, mx.nan) for x in layer.tape))
            states.layers[i] = layer._replace(tape=tape, conv_rows=spoil(layer.conv_rows, 1, counts, mx.nan))


def as_int(n: int) -> int:
    return n


def on_device(n: int) -> mx.array:
    return mx.array([n], dtype=mx.int32)


@pytest.mark.parametrize("as_count", [as_int, on_device])
def test_any_number_of_rows_of_any_pass_can_enter_and_more_can_follow(stepped, as_count):
    base = stepped.base()
    for width in range(1, 17):
        states = copy.copy(base)
        stepped.verify(states, BASE, width + 1)
        for n in range(width + 2):
            states.commit(as_count(n))
            assert same_bits(leaves(states), stepped.leaves[BASE + n]), (width, n)


@pytest.mark.parametrize("as_count", [as_int, on_device])
@pytest.mark.parametrize("T", [2, 4, 5, 17])
def test_rows_that_did_not_enter_are_never_seen_again(stepped, as_count, T):
    base = stepped.base()
    for n in range(T + 1):
        states = copy.copy(base)
        verified = stepped.verify(states, BASE, T)
        assert same_bits(list(verified.logits[0]), stepped.logits[BASE : BASE + T])
        states.commit(as_count(n))
        poison(states, [n], [BASE + n])
        for start in (BASE + n, BASE + n + 3):
            verified = stepped.verify(states, start, 3)
            assert same_bits(list(verified.logits[0]), stepped.logits[start : start + 3]), n
            states.commit(3)
        assert same_bits(leaves(states), stepped.leaves[BASE + n + 6]), n


@pytest.mark.parametrize("kernel", [2, 4, 8])
def test_counts_smaller_than_the_conv_window_keep_its_older_rows(kernel):
    stepped = Stepped(mx.float32, IDS[:24], linear_conv_kernel_dim=kernel)
    for most in (1, 2, 3, 9):
        states = stepped.model.new_states()
        assert same_bits(in_rounds(stepped.model, states, stepped.ids, seed=most, most=most), stepped.logits)
        assert same_bits(leaves(states), stepped.leaves[24])


@pytest.mark.parametrize("as_count", [as_int, on_device])
def test_rounds_go_on_across_the_end_of_the_key_buffers(stepped, as_count):
    model, ids = stepped.model, stepped.ids[:30]
    start = tokens(12, 245)
    one_by_one = prefilled(model, start)
    want = in_rounds(model, one_by_one, ids, seed=1, most=1)
    states, at = prefilled(model, start), 0
    for T, n in ((4, 3), (7, 2), (9, 5), (3, 1), (17, 4), (9, 9), (6, 6)):
        verified = model.verify(states, mx.array([(ids + [0] * 17)[at : at + T]], dtype=mx.int32))
        states.evaluate()
        states.commit(as_count(n))
        poison(states, [n], [245 + at + n])
        assert same_bits(list(verified.logits[0, :n]), want[at : at + n]), T
        at += n
    assert at == 30 and same_bits(leaves(states), leaves(one_by_one))


def test_counts_that_nobody_has_read_give_the_same_bits(stepped):
    rng = random.Random(3)
    states, logits, at = stepped.base(), [], BASE
    for _ in range(6):
        T = rng.randint(2, 6)
        n = rng.randint(1, T)
        rows = stepped.ids[at : at + n] + [rng.randrange(96) for _ in range(T - n)]
        verified = stepped.model.verify(states, mx.array([rows], dtype=mx.int32))
        # The count hangs on the pass itself, as the accepted count of a round does: nothing is evaluated in this loop.
        unread = (verified.logits[:, 0, 0] * 0).astype(mx.int32) + n
        states.commit(unread)
        logits.append(verified.logits[0, :n])
        at += n
    assert same_bits([mx.concatenate(logits)], [mx.stack(stepped.logits[BASE:at])])
    assert states.length.item() == at
    assert same_bits(leaves(states), stepped.leaves[at])


def test_a_count_is_not_read_before_the_next_pass_is_evaluated(stepped):
    states = stepped.base()
    stepped.verify(states, BASE, 4)
    # Whoever reads it, raises.
    states.commit(mx.linalg.inv(mx.zeros((1, 1)), stream=mx.cpu)[0].astype(mx.int32))
    stepped.model.verify(states, mx.array([[1, 2]], dtype=mx.int32))
    with pytest.raises(RuntimeError, match="Inverse"):
        states.evaluate()


@pytest.mark.parametrize("as_counts", [list, lambda counts: mx.array(counts, dtype=mx.int32)])
def test_lanes_with_different_counts_are_as_if_each_were_alone(stepped, as_counts):
    lanes = [stepped, Stepped(stepped.model.model.norm.weight.dtype, IDS[:20][::-1])]
    states = stepped.model.new_states(batch=2)
    at = [0, 0]
    for T, counts in ((4, [4, 1]), (3, [0, 3]), (5, [2, 2]), (1, [1, 0]), (6, [6, 5]), (2, [1, 2])):
        rows = [lane.ids[a : a + T] for lane, a in zip(lanes, at, strict=True)]
        verified = stepped.model.verify(states, mx.array(rows, dtype=mx.int32))
        states.evaluate()
        for b, lane in enumerate(lanes):
            assert same_bits(list(verified.logits[b]), lane.logits[at[b] : at[b] + T]), (T, b)
        states.commit(as_counts(counts))
        at = [a + n for a, n in zip(at, counts, strict=True)]
        poison(states, counts, at)
        for b, lane in enumerate(lanes):
            assert same_bits(leaves(states, b), lane.leaves[at[b]]), (T, b)


class Layer:
    """Stands for a decoder layer that fails: while the pass is built, or when it is evaluated."""

    def __init__(self, layer, when: str):
        self.layer = layer
        self.when = when
        self.is_linear = layer.is_linear
        self.linear_attn = layer.linear_attn if layer.is_linear else None
        self.self_attn = None if layer.is_linear else layer.self_attn

    def __call__(self, x, mixer):
        h, state = self.layer(x, mixer)
        if self.when == "built":
            # The layers before it have been computed, keys and values written and all.
            mx.eval(h)
            raise ArithmeticError("a layer failed")
        singular = mx.linalg.inv(mx.zeros((2, 2)), stream=mx.cpu)
        return h + singular.sum().astype(h.dtype), state


class failing:
    """The model with one of its layers failing, for a while."""

    def __init__(self, model, index: int, when: str = "built"):
        self.layers, self.index = model.model.layers, index
        self.layer = Layer(self.layers[index], when)

    def __enter__(self):
        self.layers[self.index], self.layer = self.layer, self.layers[self.index]

    def __exit__(self, *_):
        self.layers[self.index] = self.layer


@pytest.mark.parametrize("index", range(4))
def test_a_layer_that_raises_leaves_the_state_as_it_was(stepped, index):
    states = stepped.base()
    with failing(stepped.model, index), pytest.raises(ArithmeticError):
        stepped.verify(states, BASE, 5)
    assert same_bits(leaves(states), stepped.leaves[BASE])
    with failing(stepped.model, index), pytest.raises(ArithmeticError):
        list(stepped.model.prefill(states, mx.array([IDS])))
    assert states.length == BASE and same_bits(leaves(states), stepped.leaves[BASE])
    assert same_bits(list(stepped.verify(states, BASE, 3).logits[0]), stepped.logits[BASE : BASE + 3])


def test_what_fails_between_verify_and_commit_leaves_the_state_as_it_was(stepped):
    states = stepped.base()
    stepped.verify(states, BASE, 5)
    states.abort()
    assert states.length == BASE and same_bits(leaves(states), stepped.leaves[BASE])
    stepped.model.verify(states, mx.array([[0] * 300], dtype=mx.int32))
    # Never evaluated, and larger than the buffers.
    states.abort()
    assert same_bits(leaves(states), stepped.leaves[BASE])
    states.abort()
    assert same_bits(list(stepped.verify(states, BASE, 4).logits[0]), stepped.logits[BASE : BASE + 4])
    states.commit(2)
    states.abort()
    assert same_bits(leaves(states), stepped.leaves[BASE + 2])


class Interrupted(LayerStates):
    """States whose second evaluation is interrupted."""

    evaluations = 0

    def evaluate(self, *arrays):
        super().evaluate(*arrays)
        self.evaluations += 1
        if self.evaluations == 2:
            raise KeyboardInterrupt


def test_an_interrupted_prefill_keeps_its_whole_steps(stepped):
    states = Interrupted(stepped.model.new_states().layers)
    ids = tokens(5, 200)
    with pytest.raises(KeyboardInterrupt):
        list(stepped.model.prefill(states, ids, step_size=64))
    assert states.length == 64
    list(stepped.model.prefill(states, ids[:, 64:]))
    assert same_bits(leaves(states), leaves(prefilled(stepped.model, ids)))


def test_misuse_is_refused_before_anything_changes(stepped):
    states = stepped.model.new_states()
    with pytest.raises(RuntimeError, match="nothing to commit"):
        states.commit(1)
    states = stepped.base()
    stepped.verify(states, BASE, 4)
    for run in (lambda: stepped.verify(states, 0, 1), lambda: next(stepped.model.prefill(states, mx.array([[1]])))):
        with pytest.raises(RuntimeError, match="neither committed nor aborted"):
            run()
    for n in (-1, 5, [1, 1], []):
        with pytest.raises(ValueError):
            states.commit(n)
    assert same_bits(leaves(states), stepped.leaves[BASE])
    states.commit(3)
    for n in (2, 0, 5):
        with pytest.raises(ValueError):
            states.commit(n)
    assert same_bits(leaves(states), stepped.leaves[BASE + 3])
    states.commit(3)
    states.commit(4)
    assert same_bits(leaves(states), stepped.leaves[BASE + 4])
    assert same_bits(list(stepped.verify(states, BASE + 4, 2).logits[0]), stepped.logits[BASE + 4 : BASE + 6])
    states.abort()
    with pytest.raises(RuntimeError, match="nothing to commit"):
        states.commit(1)


@pytest.mark.parametrize("index", [1, 2])
def test_after_a_failed_evaluation_all_use_is_refused_in_one_line(stepped, index):
    states = stepped.base()
    with failing(stepped.model, index, "evaluated"), pytest.raises(RuntimeError, match="Inverse"):
        stepped.verify(states, BASE, 3)
    assert states.broken
    for use in (lambda: stepped.verify(states, BASE, 1), lambda: states.commit(1), states.folded):
        with pytest.raises(RuntimeError, match="can't go on.*start a new one") as error:
            use()
        assert "\n" not in str(error.value)


class NoRollback(Recurrent):
    """Applies every row of the pass to S."""

    def advance(self, count, *rows, **options):
        return super().advance(self.conv_rows.shape[1], *rows, **options)


class NoConvRollback(Recurrent):
    """Keeps the last conv inputs of the pass."""

    def conv_after(self, count):
        return super().conv_after(self.conv_rows.shape[1])


class Reset(Recurrent):
    """Forgets S where a row was rejected."""

    def advance(self, count, *rows, **options):
        if count == self.conv_rows.shape[1]:
            return super().advance(count, *rows, **options)
        return Recurrent(mx.zeros_like(self.S), self.conv).advance(0, *rows, **options)


class Faulty(LayerStates):
    """States whose recurrent layers are of a faulty kind."""

    kind = Recurrent

    def commit(self, count):
        super().commit(count)
        self.layers = [self.kind(*x) if isinstance(x, Recurrent) else x for x in self.layers]


class OneRowMissing(LayerStates):
    """Leaves the last accepted row out of the recurrent layers."""

    def origin(self, T: int) -> Origin:
        origin = super().origin(T)
        return origin._replace(count=max(origin.count - 1, 0))


class NoKeyRollback(LayerStates):
    """Attends to all rows of the last pass, as if its keys had not been cut back."""

    def origin(self, T: int) -> Origin:
        origin = super().origin(T)
        start = self.start + self._pass.rows if self._pass else 0
        return origin._replace(start=start, length=start + T)


def faulty(kind) -> type:
    return type(f"Faulty{kind.__name__}", (Faulty,), {"kind": kind})


def like_stepping(stepped: Stepped, states_class: type) -> bool:
    states = states_class(stepped.model.new_states().layers)
    return same_bits(in_rounds(stepped.model, states, stepped.ids, seed=5), stepped.logits)


def test_the_comparison_sees_the_classic_rollback_faults(stepped):
    assert like_stepping(stepped, LayerStates)
    assert like_stepping(stepped, faulty(Recurrent))
    for kind in (NoRollback, NoConvRollback, Reset):
        assert not like_stepping(stepped, faulty(kind)), kind
    for states_class in (OneRowMissing, NoKeyRollback):
        assert not like_stepping(stepped, states_class), states_class
