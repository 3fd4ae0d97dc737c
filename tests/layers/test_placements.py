"""Placements of norms and sums, on numbers."""

from tformer.layers.placements import PLACEMENTS, Sublayer

FIRST = Sublayer(lambda x: 2 * x, lambda x: x + 1, lambda x: x - 5, lambda: 0)
SECOND = Sublayer(lambda x: x * x, lambda x: 10 * x, lambda x: x / 4, lambda: 0)


def test_a_parallel_block_has_one_norm_and_adds_all_of_its_sublayers():
    """3 + 2 (3 + 1) + (3 + 1)^2, and not 10 times 3."""
    assert PLACEMENTS['parallel'].block(3, [FIRST, SECOND], 1.0) == 27


def test_a_block_without_residuals_is_its_functions_in_turn():
    assert PLACEMENTS['no_residual'].block(3, [FIRST, SECOND], 1.0) == (10 * (2 * (3 + 1))) ** 2


def test_a_sandwich_normalises_before_and_after_each_function():
    inner = 3 + (2 * (3 + 1) - 5)
    assert PLACEMENTS['sandwich'].block(3, [FIRST, SECOND], 1.0) == inner + (10 * inner) ** 2 / 4


def test_a_stack_ends_in_a_norm_where_its_blocks_end_in_a_sum():
    ending = {name for name, row in PLACEMENTS.items() if row.final_norm}
    assert ending == {'pre', 'sandwich', 'res_post', 'parallel', 'parallel_norms', 'no_residual'}
    reading = {name for name, row in PLACEMENTS.items() if row.before}
    assert reading == ending - {'res_post'}
    assert [name for name, row in PLACEMENTS.items() if not row.has_norm] == ['rezero']
    assert {name: row.initializer for name, row in PLACEMENTS.items() if row.initializer != 'xavier'} == {
        'deepnorm': 'deepnorm'
    }
