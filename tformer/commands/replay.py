"""A step of a run, run again: its batch, its loss row by row, and the numbers that training had."""

import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from tformer.config import Config
from tformer.data.batches import mixture, pipeline
from tformer.data.inspection import rendering
from tformer.data.tokenizers.tokenizers import Tokenizers
from tformer.distributed import sharding
from tformer.errors import UserError
from tformer.layers.dropout import DropoutRates
from tformer.training import checkpoint, setup, workdir
from tformer.training.state import TrainState, evaluation_variables


def replay(directory: str, step: int, overrides: Mapping[str, str] | None = None) -> Iterator[str]:
    """Yields lines on a step of a workdir: the numbers of its update, and each row of its batch with its loss.

    The state before it is that of the checkpoint next before it, or the one that training began with, trained on:
    on the mesh that the run had it is the same to the bit.

    Args:
      directory: the workdir; nothing in it changes.
      step: from 1.
      overrides: fields that change no update.

    Raises:
      UserError: no workdir, no such step, or a field that may not change.
    """
    home = pathlib.Path(directory)
    config = workdir.changed_config(home, overrides or {})
    if not 1 <= step <= (config.train.num_steps or 0):
        raise UserError(f'--step={step}: the run has steps 1 to {config.train.num_steps}')
    tokens, mesh = Tokenizers.load(home), sharding.make_mesh(config.mesh)
    records = mixture.load(config, 'train')
    batches = pipeline.Batches(config, tokens, 'train', training=True, records=records)
    with sharding.placed(mesh, config.mesh):
        last = checkpoint.latest_valid_before(home, before=step)
        parts = setup.assemble(config, home, batches, mesh, last)
        state = parts.state
        for number in range(last or 0, step - 1):
            state, _ = parts.step(state, sharding.place_batch(batches.batch(number), mesh), parts.hyper)
        batch = batches.batch(step - 1)
        placed = sharding.place_batch(batch, mesh)
        losses = jax.device_get(row_losses(parts, config, state, placed))
        _, numbers = parts.step(state, placed, parts.hyper)
    total, weight = numbers['scores']['loss']
    tags = 'tags' in batches.parts[0].examples.columns
    yield f'{home} step {step}, from {f"checkpoint {last}" if last else "the beginning"}'
    yield f'  loss {float(total) / max(float(weight), 1):.6g}  grad_norm {float(numbers["grad_norm"]):.6g}  ' + (
        'not made' if numbers['skipped'] else f'learning_rate {float(numbers["learning_rate"]):.4g}'
    )
    for index, loss in enumerate(losses.tolist()):
        yield f'row {index}, loss {loss:.4g} without dropout'
        yield from map(rendering.plain, rendering.row(batch, index, tokens, tags))


def row_losses(parts: setup.Parts, config: Config, state: TrainState, batch: dict[str, Any]) -> jax.Array:
    """Returns the loss [B] of each row of a batch alone, without dropout; 0 where nothing of it is scored."""
    model, objective = parts.program.model, parts.program.objective
    second = objective.weight(config.train.second_loss_weight)
    method = objective.method_for(config.train.loss_chunk)
    weights = [name for name in batch if name in ('weights', 'label_weights')]

    @jax.jit
    def losses(variables: Any, batch: dict[str, jax.Array]) -> jax.Array:
        outputs = model.apply(variables, batch, DropoutRates(), method=method)

        def of_row(index: jax.Array) -> jax.Array:
            kept = {name: jnp.zeros_like(batch[name]).at[index].set(batch[name][index]) for name in weights}
            alone = objective.weigh(batch | kept, second)
            total, weight = objective.scores(outputs, alone)['loss']
            return total / jnp.maximum(weight, 1e-9)

        return jax.lax.map(of_row, jnp.arange(len(batch['inputs'])))

    return losses(evaluation_variables(state.replace(averages=None)), batch)
