"""What objectives score: outputs of a model, and the modules that make them of its residual stream."""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

from tformer.layers.dropout import DropoutRates
from tformer.layers.heads import LinearHead, Pooler, VocabularyHead
from tformer.layers.replaced_tokens import DetectionHead, Generator, detect
from tformer.layers.resolved import ResolvedModel
from tformer.layers.tower import Batch, real_tokens


def classify(model: Any, batch: Batch, dropout_rates: DropoutRates | None = None) -> jax.Array:
    """Returns logits_BC, float32, of the pooled sequence."""
    return model.class_head(model.pool(batch, dropout_rates), dropout_rates)


def regress(model: Any, batch: Batch, dropout_rates: DropoutRates | None = None) -> jax.Array:
    """Returns a number for each pooled sequence, float32 [B]."""
    return model.number_head(model.pool(batch, dropout_rates), dropout_rates)[:, 0]


def tag(model: Any, batch: Batch, dropout_rates: DropoutRates | None = None) -> jax.Array:
    """Returns logits_BTC, float32, of each token."""
    return model.tag_head(model.features(batch, dropout_rates), dropout_rates)


def find_spans(model: Any, batch: Batch, dropout_rates: DropoutRates | None = None) -> jax.Array:
    """Returns logits_BT2, float32: each token's as the first of an answer, and as the last."""
    return model.span_head(model.features(batch, dropout_rates), dropout_rates)


def embed_texts(model: Any, batch: Batch, dropout_rates: DropoutRates | None = None) -> jax.Array:
    """Returns v_BKD, float32: the pooled vector of each of the K texts of a row, of length 1; 0 where there is none."""
    x_BKD = model.pool(batch, dropout_rates).astype(jnp.float32)
    squared_BK1 = jnp.sum(jnp.square(x_BKD), axis=-1, keepdims=True)
    return x_BKD * jax.lax.rsqrt(jnp.maximum(squared_BK1, 1e-12))


def compare_texts(model: Any, batch: Batch, dropout_rates: DropoutRates | None = None) -> tuple[jax.Array, jax.Array]:
    """Returns (v_BKD, logits_BC): the vectors of `embed_texts`, and the cosines of each row's first text and all
    C = B (K - 1) other texts of the batch, row by row, over the temperature (Gao et al. 2021, eq. 1)."""
    v_BKD = embed_texts(model, batch, dropout_rates)
    others_CD = v_BKD[:, 1:].reshape(-1, v_BKD.shape[2])
    return v_BKD, v_BKD[:, 0] @ others_CD.T / model.cfg.similarity_temperature


def unmask_pairs(model: Any, batch: Batch, dropout_rates: DropoutRates | None = None) -> tuple[jax.Array, jax.Array]:
    """Returns (logits_BTV of the tokens, logits_BC of two sentences), float32."""
    x_BTD, real_BT = model.features(batch, dropout_rates), real_tokens(batch)
    return model.logits(x_BTD, real_BT), model.sentence_head(model.pooler(x_BTD, real_BT), DropoutRates())


class Head(NamedTuple):
    """An end of a model."""

    # (model, batch, dropout rates) -> the outputs that a loss takes; or the name of the model's method
    method: str | Callable[..., Any]
    # by the first name of their parameters, (configuration) -> a module
    modules: Mapping[str, Callable[[ResolvedModel], nn.Module]]


def of_rows(cfg: ResolvedModel, num_outputs: int | None = None) -> nn.Module:
    """Returns the head of the classes, or of the number, of sequences."""
    return LinearHead(cfg, num_outputs, cfg.class_bias)


HEADS: dict[str, Head] = {  # config.tasks.HEADS has the facts about them that need no jax
    'tokens': Head('__call__', {'head': VocabularyHead}),
    'class': Head(classify, {'pooler': Pooler, 'class_head': of_rows}),
    'number': Head(regress, {'pooler': Pooler, 'number_head': functools.partial(of_rows, num_outputs=1)}),
    'tags': Head(tag, {'tag_head': LinearHead}),
    'spans': Head(find_spans, {'span_head': functools.partial(LinearHead, num_outputs=2)}),
    'sentences': Head(unmask_pairs, {'pooler': Pooler, 'sentence_head': functools.partial(LinearHead, num_outputs=2)}),
    'vectors': Head(embed_texts, {}),
    'comparison': Head(compare_texts, {}),
    'detection': Head(detect, {'generator': Generator, 'detection_head': DetectionHead}),
}
