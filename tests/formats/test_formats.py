"""Storage of weights."""

import mlx.core as mx
import pytest
from rig import same_bits, tiny, tokens

from specmlx.formats.module_weights import column_major


@pytest.mark.linux_bits
@pytest.mark.parametrize("rows", [1, 2, 9])
def test_storing_weights_column_by_column_changes_no_bit(rows):
    model = tiny(7)
    ids = tokens(1, rows)
    before = model.verify(model.new_states(), ids, (2,))
    mx.eval(before.logits, before.features)
    strides = memoryview(model.layers[0].mlp.up_proj.weight).strides
    column_major(model)
    after = model.verify(model.new_states(), ids, (2,))
    assert memoryview(model.layers[0].mlp.up_proj.weight).strides != strides
    assert same_bits([before.logits, before.features], [after.logits, after.features])
