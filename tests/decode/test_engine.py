"""Rows that come and go: each text is that of a batch of its own, and nothing is compiled for it."""

import functools

import jax
import numpy as np
import pytest

from small_decoding import BANNED, CASES, EOS, LATENT_CASES, B, T, batch_of, make, row
from tformer import config
from tformer.decode.engine import Drawing, make_engine, write_all
from tformer.decode.generate import make_generate


@functools.cache
def model_of(family):
    return make(family, scale=2.0, position='learned', num_kv_heads=2)


def alone(family, index):
    """A row of `batch_of` as one is inserted: prompts padded in front, sources behind."""
    return {name: value[index : index + 1] for name, value in batch_of(family).items() if name != 'rows'}


WAYS = [
    (Drawing(), {}),
    (Drawing(1.5, seed=3), {'temperature': 1.5}),
    (Drawing(0.8, top_k=4, seed=4), {'temperature': 0.8, 'top_k': 4}),
    (Drawing(2.0, top_p=0.7, min_p=0.05, seed=5), {'temperature': 2.0, 'top_p': 0.7, 'min_p': 0.05}),
    (Drawing(1.0, seed=5, number=2), {'temperature': 1.0, 'num_outputs': 3}),
]


@functools.cache
def expected(family, index, way):
    """Tokens and score of a row by itself."""
    model, variables = model_of(family)
    drawing, fields = WAYS[way]
    decode = config.Decode('sample' if fields else 'greedy', T, **fields)
    batch = {**row(batch_of(family), index), 'rows': np.zeros(1, np.int32)}
    made = make_generate(model, decode, eos=EOS, banned=BANNED)
    tokens, scores = made(variables, batch, jax.random.key(drawing.seed))
    return np.asarray(tokens)[drawing.number].tolist(), float(scores[drawing.number])


SLOW = (CASES[-1], *LATENT_CASES)


@pytest.mark.parametrize('family', [*CASES[:-1], *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW)])
def test_each_text_is_that_of_a_batch_of_its_own_whatever_comes_and_goes_beside_it(family) -> None:
    """Two rows take nine texts, each as soon as one is free; prompts, ways and lengths differ."""
    model, variables = model_of(family)
    longest = batch_of(family)['inputs'].shape[1]
    engine = make_engine(model, alone(family, 0), rows=2, slots=longest + T - 1, banned=BANNED)  # none to spare
    texts = [(index, way) for way in range(len(WAYS)) for index in range(B)][:9]
    asked = [(alone(family, index), WAYS[way][0], T - index) for index, way in texts]  # texts have unequal lengths
    ended = write_all(engine, variables, iter(asked), rows=2, ends=(EOS,))
    found = {texts[number]: (written, score) for number, written, score in ended}
    assert found.keys() == set(texts)
    for (index, way), (written, score) in found.items():
        tokens, total = expected(family, index, way)
        assert written == tokens[: len(written)], (index, way)
        assert written[-1] == EOS or len(written) == T - index
        assert index or score == pytest.approx(total, abs=1e-4)
    assert len({len(written) for written, _ in found.values()}) > 1
    assert engine.step._cache_size() == engine.insert._cache_size() == engine.free._cache_size() == 1
