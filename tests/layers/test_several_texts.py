"""Vectors of the texts that share a row: each is that of its text alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tformer.config import Model
from tformer.data.examples.example_arrays import side_by_side
from tformer.layers.dropout import DropoutRates
from tformer.layers.outputs import compare_texts, embed_texts
from tformer.model import build

TEXTS = [np.array(text, np.int32) for text in ([5, 6, 7, 8], [9], [7, 5, 10])]


def row(texts: list) -> dict:
    """A batch of one row that ends in padding."""
    fields = side_by_side([{'inputs': text} for text in texts])
    weights = fields.pop('segment_weights')
    padded = {name: np.pad(x, (0, 2), constant_values=-(name == 'positions'))[None] for name, x in fields.items()}
    return {**padded, 'segment_weights': weights[None]}


@pytest.mark.slow
@pytest.mark.parametrize(
    ('family', 'pooling', 'position'),
    [('encoder', 'cls', 'learned'), ('encoder', 'mean', 'relative'), ('decoder', 'last', 'rope'),
     ('decoder', 'max', 'sinusoidal')],
)  # fmt: skip
def test_a_text_has_the_vector_that_it_has_alone_and_its_length_is_1(family, pooling, position):
    model = build(
        Model(family=family, vocab_size=11, emb_dim=16, mlp_dim=24, num_heads=2, num_encoder_layers=1, max_len=8,
              num_decoder_layers=1, pooling=pooling, position=position)
    )  # fmt: skip
    places = np.array([[*range(len(text)), *[-1] * (4 - len(text))] for text in TEXTS], np.int32)
    alone = {'inputs': np.stack([np.pad(text, (0, 4 - len(text))) for text in TEXTS]), 'positions': places}

    @jax.jit
    def vectors_and_features(key):
        variables = model.init(key, row(TEXTS), DropoutRates(), method=embed_texts)
        variables = jax.tree.map(lambda x: 3 * x, variables)
        vectors = model.apply(variables, row(TEXTS), DropoutRates(), method=embed_texts)
        return vectors, model.apply(variables, alone, DropoutRates(), method='features')

    found, features = vectors_and_features(jax.random.key(0))
    assert found.shape == (1, 3, 16) and found.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(found, axis=-1), 1, rtol=1e-5)
    for place, (text, x) in enumerate(zip(TEXTS, np.asarray(features), strict=True)):
        x = x[: len(text)]
        pooled = {'cls': x[0], 'mean': x.mean(0), 'last': x[-1], 'max': x.max(0)}[pooling]
        np.testing.assert_allclose(found[0, place], pooled / np.linalg.norm(pooled), atol=2e-5)


def test_texts_are_compared_with_all_but_the_first_ones_of_the_batch():
    """Two rows of three texts of two features each; the temperature 0.5 doubles the cosines."""
    texts = jnp.array([[[2.0, 0], [0, 1], [3, 4]], [[0, 5.0], [1, 0], [0, 0]]])

    class Model:
        cfg = type('', (), {'similarity_temperature': 0.5})

        def pool(self, batch, rates):
            return texts

    vectors, logits = compare_texts(Model(), {})
    np.testing.assert_allclose(vectors, [[[1, 0], [0, 1], [0.6, 0.8]], [[0, 1], [1, 0], [0, 0]]], rtol=1e-6)
    np.testing.assert_allclose(logits, [[0, 1.2, 2, 0], [2, 1.6, 0, 0]], rtol=1e-6)
