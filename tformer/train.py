"""Training: `make_train_step` is pure; `train` is one straight line from a config to a finished workdir."""

import dataclasses
import pathlib
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

from tformer import checkpoint, evaluate, metrics, optimizers, sharding, workdir
from tformer import config as config_lib
from tformer.config import Config
from tformer.data import pipeline, sources
from tformer.data.tokenizers import Tokenizers
from tformer.errors import UserError, choose
from tformer.hyper import Hyper
from tformer.model import build
from tformer.objectives import OBJECTIVES, Objective, Scores
from tformer.state import TrainState, count_parameters, start_state, step_key

Batch = Mapping[str, Any]
Step = Callable[[TrainState, Batch, Hyper], tuple[TrainState, dict[str, Any]]]


def make_train_step(
    model: nn.Module, objective: Objective, optimizer: optax.GradientTransformation, config: Config
) -> Step:
    """Returns the pure step(state, batch, hyper) -> (state, metrics), to be jitted by the caller.

    The gradient is that of the loss's sum over the batch, divided once by its weight: computed in any number of
    microbatches it is the same. Metrics: `scores` of (sum, weight) pairs, `grad_norm` before clipping, `learning_rate`.
    """
    microbatches = config.train.microbatches

    def loss_sum(params: Any, batch: Batch, hyper: Hyper, key: jax.Array) -> tuple[jax.Array, Scores]:
        rngs = {'dropout': key} if jax.tree.leaves(hyper.rates) else {}
        logits: Any = model.apply({'params': params}, batch, hyper.rates, rngs=rngs, method=objective.method)
        scores = objective.scores(logits, batch, hyper.label_smoothing)
        return scores['loss'][0], scores

    def accumulated(params: Any, batch: Batch, hyper: Hyper, key: jax.Array) -> tuple[Any, Scores]:
        gradient = jax.grad(loss_sum, has_aux=True)
        if microbatches == 1:
            return gradient(params, batch, hyper, key)
        # Row i goes to part i % microbatches, so that every device keeps the rows it has.
        parts = jax.tree.map(lambda x: jnp.moveaxis(x.reshape(-1, microbatches, *x.shape[1:]), 1, 0), dict(batch))

        def add(total: Any, part: tuple[jax.Array, Batch]) -> tuple[Any, None]:
            index, rows = part
            grads_scores = gradient(params, rows, hyper, jax.random.fold_in(key, index))
            return jax.tree.map(jnp.add, total, grads_scores), None

        first = jax.tree.map(lambda x: x[0], parts)
        shapes = jax.eval_shape(gradient, params, first, hyper, key)
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        return jax.lax.scan(add, zeros, (jnp.arange(microbatches), parts))[0]

    def step(state: TrainState, batch: Batch, hyper: Hyper) -> tuple[TrainState, dict[str, Any]]:
        key = step_key(hyper.seed, state.step + 1)
        grads, scores = accumulated(state.params, batch, hyper, key)
        weight = jnp.maximum(scores['loss'][1], 1.0)
        grads = jax.tree.map(lambda g: g / weight, grads)
        direction, opt_state = optimizer.update(grads, state.opt_state, state.params)
        rate = optimizers.learning_rate(
            config.optimizer,
            hyper,
            state.step + 1,
            num_steps=config.train.num_steps or 1,
            emb_dim=config.model.emb_dim,
        )
        params = optimizers.descend(state.params, direction, rate, hyper.weight_decay)
        numbers = {'scores': scores, 'grad_norm': optax.tree.norm(grads), 'learning_rate': rate}
        return TrainState(state.step + 1, params, opt_state), numbers

    return step


@dataclasses.dataclass(frozen=True)
class Trained:
    """What `train` leaves: the resolved config, the tokenizers, and the steps it ended and was best at."""

    config: Config
    tokenizers: Tokenizers
    step: int
    best_step: int
    num_parameters: int


