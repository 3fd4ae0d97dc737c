"""Training: one straight line from a config to a finished workdir."""

import contextlib
import dataclasses
import functools
import pathlib
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import Mesh

from tformer import checks
from tformer.config import Config
from tformer.data.batches import pipeline
from tformer.data.tokenizers.tokenizers import Tokenizers
from tformer.distributed import processes, sharding
from tformer.errors import Stopped, UserError
from tformer.evaluation import scorer
from tformer.optim import freezing
from tformer.training import checkpoint, setup, workdir, writers
from tformer.training.program import make_program
from tformer.training.recorder import RunRecorder
from tformer.training.state import TrainState, count_parameters
from tformer.training.stopping import StopMonitor


@dataclasses.dataclass(frozen=True)
class Trained:
    """What `train` leaves: the resolved config, the tokenizers, and the steps it ended and was best at."""

    config: Config
    tokenizers: Tokenizers
    step: int
    best_step: int
    num_parameters: int


def train(
    config: Config,
    directory: str | pathlib.Path,
    generated: scorer.GenerationScores | None = None,
    may_differ: Sequence[str] = (),
) -> Trained:
    """Trains as `config` says, in a workdir; continues where it holds a checkpoint.

    Args:
      config: a run.
      directory: the workdir, made where it does not exist.
      generated: scores of generated text, for the evaluations where config.evaluate.examples_while_training asks.
      may_differ: dotted fields that may differ from the checkpoint's, besides those that never matter.

    Raises:
      UserError: anything in the config, the data or the workdir that is the user's to mend.
      Stopped: a signal or train.max_minutes asked for it, and all is saved.
    """
    checks.check(config)
    if config.evaluate.examples_while_training and jax.process_count() > 1:
        raise UserError('evaluate.examples_while_training is for one process; evaluate the finished run instead')
    home, mesh = pathlib.Path(directory), sharding.make_mesh(config.mesh)
    with contextlib.ExitStack() as closing:
        closing.enter_context(sharding.placed(mesh, config.mesh))
        if processes.first():
            closing.enter_context(workdir.lock(home))
        stops = closing.enter_context(StopMonitor(config.train.max_minutes))
        return _train(config, home, mesh, generated, may_differ, stops, closing)


def _train(
    config: Config,
    home: pathlib.Path,
    mesh: Mesh,
    generated: scorer.GenerationScores | None,
    may_differ: Sequence[str],
    stops: StopMonitor,
    closing: contextlib.ExitStack,
) -> Trained:
    # -------------------------------------------------------------------- data, model, state, and how far they are
    say = functools.partial(print, flush=True)
    last = processes.same_number(lambda: checkpoint.latest_valid(home, say) or 0) or None
    before = None if last is None else checkpoint.read_metadata(home, last)
    data = setup.load_data(config, home, mesh, before, may_differ)
    config, tokens, batches, _ = data
    if processes.first():
        workdir.save_config(home, config)
    program = make_program(config, batches.batch(0, sharding.batch_share(mesh)), mesh)
    hyper, step, state = program.hyper, program.jitted_step, setup.load_state(program, config, home, last)
    recorder = RunRecorder(data, home, scorer.make_scorer(program.model, config, mesh), generated, last)
    number, length, patience = last or 0, config.train.num_steps or 0, config.train.patience or np.inf
    progress = writers.Progress(length, number)
    closing.callback(progress.close)
    closing.callback(recorder.close)  # of a run that fails, too
    trained = freezing.count_trainable(freezing.trainable_mask(config, program.names), state.params)
    progress.say(headline(state, trained, batches, mesh, number))

    # ----------------------------------------------------------------------------------------------- loop
    iterator = pipeline.iterate(batches, number, config, sharding.batch_share(mesh))
    while True:
        reason = stops.reason(number)
        if reason is None and recorder.should_evaluate(number):
            try:
                with recorder.metrics.paused(), stops.at_once():
                    found = recorder.evaluate(number, state)
            except Stopped as asked:
                reason = str(asked)
            else:
                progress.say(f'step {number} valid  ' + '  '.join(f'{k[6:]} {v:.4g}' for k, v in found.items()))
        if recorder.should_save(number, asked=reason is not None):
            recorder.save(number, state)
        if reason is not None and (number < length or recorder.evaluated < number):
            raise Stopped(f'{reason}: stopped after step {number:,} of {length:,}, which is saved')
        if number >= length or recorder.best.stale >= patience:
            break

        state, numbers = step(state, sharding.place_batch(next(iterator), mesh), hyper)
        number, stops.begun = number + 1, True
        recorder.metrics.add(numbers)
        if recorder.should_report(number):
            shown, fault = recorder.report(number)
            progress.update(number, shown)
            if fault is not None:
                raise UserError(fault)

    # ------------------------------------------------------------------------------------------------ end
    if number < length:
        progress.say(f'stopped: {recorder.best.stale} evaluations without a better {config.train.best_metric}')
    recorder.checkpoints.wait()
    return Trained(config, tokens, number, checkpoint.best(home) or number, count_parameters(state.params))


def headline(state: TrainState, trained: int, batches: pipeline.Batches, mesh: Mesh, start: int) -> str:
    """Returns what a run says of itself before it begins."""
    number = count_parameters(state.params)
    parameters = f'{number:,} parameters' + (f' ({trained:,} of them trained)' if trained < number else '')
    resumed = f', resumed at step {start}' if start else ''
    return f'{parameters}, {batches.summary}, {mesh.size} device(s){resumed}'
