"""Training losses: a model's outputs and a batch in, (sum, weight) pairs out.

The caller adds the pairs over microbatches and devices and divides once, so that means are exact.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from tformer.config import Config, Model, Train
from tformer.config.tasks import TASKS, Task
from tformer.layers import preferences
from tformer.layers.class_scores import Scalar, Scores, Teaching, class_scores, cross_entropy
from tformer.layers.dropout import DropoutRates, MaybeScalar
from tformer.layers.heads import TokenStatistics
from tformer.layers.logits import AUTO_LOGITS, Chunk
from tformer.layers.norms import NORMS
from tformer.layers.outputs import (
    HEADS,
    IMPOSSIBLE,
    best_spans,
    candidates,
    cosines,
    most_likely,
    of_choices,
    sentence_classes,
)

Batch = Mapping[str, jax.Array]
Method = str | Callable[..., Any]  # of a model, by its name, or (model, batch, dropout rates) -> outputs


# (batch, chunk as in `Objective.method_for`) -> (the method of the model that learns, what its teacher adds, if any)
Teach = Callable[[Batch, Chunk], tuple[Method, tuple[Teaching, ...]]]


def token_scores(logits_BTV: jax.Array | TokenStatistics, batch: Batch, *options: Any) -> Scores:
    """Scores of every token whose `weights` is not 0; the options are those of `class_scores`."""
    return class_scores(logits_BTV, batch['targets'], batch['weights'], *options)


def label_scores(logits_BC: jax.Array, batch: Batch, *options: Any) -> Scores:
    """Scores of every sequence whose `label_weights` is not 0; the options are those of `class_scores`."""
    return class_scores(logits_BC, batch['labels'], batch['label_weights'], *options)


def number_scores(
    numbers_B: jax.Array,
    batch: Batch,
    smoothing: MaybeScalar = None,
    z_loss: MaybeScalar = None,
    teaching: Teaching | None = None,
) -> Scores:
    """The squared error of every sequence whose `label_weights` is not 0; a teacher's number is another target."""
    errors = jnp.square(numbers_B - batch['labels'])
    if teaching is not None:
        apart = jnp.square(numbers_B - teaching.outputs)
        errors = (1 - teaching.weight) * errors + teaching.weight * apart
    return {'loss': (jnp.sum(errors * batch['label_weights']), jnp.sum(batch['label_weights']))}


def choice_scores(
    logits_BK: jax.Array, batch: Batch, smoothing: MaybeScalar = None, z_loss: MaybeScalar = None
) -> Scores:
    """Scores of the right choice among those of every row whose `label_weights` is not 0."""
    return label_scores(of_choices(logits_BK, batch), batch, None, z_loss)


def contrastive_scores(
    outputs: tuple[jax.Array, jax.Array], batch: Batch, smoothing: MaybeScalar = None, z_loss: MaybeScalar = None
) -> Scores:
    """Scores of the second text of every row whose `label_weights` is not 0, among all but the first texts of the batch
    (Henderson et al. 2017, section 4.4; hard negatives: Karpukhin et al. 2020, section 3.2).

    Texts that are the same tokens (`segment_keys`) as the row's first or second are no candidates.
    """
    _, logits_BC = outputs
    keys_BKX, others = batch['segment_keys'], batch['segment_weights'].shape[1] - 1
    keys_CX, real_C = keys_BKX[:, 1:].reshape(-1, 2), batch['segment_weights'][:, 1:].reshape(-1) > 0
    right_B = others * jnp.arange(len(keys_BKX))
    same_BC = (keys_BKX[:, None, :2] == keys_CX[None, :, None]).all(-1).any(-1)
    is_right_BC = right_B[:, None] == jnp.arange(len(keys_CX))[None]
    logits_BC = jnp.where(is_right_BC | (real_C[None] & ~same_BC), logits_BC, IMPOSSIBLE)
    found = class_scores(logits_BC, right_B, batch['label_weights'])
    return {'loss': found['loss'], 'accuracy': found['accuracy']}


def cosine_scores(v_BKD: jax.Array, batch: Batch, smoothing: MaybeScalar = None, z_loss: MaybeScalar = None) -> Scores:
    """The squared error of the cosine of each row's two texts (Reimers & Gurevych 2019, section 3)."""
    return number_scores(cosines(v_BKD), batch)


