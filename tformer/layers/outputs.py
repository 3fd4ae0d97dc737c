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
    return model.class_head(model.transform(model.pool(batch, dropout_rates)), dropout_rates)


def regress(model: Any, batch: Batch, dropout_rates: DropoutRates | None = None) -> jax.Array:
    """Returns a number for each pooled sequence, float32 [B]."""
    return model.number_head(model.transform(model.pool(batch, dropout_rates)), dropout_rates)[:, 0]


def choose_text(model: Any, batch: Batch, dropout_rates: DropoutRates | None = None) -> jax.Array:
    """Returns logits_BK, float32, of the texts of each row (Devlin et al. 2019, 4.4)."""
    return model.choice_head(model.transform(model.pool(batch, dropout_rates)), dropout_rates)[..., 0]


def tag(model: Any, batch: Batch, dropout_rates: DropoutRates | None = None) -> jax.Array:
    """Returns logits_BTC, float32, of each token."""
    return model.tag_head(model.transform(model.features(batch, dropout_rates)), dropout_rates)


def find_spans(model: Any, batch: Batch, dropout_rates: DropoutRates | None = None) -> jax.Array:
    """Returns logits_BT2, float32: each token's as the first of an answer, and as the last."""
    return model.span_head(model.transform(model.features(batch, dropout_rates)), dropout_rates)


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


# --------------------------------------------------------------------------------------------------- predictions
IMPOSSIBLE = -1e9  # a logit whose square is a number


def candidates(batch: Batch) -> jax.Array:
    """Returns mask_BT, True where a token may be the first or the last of an answer."""
    return batch['weights'] > 0


def most_likely(logits: jax.Array, batch: Batch, longest: int) -> jax.Array:
    """Returns the class of each sequence, or of each token."""
    return jnp.argmax(logits, axis=-1)


def sentence_classes(outputs: tuple[jax.Array, jax.Array], batch: Batch, longest: int) -> jax.Array:
    """Returns the class of each pair of sentences."""
    return jnp.argmax(outputs[1], axis=-1)


def of_choices(logits_BK: jax.Array, batch: Batch) -> jax.Array:
    """Returns logits_BK of which those of choices that a row does not have are as good as minus infinity."""
    return jnp.where(batch['segment_weights'] > 0, logits_BK, IMPOSSIBLE)


def cosines(v_BKD: jax.Array, *_: Any) -> jax.Array:
    """Returns the cosine of the first two texts of each row, [B]."""
    return jnp.sum(v_BKD[:, 0] * v_BKD[:, 1], axis=-1)


def best_spans(logits_BT2: jax.Array, batch: Batch, longest: int) -> tuple[jax.Array, ...]:
    """Returns (the best answer's first token, its last, its score, the score of no answer), each [B].

    A score is the sum of the logits of first and last token; no answer is position 0 as both. The best answer has at
    most `longest` tokens, all of them candidates (Devlin et al. 2019, 4.2 and 4.3); without any it is 0 to 0, of score
    -inf.
    """
    first_BT, last_BT = logits_BT2[..., 0], logits_BT2[..., 1]
    may_BT, T = candidates(batch), first_BT.shape[1]
    span_TT = jnp.arange(T)[None, :] - jnp.arange(T)[:, None]  # [first, last]
    legal_TT = (span_TT >= 0) & (span_TT < longest) & (jnp.arange(T)[:, None] > 0)
    legal_BTT = legal_TT[None] & may_BT[:, :, None] & may_BT[:, None, :]
    scores_BTT = jnp.where(legal_BTT, first_BT[:, :, None] + last_BT[:, None, :], -jnp.inf)
    flat = scores_BTT.reshape(-1, T * T)
    best_B = jnp.argmax(flat, axis=1)
    return best_B // T, best_B % T, jnp.max(flat, axis=1), first_BT[:, 0] + last_BT[:, 0]


# --------------------------------------------------------------------------------------------------------- heads
class Head(NamedTuple):
    """An end of a model."""

    # (model, batch, dropout rates) -> the outputs that a loss takes; or the name of the model's method
    method: str | Callable[..., Any]
    # by the first name of their parameters, (configuration) -> a module
    modules: Mapping[str, Callable[[ResolvedModel], nn.Module]]


def of_rows(cfg: ResolvedModel, num_outputs: int | None = None) -> nn.Module:
    """Returns the head of the classes, or of the number, of sequences, or of the scores of choices."""
    return LinearHead(cfg, num_outputs, cfg.class_bias)


HEADS: dict[str, Head] = {  # config.tasks.HEADS has the facts about them that need no jax
    'tokens': Head('__call__', {'head': VocabularyHead}),
    'class': Head(classify, {'pooler': Pooler, 'class_head': of_rows}),
    'number': Head(regress, {'pooler': Pooler, 'number_head': functools.partial(of_rows, num_outputs=1)}),
    'choice': Head(choose_text, {'pooler': Pooler, 'choice_head': functools.partial(of_rows, num_outputs=1)}),
    'tags': Head(tag, {'tag_head': LinearHead}),
    'spans': Head(find_spans, {'span_head': functools.partial(LinearHead, num_outputs=2)}),
    'sentences': Head(unmask_pairs, {'pooler': Pooler, 'sentence_head': functools.partial(LinearHead, num_outputs=2)}),
    'vectors': Head(embed_texts, {}),
    'comparison': Head(compare_texts, {}),
    'detection': Head(detect, {'generator': Generator, 'detection_head': DetectionHead}),
}
