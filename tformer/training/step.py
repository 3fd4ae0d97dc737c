"""The train step, a pure function: gradients of one batch, in any number of parts, and one update."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

from tformer.config import Config
from tformer.layers.initializers import base_width
from tformer.layers.parallel import ring_attention
from tformer.objectives import Objective
from tformer.optim import freezing, precision
from tformer.optim.hyperparameters import Hyperparameters, Scalar
from tformer.optim.schedules import learning_rate
from tformer.training import flops, skipping
from tformer.training.state import TrainState, abstract_variables, logical_names, step_key, variables

Batch = Mapping[str, Any]
Step = Callable[[TrainState, Batch, Hyperparameters], tuple[TrainState, dict[str, Any]]]


_SAMPLE = 1 << 30  # of a part's key: what the model itself draws; parts of a batch come before it


def make_train_step(
    model: nn.Module, objective: Objective, optimizer: optax.GradientTransformation, config: Config
) -> Step:
    """Returns the pure step(state, batch, hyper) -> (state, metrics), to be jitted by the caller.

    The gradient is that of the loss's sum over the batch, divided once by its weight: computed in any number of
    microbatches it is the same. What layers sow in the collection `losses` (means over tokens, weighted) is added to
    the loss, and the collection `statistics` is carried on: neither is exact in parts, so both need one microbatch.
    What is frozen (freezing.py) has no gradient, and no part in its norm.
    A step that the guard finds not fit (guard.py) changes nothing but the step's number and the guard.
    Metrics: `scores` of (sum, weight) pairs, `aux_loss` among them where one was sown; `grad_norm` before clipping;
    `learning_rate`; `skipped`, how many steps in a row were not made; `tokens`, of both sides, without padding;
    `flops`, of the whole batch (`accounting.model_flops`).
    """
    microbatches = config.train.microbatches
    optimizer = optax.with_extra_args_support(optimizer)

    def loss_sum(params: Any, statistics: Any, batch: Batch, hyper: Hyperparameters, key: jax.Array) -> Any:
        rngs = {'sample': jax.random.fold_in(key, _SAMPLE)} | (
            {'dropout': key} if jax.tree.leaves(hyper.dropout_rates) else {}
        )
        outputs, found = model.apply(
            variables(params, statistics),
            batch,
            hyper.dropout_rates,
            rngs=rngs,
            method=objective.method_for(config.train.loss_chunk),
            mutable=['statistics', 'losses'],
        )
        scores = objective.scores(outputs, batch, hyper.label_smoothing, hyper.z_loss)
        total, weight = scores['loss']
        sown = jax.tree.leaves(found.get('losses', {}))
        if sown:
            scores['aux_loss'] = (weight * sum(jnp.sum(x.astype(jnp.float32)) for x in sown), weight)
            total += scores['aux_loss'][0]
        return total, (scores, found.get('statistics', {}))

    def accumulated(
        params: Any, statistics: Any, batch: Batch, hyper: Hyperparameters, key: jax.Array
    ) -> tuple[Any, Any]:
        trained = None  # all of it
        if freezing.is_partial(config):
            trained = freezing.trainable_mask(config, logical_names(model, objective, batch))

        def gradient(params: Any, *args: Any) -> tuple[Any, Any]:
            def loss(params: Any) -> Any:
                return loss_sum(freezing.stop_frozen_gradients(trained, params), *args)

            grads, found = jax.grad(loss, has_aux=True)(params)
            return jax.tree.map(lambda g: g.astype(jnp.float32), freezing.select_trainable(trained, grads)), found

        if microbatches == 1:
            return gradient(params, statistics, batch, hyper, key)
        # Row i goes to part i % microbatches, so that every device keeps the rows it has.
        parts = jax.tree.map(lambda x: jnp.moveaxis(x.reshape(-1, microbatches, *x.shape[1:]), 1, 0), dict(batch))

        def add(total: Any, part: tuple[jax.Array, Batch]) -> tuple[Any, None]:
            index, rows = part
            found = gradient(params, statistics, rows, hyper, jax.random.fold_in(key, index))
            return jax.tree.map(jnp.add, total, found), None

        first = jax.tree.map(lambda x: x[0], parts)
        shapes = jax.eval_shape(gradient, params, statistics, first, hyper, key)
        _, (scores, kept) = shapes
        assert not kept and 'aux_loss' not in scores, 'statistics and auxiliary losses need microbatches=1'
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        return jax.lax.scan(add, zeros, (jnp.arange(microbatches), parts))[0]

    def step(state: TrainState, batch: Batch, hyper: Hyperparameters) -> tuple[TrainState, dict[str, Any]]:
        key = step_key(hyper.seed, state.step + 1)
        abstract = abstract_variables(model, objective, batch)['params']
        spent = {
            'tokens': sum(jnp.sum(batch[name] >= 0) for name in batch if name.endswith('positions')),
            'flops': jnp.float32(flops.model_flops(config, abstract, batch)),
        }
        batch = objective.weigh(batch, objective.weight(hyper.second_loss_weight))
        if objective.predict is None and config.model.family != 'encoder':
            batch = ring_attention.balance(batch)  # whose order no loss looks at
        grads, (scores, statistics) = accumulated(state.params, state.statistics, batch, hyper, key)
        weight = jnp.maximum(scores['loss'][1], 1.0)
        grads = jax.tree.map(lambda g: g / weight, grads)
        rate = learning_rate(
            config.optimizer.schedule,
            hyper,
            state.step + 1,
            num_steps=config.train.num_steps or 1,
            emb_dim=base_width(config.model),
        )
        extra = {'learning_rate': rate, 'weight_decay': hyper.weight_decay}
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params, **extra)
        exact = precision.master_params(optax.apply_updates(state.params, updates), opt_state)
        params = jax.tree.map(lambda x, old: x.astype(old.dtype), exact, state.params)
        averages = moving_average(state.averages, exact, hyper.ema_decay, state.step + 1)
        norm = optax.tree.norm(grads)
        good, watch = skipping.update_guard(
            state.guard, state.step, scores['loss'][0] / weight, norm, hyper.skip_spikes
        )
        left = state.replace(step=state.step + 1, guard=watch)
        made = TrainState(state.step + 1, params, opt_state, averages, statistics, watch)
        state = jax.tree.map(lambda new, old: jnp.where(good, new, old), made, left)
        return state, {'scores': scores, 'grad_norm': norm, 'learning_rate': rate, 'skipped': watch.skipped, **spent}

    return step


def moving_average(averages: Any, params: Any, decay: Scalar | None, step: jax.Array) -> Any:
    """Returns averages + (1 - d) (params - averages), d = min(decay, (1 + step) / (10 + step)): early ones count less.

    Args:
      averages: float32; None where decay is None.
      params: after update number `step`, counted from 1.
      decay: None is off.
      step: int32.
    """
    if decay is None:
        return None
    share = 1 - jnp.minimum(decay, (1 + step) / (10 + step))
    # Differences this way round leave a mean of -0.0 as it is.
    return jax.tree.map(lambda mean, x: mean - share * (mean - x.astype(mean.dtype)), averages, params)
