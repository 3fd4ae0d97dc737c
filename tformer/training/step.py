"""The train step, a pure function: the gradient of one batch, in any number of microbatches, and one update."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

from tformer.config import Config
from tformer.distributed import sharding
from tformer.layers import masks
from tformer.layers.logits import Chunk
from tformer.layers.parallel import ring_attention
from tformer.layers.parametrization import base_width
from tformer.objectives import Objective, Teach, loss_chunk
from tformer.optim import freezing, precision, schedules
from tformer.optim.hyperparameters import Hyperparameters, Scalar
from tformer.training import flops, skipping
from tformer.training.state import OFFLOADED, TrainState, abstract_variables, logical_names, step_key, variables
from tformer.training.teacher import Teacher

Batch = Mapping[str, Any]
Step = Callable[..., tuple[TrainState, dict[str, Any]]]  # of `make_train_step`
# (params, statistics, batch, hyper, key) -> (loss sum, (scores, statistics)), or with its gradient for the loss sum.
Loss = Callable[[Any, Any, Batch, Hyperparameters, jax.Array], tuple[Any, tuple[dict[str, Any], Any]]]

_SAMPLE = 1 << 30  # folded into a step's key for what the model itself draws; numbers of microbatches are below it


def make_train_step(
    model: nn.Module,
    objective: Objective,
    optimizer: optax.GradientTransformation,
    config: Config,
    teacher: Teacher | None = None,
) -> Step:
    """Returns the pure step(state, batch, hyper[, variables of the teacher]) -> (state, metrics), to be jitted by the
    caller.

    Rows are as `Batches` makes them: padded behind, with positions that count up (`masks.check_order`).

    The gradient is that of the loss summed over the batch, divided once by its weight, so that any number of
    microbatches gives the same. A step that the guard rejects (skipping.py) changes only its number and the guard.

    Metrics: `scores` are (sum, weight) pairs, among them `aux_loss` where layers sow one; `grad_norm` is that before
    clipping; `learning_rate`; `skipped` counts the skipped steps in a row; `tokens` of both stacks, without padding;
    `flops` of the whole batch (`flops.model_flops`).
    """
    optimizer = optax.with_extra_args_support(optimizer)

    def step(
        state: TrainState, batch: Batch, hyper: Hyperparameters, taught: Any = None
    ) -> tuple[TrainState, dict[str, Any]]:
        teach = objective.taught_by(None if teacher is None else teacher.model, taught, config.train)
        gradient = in_microbatches(make_gradient(model, objective, config, teach), config.train.microbatches)
        key = step_key(hyper.seed, state.step + 1)
        abstract = abstract_variables(model, objective, batch)['params']
        spent = {
            'tokens': sum(jnp.sum(batch[name] >= 0) for name in batch if name.endswith('positions')),
            'flops': jnp.float32(flops.step_flops(config, abstract, batch, teacher)),
        }
        batch = objective.weigh(batch, objective.weight(hyper.second_loss_weight))
        order: masks.Order = 'behind'
        if objective.predict is None and config.model.family != 'encoder':
            batch, order = ring_attention.balance(batch)  # the order of tokens enters no loss

        with masks.ordered(order):
            grads, (scores, statistics) = gradient(state.params, state.statistics, batch, hyper, key)
        weight = jnp.maximum(scores['loss'][1], 1.0)
        grads = jax.tree.map(lambda g: g / weight, sharding.as_stored(grads, abstract))
        learning_rate = schedules.learning_rate(
            config.optimizer.schedule,
            hyper,
            state.step + 1,
            num_steps=config.train.num_steps or 1,
            emb_dim=base_width(config.model),
        )
        if config.optimizer.offload:
            state, grads = fetched(state, grads)
        updated_state = update(optimizer, state, grads, hyper, learning_rate).replace(statistics=statistics)

        norm = optax.tree.norm(grads)
        should_apply, guard_state = skipping.update_guard(
            state.guard, state.step, scores['loss'][0] / weight, norm, hyper.skip_spikes
        )
        updated_state = updated_state.replace(guard=guard_state)
        skipped_state = state.replace(step=state.step + 1, guard=guard_state)
        state = jax.tree.map(lambda new, old: jnp.where(should_apply, new, old), updated_state, skipped_state)
        metrics = {'scores': scores, 'grad_norm': norm, 'learning_rate': learning_rate, 'skipped': guard_state.skipped}
        return state, metrics | spent

    return step


def make_loss(model: nn.Module, objective: Objective, chunk: Chunk, teach: Teach | None = None) -> Loss:
    """Returns loss(params, statistics, batch, hyper, key) -> (the loss's sum over the batch, (scores, statistics)).

    What layers sow in the collection `losses` (means over tokens) is multiplied by the batch's weight and added.
    """

    def loss(params: Any, statistics: Any, batch: Batch, hyper: Hyperparameters, key: jax.Array) -> Any:
        method, teaching = (objective.method_for(chunk), ()) if teach is None else teach(batch, chunk)
        drops = bool(jax.tree.leaves(hyper.dropout_rates))
        rngs = {'sample': jax.random.fold_in(key, _SAMPLE)} | ({'dropout': key} if drops else {})
        outputs, found = model.apply(
            variables(params, statistics),
            batch,
            hyper.dropout_rates,
            rngs=rngs,
            method=method,
            mutable=['statistics', 'losses'],
        )
        scores = objective.scores(outputs, batch, hyper.label_smoothing, hyper.z_loss, *teaching)
        total, weight = scores['loss']
        sown = jax.tree.leaves(found.get('losses', {}))
        if sown:
            scores['aux_loss'] = (weight * sum(jnp.sum(x.astype(jnp.float32)) for x in sown), weight)
            total += scores['aux_loss'][0]
        return total, (scores, found.get('statistics', {}))

    return loss


def make_gradient(model: nn.Module, objective: Objective, config: Config, teach: Teach | None = None) -> Loss:
    """Returns gradient(params, statistics, batch, hyper, key) -> (float32 gradient of the loss, (scores, statistics)).

    Wholly frozen parameters (freezing.py) have no gradient, and so no part in its norm.
    """
    loss = make_loss(model, objective, loss_chunk(config), teach)

    def gradient(params: Any, statistics: Any, batch: Batch, hyper: Hyperparameters, key: jax.Array) -> Any:
        trainable = None  # all parameters
        if freezing.is_partial(config):
            trainable = freezing.trainable_mask(config, logical_names(model, objective, batch))

        def loss_of(params: Any) -> Any:
            return loss(freezing.stop_frozen_gradients(trainable, params), statistics, batch, hyper, key)

        grads, found = jax.grad(loss_of, has_aux=True)(params)
        return jax.tree.map(lambda g: g.astype(jnp.float32), freezing.select_trainable(trainable, grads)), found

    return gradient


def in_microbatches(gradient: Loss, count: int) -> Loss:
    """Returns `gradient` as a sum over `count` microbatches, one after another.

    Statistics and sown losses are not exact in parts: checks refuse them with more than one microbatch.
    """
    if count == 1:
        return gradient
    gradient = jax.jit(gradient, inline=True)  # traced once, for its shapes and for the scan

    def accumulated(params: Any, statistics: Any, batch: Batch, hyper: Hyperparameters, key: jax.Array) -> Any:
        # Row i goes to microbatch i % count, so that every device keeps the rows it has.
        parts = jax.tree.map(lambda x: jnp.moveaxis(x.reshape(-1, count, *x.shape[1:]), 1, 0), dict(batch))

        def add(total: Any, part: tuple[jax.Array, Batch]) -> tuple[Any, None]:
            index, rows = part
            found = gradient(params, statistics, rows, hyper, jax.random.fold_in(key, index))
            return jax.tree.map(jnp.add, total, found), None

        first = jax.tree.map(lambda x: x[0], parts)
        shapes = jax.eval_shape(gradient, params, statistics, first, hyper, key)
        _, (scores, kept) = shapes
        assert not kept and 'aux_loss' not in scores, 'statistics and auxiliary losses need microbatches=1'
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        return jax.lax.scan(add, zeros, (jnp.arange(count), parts))[0]

    return accumulated


def update(
    optimizer: optax.GradientTransformationExtraArgs,
    state: TrainState,
    grads: Any,
    hyper: Hyperparameters,
    learning_rate: jax.Array,
) -> TrainState:
    """Returns the state after one update: step, parameters, optimizer state and moving average."""
    extra = {'learning_rate': learning_rate, 'weight_decay': hyper.weight_decay}
    updates, opt_state = optimizer.update(grads, state.opt_state, state.params, **extra)
    master = precision.master_params(optax.apply_updates(state.params, updates), opt_state)
    params = jax.tree.map(lambda x, old: x.astype(old.dtype), master, state.params)
    averages = moving_average(state.averages, master, hyper.ema_decay, state.step + 1)
    return state.replace(step=state.step + 1, params=params, opt_state=opt_state, averages=averages)


def fetched(state: TrainState, grads: Any) -> tuple[TrainState, Any]:
    """Returns `state` with what waits in the host's memory on the devices, and the gradients, before which it does not
    come."""
    waiting = {name: getattr(state, name) for name in OFFLOADED}
    waiting, grads = jax.lax.optimization_barrier((waiting, grads))
    return state.replace(**jax.device_put(waiting, jax.memory.Space.Device)), grads


def moving_average(averages: Any, params: Any, decay: Scalar | None, step: jax.Array) -> Any:
    """Returns averages + (1 - d) (params - averages), d = min(decay, (1 + step) / (10 + step)): it starts fast.

    The averages are float32, or None where the decay is None; `step` counts updates from 1, int32.
    """
    if decay is None:
        return None
    share = 1 - jnp.minimum(decay, (1 + step) / (10 + step))
    # Differences this way round leave a mean of -0.0 as it is.
    return jax.tree.map(lambda mean, x: mean - share * (mean - x.astype(mean.dtype)), averages, params)
