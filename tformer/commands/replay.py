"""Runs one step of a run again and shows its batch, with the loss of each row.

    tformer replay --workdir=DIR --step=N [--config.section.field=value ...]

The state before the step is that of the newest checkpoint before it, or the run's initial one, trained on. On the mesh
that the run had, it is the same to the bit.
"""

import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from tformer import commands
from tformer.data.batches import mixture, pipeline
from tformer.data.inspection import rendering
from tformer.distributed import meshes, sharding
from tformer.distributed.compilers import jit
from tformer.errors import UserError
from tformer.layers import masks
from tformer.layers.dropout import DropoutRates
from tformer.objectives import loss_chunk
from tformer.training import checkpoint, digests, setup, teacher
from tformer.training import workdir as workdir_lib
from tformer.training.program import Program, make_program
from tformer.training.state import TrainState
from tformer.training.state import variables as variables_of

SHARED_FLAGS = ('workdir',)
FLAGS = {'step': ('int', None, 'the number of the step, from 1')}


def run(arguments: list[str], overrides: dict[str, str], flags: commands.Flags) -> None:
    for line in replay(commands.needed(flags, 'workdir'), int(commands.needed(flags, 'step')), overrides):
        print(line, flush=True)


def replay(workdir: str | pathlib.Path, step: int, overrides: Mapping[str, str] | None = None) -> Iterator[str]:
    """Yields lines on one step of a run: the numbers of its update, and each row of its batch with its loss.

        >>> print('\\n'.join(tformer.replay('runs/demo', 40)))

    Steps count from 1. Nothing in the workdir changes. The overrides are config fields that change no update.

    Raises:
      UserError: the directory is not a workdir, there is no such step, or a field may not change.
    """
    home = pathlib.Path(workdir)
    config = workdir_lib.changed_config(home, overrides or {})
    if not 1 <= step <= (config.train.num_steps or 0):
        raise UserError(f'--step={step}: the run has steps 1 to {config.train.num_steps}')
    recorded = next((each for each in checkpoint.steps(home) if each >= step), None)
    if recorded is not None:
        config = workdir_lib.as_trained(config, checkpoint.read_metadata(home, recorded))
    tokens, mesh = workdir_lib.load_tokenizers(home), meshes.make_mesh(config.mesh)
    records = mixture.load(config, 'train')
    batches = pipeline.Batches(config, tokens, 'train', training=True, records=records)
    if newest := checkpoint.newest_metadata(home):
        now = setup.data_fingerprint(batches, tokens) | teacher.fingerprint(config, tokens)
        setup.check_same_data(newest[1]['data'], now)
    with sharding.placed(mesh, config.mesh):
        before = (number for number in reversed(checkpoint.steps(home)) if number < step)
        whole = (number for number in before if digests.find_corruption(checkpoint.directory(home, number)) is None)
        last = next(whole, None)
        program = make_program(config, batches.batch(0), mesh)
        state = setup.load_state(program, config, home, last)
        for number in range(last or 0, step - 1):
            state, _ = program.train_step(state, batches.batch(number))
        batch = batches.batch(step - 1)
        losses = jax.device_get(row_losses(program, state, meshes.place_batch(batch, mesh)))
        _, numbers = program.train_step(state, batch)
    total, weight = numbers['scores']['loss']
    tags = 'tags' in batches.parts[0].examples.columns
    yield f'{home} step {step}, from {f"checkpoint {last}" if last else "the beginning"}'
    yield f'  loss {float(total) / max(float(weight), 1):.6g}  grad_norm {float(numbers["grad_norm"]):.6g}  ' + (
        'not applied' if numbers['skipped'] else f'learning_rate {float(numbers["learning_rate"]):.4g}'
    )
    for index, loss in enumerate(losses.tolist()):
        yield f'row {index}, loss {loss:.4g} without dropout'
        yield from map(rendering.plain, rendering.row(batch, index, tokens, tags))


def row_losses(program: Program, state: TrainState, batch: dict[str, Any]) -> jax.Array:
    """Returns the loss [B] of each row by itself, without dropout; 0 for a row that has nothing to score.

    It is that of the parameters that the step changes, also where their averages are evaluated.
    """
    model, objective, config = program.model, program.objective, program.config
    second = objective.weight(config.train.second_loss_weight)
    chunk, taught = loss_chunk(config), program.taught[0] if program.taught else None
    teacher = None if program.teacher is None else program.teacher.model
    nothing = {'weights': 0, 'label_weights': 0, 'positions': -1}  # what scores of other rows count by

    @jit
    def losses(variables: Any, batch: dict[str, jax.Array], taught: Any) -> jax.Array:
        with masks.ordered('behind'):
            method, teaching = objective.taught_by(teacher, taught, config.train)(batch, chunk)
            outputs = model.apply(variables, batch, DropoutRates(), method=method)

        def of_row(index: jax.Array) -> jax.Array:
            kept = {
                name: jnp.full_like(batch[name], value).at[index].set(batch[name][index])
                for name, value in nothing.items()
                if name in batch
            }
            alone = objective.weigh(batch | kept, second)
            total, weight = objective.scores(outputs, alone, None, None, *teaching)['loss']
            return total / jnp.maximum(weight, 1e-9)

        return jax.lax.map(of_row, jnp.arange(len(batch['inputs'])))

    return losses(variables_of(state.params, state.statistics), batch, taught)
