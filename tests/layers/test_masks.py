"""Who sees whom: on four tokens by hand, and on random rows against a plain loop over rows, queries and keys."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from tformer.errors import UserError
from tformer.layers.masks import AttentionMask, attention_mask, check_order, within_window

B, T, S = 2, 3, 5  # few shapes, so that few programs are compiled
SEEDS = st.integers(0, 2**32 - 1)


def loop(rule) -> list[list[list[bool]]]:
    return [[[bool(rule(b, t, s)) for s in range(S)] for t in range(T)] for b in range(B)]


@given(seed=SEEDS, causal=st.booleans(), packed=st.booleans(), prefixed=st.booleans())
@example(seed=0, causal=True, packed=True, prefixed=True)
def test_a_mask_is_its_rule_for_each_query_and_key(seed: int, causal: bool, packed: bool, prefixed: bool) -> None:
    """A key is seen if it is no padding, not later unless of the prefix, and of the query's own segment."""
    rng = np.random.default_rng(seed)
    queries, keys = rng.integers(-1, 5, (B, T)), rng.integers(-1, 5, (B, S))
    query_segments, key_segments = rng.integers(0, 3, (B, T)), rng.integers(0, 3, (B, S))
    prefix = rng.random((B, S)) < 0.4

    def seen(b: int, t: int, s: int) -> bool:
        if keys[b, s] < 0 or (packed and query_segments[b, t] != key_segments[b, s]):
            return False
        return not causal or keys[b, s] <= queries[b, t] or (prefixed and prefix[b, s])

    segments = (query_segments, key_segments) if packed else (None, None)
    found = attention_mask(queries, keys, *segments, prefix if prefixed else None, causal=causal)
    assert found.tolist() == loop(seen)


POSITIONS = arrays.arrays(np.int32, (B, T), elements=st.integers(0, 9))


@given(POSITIONS, arrays.arrays(np.int32, (B, S), elements=st.integers(0, 9)), st.integers(1, 6))
def test_a_window_reaches_as_far_back_as_ahead(queries: np.ndarray, keys: np.ndarray, window: int) -> None:
    """The query itself and `window` - 1 positions on either side."""
    found = within_window(queries, keys, np.int32(window))
    near = [[range(position - window + 1, position + window) for position in row] for row in queries.tolist()]
    assert found.tolist() == loop(lambda b, t, s: keys[b, s] in near[b][t])


# ------------------------------------------------------------------------------------------------------- by hand


PLACES = jnp.array([[0, 1, 2, 3]])


def rows(text: str) -> np.ndarray:
    """Returns the mask of a picture: a row for each query, x where it sees the key."""
    return np.array([[[letter == 'x' for letter in row] for row in text.split()]])


def test_a_window_ends_on_both_sides():
    np.testing.assert_array_equal(within_window(PLACES, PLACES, jnp.array(2)), rows('xx.. xxx. .xxx ..xx'))
    np.testing.assert_array_equal(within_window(PLACES, PLACES, jnp.array(1)), rows('x... .x.. ..x. ...x'))


def test_a_prefix_of_two_is_seen_by_all_and_nothing_else_before_its_turn():
    prefix = jnp.array([[True, True, False, False]])
    mask = attention_mask(PLACES, PLACES, prefix_BS=prefix, causal=True)
    np.testing.assert_array_equal(mask, rows('xx.. xx.. xxx. xxxx'))


def test_two_packed_examples_and_padding_see_their_own_past():
    positions, segments = jnp.array([[0, 1, 0, -1]]), jnp.array([[1, 1, 2, 0]])
    mask = attention_mask(positions, positions, segments, segments, causal=True)
    np.testing.assert_array_equal(mask[:, :3], rows('x... xx.. ..x.'))
    mask = attention_mask(positions, positions, segments, segments, causal=False)
    np.testing.assert_array_equal(mask[:, :3], rows('xx.. xx.. ..x.'))


# ------------------------------------------------------------------------------------------------------- the order


GOOD = {'positions': [[0, 1, 2, 0, 1, -1]], 'segment_ids': [[1, 1, 1, 2, 2, 0]], 'prefix': [[1, 1, 0, 1, 0, 0]]}
BAD = {
    'a token is left out': {'positions': [[0, 2, 3, 0, 1, -1]]},
    'positions fall': {'positions': [[2, 1, 0, 0, 1, -1]]},
    'segments take turns': {'segment_ids': [[1, 1, 2, 1, 2, 0]]},
    'padding in front': {'positions': [[-1, 0, 1, 0, 1, 2]], 'segment_ids': [[0, 1, 1, 2, 2, 2]]},
    'a later token is of the prefix': {'prefix': [[0, 1, 0, 1, 0, 0]]},
    'a source': {'encoder_positions': [[0, 0, 1, 2, 3, 4]]},
}


def batch_of(changes):
    return {name: np.array(x, bool if name == 'prefix' else np.int32) for name, x in {**GOOD, **changes}.items()}


@pytest.mark.parametrize('case', [None, *BAD])
def test_rows_in_another_order_than_vouched_for_are_refused(case):
    if case is None:
        check_order(batch_of({}))
        check_order({'inputs': np.zeros((1, 3))})
    else:
        with pytest.raises(UserError, match='must count up in each row or segment'):
            check_order(batch_of(BAD[case]))


@pytest.mark.slow
def test_a_query_reaches_the_end_of_the_prefix_of_its_own_segment():
    batch = {name: jnp.asarray(x) for name, x in batch_of({}).items()}
    places, segments = batch['positions'], batch['segment_ids']
    mask = AttentionMask(places, places, segments, segments, batch['prefix'], causal=True)
    assert mask.reach().tolist() == [[1, 1, 2, 3, 4, 5]]
    assert mask.replace(prefix_BS=batch['prefix'].at[0, 4].set(True)).reach().tolist() == [[1, 1, 2, 4, 4, 5]]
    assert mask.replace(prefix_BS=jnp.array([[True] * 4 + [False] * 2])).reach().tolist() == [[2, 2, 2, 3, 4, 5]]
    assert mask.replace(causal=False).reach() is None