def train(config: Config, directory: str | pathlib.Path, generated: evaluate.GenerationScores | None = None) -> Trained:
    """Trains as `config` says, in a workdir; continues where it holds a checkpoint.

    Args:
      config: a run.
      directory: the workdir, made where it does not exist.
      generated: scores of generated text, called as (params, records) at evaluations where
        config.evaluate.examples_while_training says so.

    Raises:
      UserError: anything in the config, the data or the workdir that is the user's to mend.
    """
    config_lib.check(config)
    home = pathlib.Path(directory)
    home.mkdir(parents=True, exist_ok=True)

    # ------------------------------------------------------------------------------------------------ data
    mesh = sharding.make_mesh(config.mesh)
    rules = choose(sharding.RULES, config.mesh.rules, 'mesh.rules')
    rows = config.train.microbatches * sharding.batch_ways(mesh)
    records = sources.load(config.data, config.train.objective, 'train')
    tokens = workdir.tokenizers(home, config, records)
    batches = pipeline.Batches(config, tokens, 'train', training=True, multiple_of=rows, records=records)
    config = resolved(config, tokens, batches.steps_per_epoch)
    workdir.save_config(home, config)
    valid = pipeline.Batches(config, tokens, 'valid', training=False, multiple_of=rows)

    # ------------------------------------------------------------------------------------- model and state
    model, objective = build(config.model), OBJECTIVES[config.train.objective]
    optimizer = optimizers.make_optimizer(config.optimizer)
    hyper = Hyper.of(config)
    num_steps, every = config.train.num_steps, config.train.eval_every
    assert num_steps and every and config.train.checkpoint_every
    with jax.set_mesh(mesh), nn.logical_axis_rules(rules):
        state, shardings = start_state(model, objective, optimizer, hyper, batches.batch(0), mesh, rules)
        step = jax.jit(
            make_train_step(model, objective, optimizer, config), donate_argnums=0, out_shardings=(shardings, None)
        )
        score = evaluate.make_scorer(model, objective, mesh)
        saved = checkpoint.Checkpoints(home, config.train.keep_last)
        best, best_at, stale = None, 0, 0
        if saved.latest is not None:
            state, run = saved.restore(state, shardings)
            best, best_at, stale = run['best'], run['best_at'], run['stale']
        elif config.train.init_from is not None:
            state = state.replace(params=pretrained(config.train.init_from, state.params, shardings.params))
        start = int(state.step)

        # ------------------------------------------------------------------------------------------- loop
        writer, progress = metrics.Writer(home, start), metrics.Progress(num_steps, start)
        num_parameters = count_parameters(state.params)
        progress.say(
            f'{num_parameters:,} parameters, {batches.num_examples:,} training examples, '
            f'{batches.steps_per_epoch:,} steps an epoch, {mesh.size} device(s)'
            + (f', resumed at step {start}' if start else '')
        )
        placed = sharding.batch_sharding(mesh)
        pending: list[dict[str, Any]] = []
        tokens_seen, since = 0, time.monotonic()
        stop = stale >= (config.train.patience or np.inf)
        iterator = pipeline.iterate(batches, start, config)
        for number in range(start + 1, num_steps + 1):
            if stop:
                break
            batch = next(iterator)
            tokens_seen += sum(int((batch[name] >= 0).sum()) for name in batch if name.endswith('positions'))
            state, numbers = step(state, jax.device_put(batch, placed), hyper)
            pending.append(numbers)

            if number % config.train.log_every == 0 or number == num_steps:
                shown = summary(jax.device_get(pending), tokens_seen / (time.monotonic() - since))
                writer.write(number, {**shown, 'epoch': number / batches.steps_per_epoch})
                progress.update(number, shown)
                pending, tokens_seen, since = [], 0, time.monotonic()

            merit = None
            if number % every == 0 or number == num_steps:
                paused = time.monotonic()
                found = score(state.params, valid, config.train.eval_batches, tokens)
                if config.evaluate.examples_while_training and generated is not None:
                    shown_records = [valid.records[i] for i in range(config.evaluate.examples_while_training)]
                    found |= generated(config, state.params, tokens, shown_records)
                found = {f'valid/{name}': average for name, average in found.items()}
                metric = config.train.best_metric
                merit = checkpoint.merit(metric, choose(found, metric, 'train.best_metric'))
                if best is None or merit > best:
                    best, best_at, stale = merit, number, 0
                else:
                    stale += 1
                writer.write(number, found)
                progress.say(f'step {number} valid  ' + '  '.join(f'{k[6:]} {v:.4g}' for k, v in found.items()))
                stop = config.train.patience is not None and stale >= config.train.patience
                since += time.monotonic() - paused

            if number % config.train.checkpoint_every == 0 or merit is not None or stop:
                saved.save(state, {'best': best, 'best_at': best_at, 'stale': stale}, merit)

    # ------------------------------------------------------------------------------------------------- end
    end = int(state.step)
    if stop:
        progress.say(f'stopped at step {end}: {stale} evaluations without a better {config.train.best_metric}')
    best_at = saved.best or end
    for closed in (saved, writer, progress):
        closed.close()
    return Trained(config, tokens, end, best_at, num_parameters)


def resolved(config: Config, tokens: Tokenizers, steps_per_epoch: int) -> Config:
    """Returns `config` with what the tokenizers and the data decide filled in."""
    return config_lib.resolve(
        config,
        vocab_size=tokens.target.vocab_size,
        encoder_vocab_size=tokens.source.vocab_size if tokens.source is not None else None,
        num_classes=len(tokens.labels) or None,
        steps_per_epoch=steps_per_epoch,
    )


def summary(numbers: list[dict[str, Any]], tokens_per_second: float) -> dict[str, float]:
    """Returns the means over some steps' metrics, the last step's rate among them."""
    totals: dict[str, tuple[float, float]] = {}
    for step in numbers:
        totals = metrics.add(totals, {'loss': step['scores']['loss']})
    return {
        'train/loss': metrics.means(totals)['loss'],
        'train/grad_norm': float(np.mean([step['grad_norm'] for step in numbers])),
        'train/learning_rate': float(numbers[-1]['learning_rate']),
        'train/tokens_per_second': tokens_per_second,
    }


def pretrained(directory: str, params: Any, shardings: Any) -> Any:
    """Returns `params` with those of another workdir's best checkpoint where path and shape agree; prints which.

    Raises:
      UserError: a parameter is there in another shape, or none is there at all.
    """
    source, step = checkpoint.load_params(pathlib.Path(directory))
    theirs = {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(source)}
    fresh, loaded = set(), set()

    def take(path: Any, mine: jax.Array, placed: Any) -> jax.Array:
        name = jax.tree_util.keystr(path)
        if name not in theirs:
            fresh.add(name.split("'")[1])
            return mine
        if theirs[name].shape != mine.shape:
            raise UserError(f'{directory}: {name} has shape {theirs[name].shape}, this model needs {mine.shape}')
        loaded.add(name)
        return jax.device_put(theirs[name].astype(mine.dtype), placed)

    merged = jax.tree_util.tree_map_with_path(take, params, shardings)
    if not loaded:
        raise UserError(f'train.init_from={directory}: none of its parameters belong to this model')
    left = {name.split("'")[1] for name in theirs.keys() - loaded}
    print(
        f'{directory} step {step}: {len(loaded)} arrays loaded; fresh: {", ".join(sorted(fresh)) or "none"}; '
        f'left: {", ".join(sorted(left)) or "none"}'
    )
    return merged
