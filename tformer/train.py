"""Training: one straight line from a config to a finished workdir."""

import contextlib
import dataclasses
import functools
import pathlib
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from tformer import checkpoint, evaluate, freezing, metrics, processes, resume, sharding, workdir
from tformer import config as config_lib
from tformer.config import Config
from tformer.data import pipeline
from tformer.data.tokenizers import Tokenizers
from tformer.errors import Stopped, UserError
from tformer.state import TrainState, count_parameters, evaluation_variables
from tformer.step import Batch
from tformer.stopping import Stops


@dataclasses.dataclass(frozen=True)
class Trained:
    """What `train` leaves: the resolved config, the tokenizers, and the steps it ended and was best at."""

    config: Config
    tokenizers: Tokenizers
    step: int
    best_step: int
    num_parameters: int


@dataclasses.dataclass(frozen=True)
class Best:
    """The most merit that an evaluation found, and how many evaluations since have found less."""

    merit: float | None = None
    stale: int = 0

    def and_then(self, merit: float) -> 'Best':
        """Returns the best after one more evaluation."""
        return Best(merit) if self.merit is None or merit > self.merit else Best(self.merit, self.stale + 1)


def train(
    config: Config,
    directory: str | pathlib.Path,
    generated: evaluate.GenerationScores | None = None,
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
    config_lib.check(config)
    if config.evaluate.examples_while_training and jax.process_count() > 1:
        raise UserError('evaluate.examples_while_training is for one process; evaluate the finished run instead')
    home, mesh = pathlib.Path(directory), sharding.make_mesh(config.mesh)
    with contextlib.ExitStack() as closing:
        closing.enter_context(sharding.placed(mesh, config.mesh))
        if processes.first():
            closing.enter_context(workdir.held(home))
        stops = closing.enter_context(Stops(config.train.max_minutes))
        return _train(config, home, mesh, generated, may_differ, stops, closing)


def _train(
    config: Config,
    home: pathlib.Path,
    mesh: Mesh,
    generated: evaluate.GenerationScores | None,
    may_differ: Sequence[str],
    stops: Stops,
    closing: contextlib.ExitStack,
) -> Trained:
    # -------------------------------------------------------------------- data, model, state, and how far they are
    last = processes.same_number(lambda: checkpoint.sound(home, functools.partial(print, flush=True)) or 0) or None
    before = None if last is None else checkpoint.record(home, last)
    config, tokens, batches, valid = resume.open_data(config, home, mesh, before, may_differ)
    if processes.first():
        workdir.save_config(home, config)
    model, _, names, hyper, step, state = resume.assemble(config, home, batches, mesh, last)
    score, facts = evaluate.make_scorer(model, config, mesh), resume.facts(config, batches, tokens)
    number = saved = last or 0
    best, log, evaluated = Best(), Interval(), 0
    if before is not None:
        best, log, evaluated = Best(**before['best']), Interval(**before['interval']), before['evaluated']
    checkpoints = checkpoint.Checkpoints(home, config.train.keep_last, config.train.keep_every)
    writer = metrics.Writer(home if processes.first() else None, number, evaluated)
    progress = metrics.Progress(config.train.num_steps or 0, number)
    for end in (
        progress.close,
        writer.close,
        checkpoints.finish,
    ):  # of a run that fails, too
        closing.callback(end)
    trained = freezing.count_trained(freezing.trained_parts(config, names), state.params)
    progress.say(headline(state, trained, batches, mesh, number))

    # ----------------------------------------------------------------------------------------------- loop
    length, patience = config.train.num_steps or 0, config.train.patience or np.inf
    iterator = pipeline.iterate(batches, number, config, sharding.batch_share(mesh))
    while True:
        reason, merit = stops.reason(number), None
        if reason is None and evaluated < number and due(number, config.train.eval_every, length):
            try:
                with log.paused(), stops.at_once():
                    found = evaluation(config, state, valid, tokens, score, generated)
            except Stopped as asked:
                reason = str(asked)
            else:
                writer.write(number, found)
                progress.say(f'step {number} valid  ' + '  '.join(f'{k[6:]} {v:.4g}' for k, v in found.items()))
                merit = checkpoint.merit(config.train.best_metric, found[config.train.best_metric])
                best, evaluated = best.and_then(merit), number

        if saved < number and (reason or merit is not None or due(number, config.train.checkpoint_every, length)):
            run = {**facts, 'best': dataclasses.asdict(best), 'interval': log.so_far(), 'evaluated': evaluated}
            checkpoints.save(state, run, merit)
            saved = number
        elif merit is not None:
            checkpoints.judge(number, merit)
        if reason is not None and (number < length or evaluated < number):
            raise Stopped(f'{reason}: stopped after step {number:,} of {length:,}, which is saved')
        if number >= length or best.stale >= patience:
            break

        state, numbers = step(state, sharding.place_batch(batch := next(iterator), mesh), hyper)
        number, stops.begun = number + 1, True
        log.add(batch, numbers)
        if number % config.train.log_every == 0 or number == length:
            shown, skipped = log.summary()
            writer.write(number, {**shown, 'epoch': number / batches.steps_per_epoch})
            progress.update(number, shown)
            if skipped >= config.train.max_skipped:
                raise UserError(keep_skipped(home, batches, number, skipped))

    # ------------------------------------------------------------------------------------------------ end
    if number < length:
        progress.say(f'stopped: {best.stale} evaluations without a better {config.train.best_metric}')
    checkpoints.wait()
    return Trained(config, tokens, number, checkpoint.best(home) or number, count_parameters(state.params))


def due(number: int, every: int | None, length: int) -> bool:
    """Returns whether what happens `every` so many steps, or else at the end alone, happens after step `number`."""
    return number > 0 and (number % (every or length) == 0 or number == length)


def evaluation(
    config: Config,
    state: TrainState,
    valid: pipeline.Batches,
    tokens: Tokenizers,
    score: evaluate.Scorer,
    generated: evaluate.GenerationScores | None,
) -> dict[str, float]:
    """Returns the scores of the validation split by name, `valid/...`."""
    evaluated = evaluation_variables(state)
    found = score(evaluated, valid, config.train.eval_batches, tokens)
    if config.evaluate.examples_while_training and generated is not None:
        most = min(config.evaluate.examples_while_training, len(valid.records))
        found |= generated(config, evaluated, tokens, [valid.records[i] for i in range(most)])
    return {f'valid/{name}': value for name, value in found.items()}


def keep_skipped(home: pathlib.Path, batches: pipeline.Batches, number: int, skipped: int) -> str:
    """Writes the batch of the first of the last `skipped` steps to the workdir; returns what to tell of them."""
    first = number - skipped + 1
    file = home / 'skipped' / f'{first}.npz'
    if processes.first():
        file.parent.mkdir(exist_ok=True)
        np.savez(file, **batches.batch(first - 1))  # type: ignore[arg-type]
    return (
        f'steps {first:,} to {number:,} were not made: their loss or gradient is no number, or a spike; '
        f"the first one's batch is {file}, and `tformer replay --workdir={home} --step={first}` runs it again"
    )


def headline(state: TrainState, trained: int, batches: pipeline.Batches, mesh: Mesh, start: int) -> str:
    """Returns what a run says of itself before it begins."""
    number = count_parameters(state.params)
    parameters = f'{number:,} parameters' + (f' ({trained:,} of them trained)' if trained < number else '')
    resumed = f', resumed at step {start}' if start else ''
    return f'{parameters}, {batches.summary}, {mesh.size} device(s){resumed}'


class Interval:
    """The steps since the last report: their metrics, left on the devices until asked for, their tokens and time."""

    def __init__(self, sums: Mapping[str, Sequence[float]] | None = None):
        """Goes on from what `so_far` gave, or begins."""
        self._sums = {name: (pair[0], pair[1]) for name, pair in (sums or {}).items()}
        self._rate, self._skipped = 0.0, 0
        self._pending: list[dict[str, Any]] = []
        self._tokens, self._since = 0, time.monotonic()

    def add(self, batch: Batch, numbers: dict[str, Any]) -> None:
        """Counts one more step."""
        self._pending.append(numbers)
        self._tokens += sum(int((batch[name] >= 0).sum()) for name in batch if name.endswith('positions'))

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leaves the time of its block out of the tokens a second."""
        began = time.monotonic()
        try:
            yield
        finally:
            self._since += time.monotonic() - began

    def so_far(self) -> dict[str, Any]:
        """Returns the sums of the steps, as JSON has them, so that a resumed run reports what an unbroken one does."""
        for step in jax.device_get(self._pending):
            self._rate, self._skipped = float(step['learning_rate']), int(step['skipped'])
            found = {'skipped': (float(self._skipped > 0), 0.0)}
            if not self._skipped:
                scores = {name: pair for name, pair in step['scores'].items() if name in ('loss', 'aux_loss')}
                found |= scores | {'grad_norm': (step['grad_norm'], 1.0)}
            self._sums = metrics.add(self._sums, found)
        self._pending = []
        return {'sums': self._sums}

    def summary(self) -> tuple[dict[str, float], int]:
        """Returns (the means over the steps, the last one's learning rate among them; how many in a row were skipped).

        Steps that were skipped are counted where there are any, and are in no mean. Begins anew.
        """
        self.so_far()
        skipped, _ = self._sums.pop('skipped')
        means = metrics.means({'loss': (0.0, 0.0), 'grad_norm': (0.0, 0.0)} | self._sums)
        found = {
            **{f'train/{name}': value for name, value in means.items()},
            **({'train/skipped': skipped} if skipped else {}),
            'train/learning_rate': self._rate,
            'train/tokens_per_second': self._tokens / (time.monotonic() - self._since),
        }
        self._sums, self._tokens, self._since = {}, 0, time.monotonic()
        return found, self._skipped
