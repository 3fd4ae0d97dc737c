"""Two halves of a batch, written at the same time."""

import threading

import jax
import numpy as np
import pytest
from flax import linen as nn

from tformer import config
from tformer.decode.generate import make_generate
from tformer.decode.halves import TOKENS, at_once
from tformer.errors import UserError
from tformer.model import build

SMALL = {'vocab_size': 24, 'emb_dim': 16, 'mlp_dim': 32, 'num_heads': 2, 'max_len': 32, 'num_decoder_layers': 2}
WAYS = {
    'greedy': config.Decode(strategy='greedy', max_len=6),
    'draws': config.Decode(strategy='sample', max_len=6, num_outputs=2),
    'beams': config.Decode(strategy='beam', max_len=6, beam_size=3, num_outputs=2),
}


def made(decode, rows=TOKENS, **fields):
    """Returns a generator, its variables and a batch of ragged prompts."""
    cfg = config.Model(**{**SMALL, 'num_encoder_layers': 2, **fields})
    tokens = np.random.default_rng(0).integers(2, 24, (rows, 5)).astype(np.int32)
    positions = np.arange(5)[None] - (np.arange(rows) % 4)[:, None]
    batch = {'inputs': tokens, 'positions': np.maximum(positions, -1).astype(np.int32)}
    if cfg.family == 'encoder_decoder':
        start = {'inputs': tokens[:, :1], 'positions': np.zeros((rows, 1), np.int32)}
        batch = {**start, 'encoder_inputs': tokens[:, ::-1], 'encoder_positions': batch['positions'][:, ::-1]}
    model = build(cfg)
    variables = nn.meta.unbox(model.init(jax.random.key(0), batch))
    return make_generate(model, decode, eos=1), variables, batch


SLOW = [('encoder_decoder', 'draws'), ('encoder_decoder', 'greedy'), ('decoder', 'beams')]
EVERY = [('decoder', 'greedy'), ('decoder', 'draws'), ('encoder_decoder', 'beams')]


@pytest.mark.slow
@pytest.mark.parametrize('numbers', ['by place', 'of examples'])
@pytest.mark.parametrize(('family', 'way'), [*EVERY, *(pytest.param(*each, marks=pytest.mark.proof) for each in SLOW)])
@pytest.mark.proof_cases('encoder_decoder-beams-of examples', 'decoder-draws-of examples', 'decoder-greedy-of examples')
def test_they_are_the_whole(family, way, numbers) -> None:
    generate, variables, batch = made(WAYS[way], family=family)
    if numbers == 'of examples':
        batch['rows'] = np.arange(TOKENS, dtype=np.int32)[::-1]
    assert generate.pay(variables, batch, jax.random.key(3))
    tokens, scores = generate(variables, batch, jax.random.key(3))
    expected, their_scores = generate.whole(variables, batch, jax.random.key(3))
    np.testing.assert_array_equal(tokens, expected)
    np.testing.assert_allclose(scores, their_scores, rtol=1e-5)


@pytest.mark.slow
def test_both_are_one_program_which_is_compiled_once() -> None:
    generate, variables, batch = made(WAYS['greedy'])
    first = generate(variables, batch)
    generate(variables, {name: jax.numpy.asarray(x) for name, x in batch.items()})
    assert len(generate.compiled) == 1 and generate.whole._cache_size() == 0
    with jax.default_matmul_precision('bfloat16'):
        generate(variables, batch)
    assert len(generate.compiled) == 2
    np.testing.assert_array_equal(generate(variables, batch)[0], first[0])


def test_what_is_too_small_too_large_odd_spread_or_traced_is_written_whole() -> None:
    generate, variables, batch = made(WAYS['greedy'])

    def pays(variables=variables, batch=batch):
        return generate.pay(variables, batch, None)

    def of(rows):
        return {name: x[rows] for name, x in batch.items()}

    assert pays() and not pays(batch=of(slice(TOKENS - 2)))
    assert not pays(batch={name: np.concatenate([x, x[:1]]) for name, x in batch.items()})
    assert not pays({'params': np.broadcast_to(np.float32(0), 10**6 * TOKENS + 10**6)})
    mesh = jax.make_mesh((2,), ('data',), axis_types=(jax.sharding.AxisType.Auto,))
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec('data'))
    assert not pays(batch=jax.device_put(batch, rows))
    traced = jax.jit(generate)(variables, batch)
    np.testing.assert_array_equal(traced[0], generate(variables, batch)[0])


def test_rows_that_depend_on_each_other_stay_together() -> None:
    generate, *_ = made(WAYS['greedy'], position='rope', rope_scaling='dynamic', rope_factor=2.0)
    assert not hasattr(generate, 'pay')


def given(items):
    yield from items


def test_iterators_at_once_yield_all_and_end_with_an_error_or_where_nobody_asks_on() -> None:
    assert sorted(at_once([given(range(0, 20, 2)), given(range(1, 20, 2))])) == list(range(20))
    assert list(at_once([given('abc')])) == ['a', 'b', 'c']

    def failing():
        yield 1
        raise UserError('a text is too long')

    with pytest.raises(UserError, match='too long'):
        list(at_once([failing(), given([])]))
    seen: list[int] = []
    threads: list[threading.Thread] = []

    def endless():
        threads.append(threading.current_thread())
        try:
            while True:
                seen.append(1)
                yield 1
        finally:
            threads.append(threading.current_thread())

    both = at_once([endless(), given([])])
    next(both)
    both.close()
    number = len(seen)
    assert not [thread for thread in threading.enumerate() if thread.name.endswith('(advance)')]
    assert len(seen) == number
    opened, closed = threads
    assert opened is closed is not threading.current_thread()
