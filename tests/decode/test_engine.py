"""Rows that come and go: each text is that of a batch of its own, and nothing is compiled for it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from small_decoding import BANNED, CASES, EOS, LATENT_CASES, B, T, batch_of, make, row
from tformer import config
from tformer.decode.constraints import Automaton
from tformer.decode.drawing import Drawing
from tformer.decode.engine import make_engine, write_all
from tformer.decode.generate import make_generate
from tformer.decode.rules import Rules


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


@pytest.mark.slow
@pytest.mark.parametrize('family', [*CASES[:-1], *(pytest.param(case, marks=pytest.mark.proof) for case in SLOW)])
@pytest.mark.proof_cases('encoder_decoder')
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


# A text begins with 4 and has another one before its end; the tokens that follow others gain and lose.
FORM = Automaton(
    jnp.array([0, 0, 2, 0, 1, 0, 0, 0, 0, 0, 0]),
    jnp.array([[-1, 1, -1], [1, 2, -1], [2, 1, 3], [-1, -1, -1]]),
    jnp.array([3, 2, 1, 0]),
)
BIAS = (((5,), 1.5), ((4, 7), 6.0), ((3, 4, 8), -9.0), ((7, 7, 9), 9.0))
OWN = [{6: 4.0, 8: -3.5}, {}, {7: -50.0, 9: 2.0, EOS: 1.0}]


@pytest.mark.slow
@pytest.mark.parametrize(
    'form', [FORM, pytest.param(None, marks=pytest.mark.proof)], ids=lambda form: 'form' if form else 'biases alone'
)
def test_texts_have_the_biases_and_the_form_of_their_run_and_biases_of_their_own(form) -> None:
    """Each is what `generate` writes with all of them; no bias compiles anything, and forms end within each length."""
    model, variables = model_of('decoder')
    given = [(index, OWN[index], [Drawing(), Drawing(3.0, seed=8)][index % 2], [T, T, 4][index]) for index in (0, 1, 2)]

    def asked(index, own):
        tokens, values = np.zeros((1, 3), np.int32), np.zeros((1, 3), np.float32)
        tokens[0, : len(own)], values[0, : len(own)] = list(own), list(own.values())
        return {**alone('decoder', index), 'bias_tokens': tokens, 'bias_values': values}

    rules = Rules(constraint=form, bias=BIAS)
    engine = make_engine(model, asked(0, {}), rows=2, slots=16, banned=BANNED, rules=rules, eos=EOS)
    texts = ((asked(index, own), drawing, most) for index, own, drawing, most in given)
    found = {number: tokens for number, tokens, _ in write_all(engine, variables, texts, rows=2, ends=(EOS,))}
    for index, own, drawing, most in given:
        both = rules._replace(bias=(*BIAS, *(((token,), value) for token, value in own.items())))
        decode = config.Decode(
            'sample' if drawing.temperature else 'greedy', most, temperature=drawing.temperature or 1.0
        )
        made = make_generate(model, decode, eos=EOS, banned=BANNED, rules=both)
        batch = {**row(batch_of('decoder'), index), 'rows': np.zeros(1, np.int32)}
        expected = np.asarray(made(variables, batch, jax.random.key(drawing.seed))[0])[0].tolist()
        assert found[index] == expected[: len(found[index])]
        assert len(found[index]) == most or found[index][-1] == EOS
        if form:
            assert found[index][0] == 4 and found[index].count(4) % 2 == 0 and found[index][-1] == EOS
    assert engine.step._cache_size() == engine.insert._cache_size() == 1