def span_scores(
    logits_BT2: jax.Array,
    batch: Batch,
    smoothing: MaybeScalar = None,
    z_loss: MaybeScalar = None,
    teaching: Teaching | None = None,
) -> Scores:
    """Scores of the first and the last token of an answer, among the tokens whose `weights` is not 0.

    The loss is the mean of both. An answer is right where both tokens are (Devlin et al. 2019, 4.2).
    """

    def by_end(logits_BT2: jax.Array) -> jax.Array:
        return jnp.moveaxis(jnp.where(candidates(batch)[..., None], logits_BT2, IMPOSSIBLE), 2, 1)

    logits_B2T = by_end(logits_BT2)
    weights_B2 = jnp.broadcast_to(batch['label_weights'][:, None] / 2, batch['labels'].shape)
    if teaching is not None:
        teaching = teaching._replace(outputs=by_end(teaching.outputs))
    found = class_scores(logits_B2T, batch['labels'], weights_B2, smoothing, z_loss, teaching)
    both = jnp.all(jnp.argmax(logits_B2T, -1) == batch['labels'], 1) * batch['label_weights']
    return {**found, 'accuracy': (jnp.sum(both), found['loss'][1])}


def sentence_scores(
    outputs: tuple[jax.Array, jax.Array], batch: Batch, smoothing: MaybeScalar = None, z_loss: MaybeScalar = None
) -> Scores:
    """Scores of the masked tokens, with the loss of two sentences on top (Devlin et al. 2019, 3.1; Lan et al. 2020)."""
    logits_BTV, logits_BC = outputs
    found, pairs = token_scores(logits_BTV, batch, smoothing, z_loss), label_scores(logits_BC, batch)
    loss, weight = found['loss']
    second = jnp.sum(cross_entropy(logits_BC, batch['labels']) * batch['second_weights'])
    return {
        **found,
        'loss': (loss + second, weight),
        'sentence_loss': pairs['loss'],
        'sentence_accuracy': pairs['accuracy'],
    }


def detection_scores(
    outputs: tuple[jax.Array, jax.Array, jax.Array],
    batch: Batch,
    smoothing: MaybeScalar = None,
    z_loss: MaybeScalar = None,
) -> Scores:
    """Scores of the generator's masked tokens, with the detector's loss of every token on top: was it replaced?

    A token that the generator got right was not (Clark et al. 2020, section 2).
    """
    logits_BTV, tokens_BT, detected_BT = outputs
    found = token_scores(logits_BTV, batch, smoothing, z_loss)
    originals_BT = jnp.where(batch['weights'] > 0, batch['targets'], batch['inputs'])
    replaced_BT, real_BT = tokens_BT != originals_BT, batch['positions'] >= 0
    losses_BT = jax.nn.softplus(jnp.where(replaced_BT, -detected_BT, detected_BT))
    loss, weight = found['loss']
    every = jnp.sum(real_BT).astype(jnp.float32)
    return {
        **found,
        'loss': (loss + jnp.sum(losses_BT * batch['second_weights']), weight),
        'detection_loss': (jnp.sum(losses_BT * real_BT), every),
        'detection_accuracy': (jnp.sum(((detected_BT > 0) == replaced_BT) * real_BT), every),
        'replaced': (jnp.sum(replaced_BT * real_BT), every),
    }


# ------------------------------------------------------------------------------------- two losses, one division
def second_weights(weights_of: Callable[[Batch], jax.Array]) -> Callable[[Batch, Scalar], Batch]:
    """Returns a function that adds `second_weights`: those of a batch, scaled to add up to `weight` times `weights`.

    So the sum of both losses over the sum of `weights` is the mean of one plus `weight` times the mean of the other,
    in whatever parts a batch is computed.
    """

    def weigh(batch: Batch, weight: Scalar) -> Batch:
        weights = weights_of(batch)
        scale = weight * jnp.sum(batch['weights']) / jnp.maximum(jnp.sum(weights), 1.0)
        return {**batch, 'second_weights': weights * scale}

    return weigh


_TOKEN_MEANS = ('loss', 'nll', 'accuracy', 'perplexity')


@dataclasses.dataclass(frozen=True)
class Loss:
    """A loss of a model's outputs and a batch."""

    scores: Callable[..., Scores]  # (outputs, batch, label smoothing, z-loss) -> sums and weights by name
    names: tuple[str, ...] = _TOKEN_MEANS  # of the means that evaluation reports of them
    # (outputs, batch, longest answer) -> predictions, for metrics that no sums give; None: there are none
    predict: Callable[[Any, Batch, int], Any] | None = None
    # (whole batch, weight of the second loss) -> the batch with weights that make both losses add up
    weigh: Callable[[Batch, Scalar], Batch] = lambda batch, weight: batch
    second: str | None = None  # the name of the second loss among the scores; None: there is one loss
    smoothing: bool = True  # whether label smoothing applies
    z_loss: bool = True  # whether the z-loss applies
    whole_batch: bool = False  # whether the loss of a row depends on the other rows
    with_reference: bool = False  # whether there are no scores without a teacher's outputs, in evaluation either
    # whether the outputs may be the `TokenStatistics` of logits, which are computed in parts (train.loss_chunk)
    by_statistics: bool = False


