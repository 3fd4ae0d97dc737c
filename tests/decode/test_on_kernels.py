"""Texts that the kernels of accelerators write, interpreted on a CPU, are those of the reference."""

import functools

import jax
import numpy as np
import pytest

from small_decoding import BANNED, CASES, EOS, batch_of, make
from tformer import config
from tformer.decode.drawing import Drawing
from tformer.decode.engine import make_engine, write_all
from tformer.decode.generate import make_generate
from tformer.layers import kernel_choice
from tformer.layers.accelerators import mosaic, splash, triton

KERNELS = {
    'flash': functools.partial(splash.flash, interpret=True),
    'mosaic': functools.partial(mosaic.mosaic, interpret=True),
    'triton': functools.partial(triton.triton, interpret=True),
}
T = 6
WAYS = {
    'greedy': {'strategy': 'greedy'},
    'draws': {'strategy': 'sample', 'num_outputs': 2},
    'beams': {'strategy': 'beam', 'num_outputs': 2},
    'groups': {'strategy': 'beam', 'beam_size': 4, 'beam_groups': 2, 'num_outputs': 4},
    'drafted': {'strategy': 'greedy', 'draft': 'prompt', 'draft_len': 2},
    'guided': {'strategy': 'greedy', 'guidance': 2.0},
    'in parts': {'strategy': 'beam', 'prefill_chunk': 2},
}
QUICK = {('triton', 'decoder', 'beams'), ('flash', 'encoder_decoder', 'beams'), ('mosaic', 'prefix_decoder', 'draws')}
EVERY = [
    pytest.param(*each, marks=() if each in QUICK else pytest.mark.proof)
    for each in ((kernel, family, way) for kernel in KERNELS for family in CASES for way in WAYS)
]


def use(monkeypatch, kernel):
    reference, by_distance = kernel_choice.KERNELS['reference'], kernel_choice.KERNELS[kernel].by_distance
    stands_in = reference._replace(function=KERNELS[kernel], by_distance=by_distance)
    monkeypatch.setitem(kernel_choice.KERNELS, 'reference', stands_in)


@pytest.mark.slow
@pytest.mark.parametrize(('kernel', 'family', 'way'), EVERY)
def test_every_search_writes_what_it_writes_by_the_reference(monkeypatch, kernel, family, way) -> None:
    same_texts(monkeypatch, kernel, family, way, position='rope')


@pytest.mark.slow
@pytest.mark.parametrize('position', ['alibi', 'relative'])
@pytest.mark.parametrize('family', CASES)
@pytest.mark.parametrize('way', ['greedy', 'beams', 'drafted', 'in parts'])
@pytest.mark.proof_cases('greedy-encoder_decoder-alibi', 'greedy-encoder_decoder-relative')
def test_a_position_bias_is_the_same_in_every_search(monkeypatch, family, way, position) -> None:
    same_texts(monkeypatch, 'mosaic', family, way, position=position)


def same_texts(monkeypatch, kernel, family, way, position) -> None:
    model, variables = make(family, scale=2.0, position=position)
    batch, decode = batch_of(family), config.Decode(max_len=T, **WAYS[way])

    def written():
        generate = make_generate(model, decode, eos=EOS, banned=BANNED)
        return jax.device_get(generate(variables, batch, jax.random.key(2)))

    tokens, scores = written()
    use(monkeypatch, kernel)
    found, others = written()
    np.testing.assert_array_equal(found, tokens)
    np.testing.assert_allclose(others, scores, rtol=1e-5, atol=1e-4)


@pytest.mark.proof
@pytest.mark.parametrize('kernel', KERNELS)
def test_rows_that_come_and_go_are_written_as_by_the_reference(monkeypatch, kernel) -> None:
    model, variables = make('decoder', scale=2.0, position='rope')
    batch = batch_of('decoder')
    rows = [{name: batch[name][row : row + 1] for name in ('inputs', 'positions')} for row in range(3)]

    def written():
        engine = make_engine(model, rows[0], rows=2, slots=16, banned=BANNED)
        asked = iter([(row, Drawing(), T) for row in rows])
        return {number: tokens for number, tokens, _ in write_all(engine, variables, asked, rows=2, ends=(EOS,))}

    expected = written()
    use(monkeypatch, kernel)
    assert written() == expected