LOSSES: dict[str, Loss] = {
    'tokens': Loss(token_scores, by_statistics=True),
    'tags': Loss(token_scores, predict=most_likely),
    'labels': Loss(label_scores, predict=most_likely),
    'numbers': Loss(number_scores, ('loss',), lambda numbers_B, *_: numbers_B, smoothing=False, z_loss=False),
    'choices': Loss(
        choice_scores, predict=lambda logits, batch, _: jnp.argmax(of_choices(logits, batch), -1), smoothing=False
    ),
    'contrastive': Loss(
        contrastive_scores, ('loss', 'accuracy'), lambda outputs, *_: outputs[0], smoothing=False, z_loss=False,
        whole_batch=True,
    ),
    'cosines': Loss(cosine_scores, ('loss',), cosines, smoothing=False, z_loss=False),
    'dpo': Loss(preferences.dpo_scores, preferences.NAMES, z_loss=False, with_reference=True, by_statistics=True),
    'ipo': Loss(
        preferences.ipo_scores, preferences.NAMES, smoothing=False, z_loss=False, with_reference=True,
        by_statistics=True,
    ),
    'spans': Loss(span_scores, predict=best_spans, smoothing=False),
    'sentences': Loss(
        sentence_scores, (*_TOKEN_MEANS, 'sentence_loss', 'sentence_accuracy'), sentence_classes,
        second_weights(lambda batch: batch['label_weights']), 'sentence_loss',
    ),
    'detection': Loss(
        detection_scores, (*_TOKEN_MEANS, 'detection_loss', 'detection_accuracy', 'replaced'), None,
        second_weights(lambda batch: (batch['positions'] >= 0).astype(jnp.float32)), 'detection_loss',
    ),
}  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Objective(Loss):
    """A training objective: its row in `config.tasks.TASKS`, with the loss and the head that the row names."""

    method: Method = '__call__'
    second_weight: float = 1.0  # the weight of the second loss, unless train.second_loss_weight says otherwise
    teacher: bool = False  # whether a teacher's outputs are part of the loss that is trained

    def method_for(self, chunk: Chunk, **teacher: Any) -> Method:
        """Returns the method that learns. Of tokens it gives the statistics of their logits, a `chunk` at a time, or
        the logits themselves where the loss needs them or the model has no statistics."""
        if self.method != '__call__' or not self.by_statistics:
            return self.method

        def learn(model: nn.Module, *args: Any) -> Any:
            statistics = getattr(model, 'token_statistics', None)
            return model(*args) if statistics is None else statistics(*args, chunk=chunk, **teacher)

        return learn

    def taught_by(self, teacher: nn.Module | None, variables: Any, train: Train) -> Teach:
        """Returns the `Teach` of a teacher with these variables; None: there is none."""
        options = train.distillation_weight, train.distillation_temperature, train.preference_beta

        def teach(batch: Batch, chunk: Chunk) -> tuple[Method, tuple[Teaching, ...]]:
            own = self.method_for(chunk)
            if teacher is None:
                return own, ()
            within = self.method == '__call__' and self.by_statistics and not self.with_reference
            method = 'logits_input' if within else own
            outputs: Any = teacher.apply(jax.lax.stop_gradient(variables), batch, DropoutRates(), method=method)
            if within:
                own, outputs = self.method_for(chunk, teacher=outputs, temperature=options[1]), None
            return own, (Teaching(outputs, *options),)

        return teach

    def weight(self, given: MaybeScalar) -> Scalar:
        """Returns the weight of the second loss: `given`, or where that is None the objective's own."""
        return self.second_weight if given is None else given


def loss_chunk(config: Config) -> Chunk:
    """Returns how many logits are held at once: train.loss_chunk, or None, all, also for `auto` where those of whole
    rows are few, or the head or the loss cannot be computed in parts."""
    given, model, task = config.train.loss_chunk, config.model, TASKS[config.train.objective]
    in_parts = computed_in_parts(task) and not whole_batch_head(model)
    few = config.data.length * (model.vocab_size or 0) <= AUTO_LOGITS
    return None if given == 'auto' and (few or not in_parts) else given


def computed_in_parts(task: Task) -> bool:
    """Returns whether a part of the tokens' logits may be held at a time."""
    return task.head == 'tokens' and LOSSES[task.loss].by_statistics


def whole_batch_head(model: Model) -> bool:
    """Returns whether the vocabulary's logits of a token depend on the other tokens of the batch."""
    return model.mlm_transform and NORMS[model.norm].whole_batch


class _Objectives(Mapping[str, Objective]):
    """The objective of each row of `TASKS`, also of rows that are added later."""

    def __getitem__(self, name: str) -> Objective:
        task = TASKS[name]
        head = HEADS[task.head].method
        return Objective(**vars(LOSSES[task.loss]), method=head, second_weight=task.second_weight, teacher=task.teacher)

    def __iter__(self) -> Iterator[str]:
        return iter(TASKS)

    def __len__(self) -> int:
        return len(TASKS)


OBJECTIVES: Mapping[str, Objective] = _Objectives()
