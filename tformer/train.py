"""Training: one straight line from a config to a finished workdir."""

import contextlib
import dataclasses
import functools
import pathlib
import time
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
from flax import linen as nn
from jax.sharding import Mesh

from tformer import checkpoint, evaluate, freezing, metrics, pretrained, sharding, workdir
from tformer import config as config_lib
from tformer.config import Config
from tformer.data import mixture, pipeline
from tformer.data.tokenizers import Tokenizers
from tformer.errors import NoSplitError, UserError, choose
from tformer.hyper import Hyper
from tformer.model import build
from tformer.objectives import OBJECTIVES
from tformer.optimizers import make_optimizer
from tformer.state import (
    TrainState,
    begin,
    count_parameters,
    evaluation_variables,
    logical_names,
    start_state,
    variables,
)
from tformer.step import Batch, make_train_step


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


def train(config: Config, directory: str | pathlib.Path, generated: evaluate.GenerationScores | None = None) -> Trained:
    """Trains as `config` says, in a workdir; continues where it holds a checkpoint.

    Args:
      config: a run.
      directory: the workdir, made where it does not exist.
      generated: scores of generated text, for the evaluations where config.evaluate.examples_while_training asks.

    Raises:
      UserError: anything in the config, the data or the workdir that is the user's to mend.
    """
    config_lib.check(config)
    mesh, rules = sharding.make_mesh(config.mesh), choose(sharding.RULES, config.mesh.rules, 'mesh.rules')
    with jax.set_mesh(mesh), nn.logical_axis_rules(rules), contextlib.ExitStack() as closing:
        return _train(config, pathlib.Path(directory), generated, mesh, rules, closing)


def _train(
    config: Config,
    home: pathlib.Path,
    generated: evaluate.GenerationScores | None,
    mesh: Mesh,
    rules: sharding.Rules,
    closing: contextlib.ExitStack,
) -> Trained:
    # ---------------------------------------------------------------------------------- data, model, state
    config, tokens, batches, valid = open_data(config, home, mesh)
    share = sharding.batch_share(mesh)
    model, objective = build(config.model), OBJECTIVES[config.train.objective]
    hyper, example = Hyper.of(config), sharding.place_batch(batches.batch(0, share), mesh)
    names = logical_names(model, objective, example)
    optimizer = make_optimizer(config, names)
    state, shardings = start_state(model, objective, optimizer, hyper, example, mesh, rules)
    step = make_train_step(model, objective, optimizer, config)
    step = jax.jit(step, donate_argnums=0, out_shardings=(shardings, None))
    score, data = evaluate.make_scorer(model, config, mesh), amounts(batches, tokens)
    saved, best = checkpoint.Checkpoints(home, config.train.keep_last), Best()
    if saved.latest is not None:
        state, run = saved.restore(state)
        best = Best(**run['best'])
    elif config.train.init_from is not None:
        fresh, where = (variables(tree.params, tree.statistics) for tree in (state, shardings))
        loaded = pretrained.load(config.train.init_from, fresh, where, config.train.init_except)
        start_from = jax.jit(functools.partial(begin, optimizer), out_shardings=shardings)
        state = start_from(hyper, loaded['params'], loaded.get('statistics', {}))

    # ----------------------------------------------------------------------------------------------- loop
    length, patience, start = config.train.num_steps or 0, config.train.patience or np.inf, int(state.step)
    writer, progress, log = metrics.Writer(home, start), metrics.Progress(length, start), Interval()
    for opened in (progress, writer, saved):  # a run that fails, too, ends once its last checkpoint is on disk
        closing.callback(opened.close)
    trained = freezing.count_trained(freezing.trained_parts(config, names), state.params)
    progress.say(headline(state, trained, batches, mesh, start))
    iterator = pipeline.iterate(batches, start, config, share)
    for number in range(start + 1, length + 1):
        if best.stale >= patience:
            progress.say(f'stopped: {best.stale} evaluations without a better {config.train.best_metric}')
            break
        batch = next(iterator)
        state, numbers = step(state, sharding.place_batch(batch, mesh), hyper)
        log.add(batch, numbers)

        if number % config.train.log_every == 0 or number == length:
            shown = log.summary()
            if not np.isfinite(shown['train/loss']):
                raise UserError(f'step {number}: the training loss is {shown["train/loss"]}; a lower rate may help')
            writer.write(number, {**shown, 'epoch': number / batches.steps_per_epoch})
            progress.update(number, shown)

        merit = None
        if number % (config.train.eval_every or length) == 0 or number == length:
            with log.paused():
                evaluated = evaluation_variables(state)
                found = score(evaluated, valid, config.train.eval_batches, tokens)
                if config.evaluate.examples_while_training and generated is not None:
                    most = min(config.evaluate.examples_while_training, len(valid.records))
                    records = [valid.records[i] for i in range(most)]
                    found |= generated(config, evaluated, tokens, records)
            found = {f'valid/{name}': value for name, value in found.items()}
            writer.write(number, found)
            progress.say(f'step {number} valid  ' + '  '.join(f'{k[6:]} {v:.4g}' for k, v in found.items()))
            merit = checkpoint.merit(config.train.best_metric, found[config.train.best_metric])
            best = best.and_then(merit)

        if number % (config.train.checkpoint_every or length) == 0 or merit is not None:
            saved.save(state, {'best': dataclasses.asdict(best), 'data': data}, merit)

    # ------------------------------------------------------------------------------------------------ end
    end = int(state.step)
    return Trained(config, tokens, end, saved.best or end, count_parameters(state.params))


def open_data(
    config: Config, home: pathlib.Path, mesh: Mesh
) -> tuple[Config, Tokenizers, pipeline.Batches, pipeline.Batches]:
    """Returns (the resolved config, the tokenizers, the training batches, the validation batches) of a workdir."""
    choose(dict.fromkeys(evaluate.score_names(config)), config.train.best_metric, 'train.best_metric')
    try:
        home.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f'--workdir={home}: {error.strerror}') from error
    records = mixture.load(config, 'train')
    tokens = workdir.tokenizers(home, config, records)
    if tokens.labels and config.evaluate.positive_label is not None:
        choose(dict.fromkeys(tokens.labels), config.evaluate.positive_label, 'evaluate.positive_label')
    config = dataclasses.replace(
        config, data=dataclasses.replace(config.data, row_multiple=row_multiple(config, home, mesh))
    )
    batches = pipeline.Batches(config, tokens, 'train', training=True, records=records)
    config = resolved(config, tokens, batches.steps_per_epoch)
    workdir.check_config(home, config)
    if workdir.begun(home):
        same_data(checkpoint.load_run(home)['data'], amounts(batches, tokens))
    workdir.save_config(home, config)
    valid = pipeline.Batches(config, tokens, 'valid', training=False)
    with contextlib.suppress(NoSplitError):  # what is wrong with it is better known before training than after
        pipeline.Batches(config, tokens, 'test', training=False)
    return config, tokens, batches, valid


def row_multiple(config: Config, home: pathlib.Path | None, mesh: Mesh) -> int | None:
    """Returns what the rows of a data.batch_tokens batch are rounded to; None where train.batch_size says the rows.

    It is what the run began with, so that batches stay the same on other devices.

    Raises:
      UserError: the rows do not divide by microbatches times the ways that the mesh splits them.
    """
    ways, rows = sharding.batch_ways(mesh), config.train.batch_size
    needed = config.train.microbatches * ways
    asked = f'train.microbatches={config.train.microbatches} x the {ways} ways that the mesh splits it'
    if config.data.batch_tokens is None:
        if rows % needed:
            near = max(1, round(rows / needed)) * needed
            raise UserError(f'train.batch_size={rows} is no multiple of {asked}; nearest that is: {near}')
        return None
    began = workdir.load_config(home).data.row_multiple if home and workdir.begun(home) else None
    multiple = config.data.row_multiple or began or needed
    if multiple % needed:
        raise UserError(f'data.row_multiple={multiple} is no multiple of {asked}, {needed}')
    return multiple


def amounts(batches: pipeline.Batches, tokens: Tokenizers) -> dict[str, int | float | str]:
    """Returns what tells whether a step's batch is the same as in an earlier part of the run."""
    return {
        'tokenizers': tokens.fingerprint,
        'training examples': batches.num_examples,
        'steps an epoch': batches.steps_per_epoch,
        'fingerprint of the data': batches.fingerprint,
    }


def same_data(before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raises a `UserError` where the data, or how they become batches, are not those of the checkpoint."""
    differing = [f'{name} {before.get(name)} there, {now[name]} here' for name in now if before.get(name) != now[name]]
    if differing:
        raise UserError(f'the checkpoint is of other data: {"; ".join(differing)}')


def headline(state: TrainState, trained: int, batches: pipeline.Batches, mesh: Mesh, start: int) -> str:
    """Returns what a run says of itself before it begins."""
    number = count_parameters(state.params)
    parameters = f'{number:,} parameters' + (f' ({trained:,} of them trained)' if trained < number else '')
    resumed = f', resumed at step {start}' if start else ''
    return f'{parameters}, {batches.summary}, {mesh.size} device(s){resumed}'


def resolved(config: Config, tokens: Tokenizers, steps_per_epoch: float) -> Config:
    """Returns `config` with what the tokenizers and the data decide filled in."""
    return config_lib.resolve(
        config,
        vocab_size=tokens.target.vocab_size,
        encoder_vocab_size=tokens.source.vocab_size if tokens.source is not None else None,
        num_classes=len(tokens.labels) or None,
        steps_per_epoch=steps_per_epoch,
    )


class Interval:
    """The steps since the last report: their metrics, left on the devices until asked for, their tokens and time."""

    def __init__(self) -> None:
        self._numbers: list[dict[str, Any]] = []
        self._tokens, self._since = 0, time.monotonic()

    def add(self, batch: Batch, numbers: dict[str, Any]) -> None:
        """Counts one more step."""
        self._numbers.append(numbers)
        self._tokens += sum(int((batch[name] >= 0).sum()) for name in batch if name.endswith('positions'))

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leaves the time of its block out of the tokens a second."""
        began = time.monotonic()
        yield
        self._since += time.monotonic() - began

    def summary(self) -> dict[str, float]:
        """Returns the means over the steps, the last one's learning rate among them, and begins anew."""
        numbers = jax.device_get(self._numbers)
        totals: dict[str, tuple[float, float]] = {}
        for step in numbers:
            trained = {name: pair for name, pair in step['scores'].items() if name in ('loss', 'aux_loss')}
            totals = metrics.add(totals, trained)
        found = {
            **{f'train/{name}': value for name, value in metrics.means(totals).items()},
            'train/grad_norm': float(np.mean([step['grad_norm'] for step in numbers])),
            'train/learning_rate': float(numbers[-1]['learning_rate']),
            'train/tokens_per_second': self._tokens / (time.monotonic() - self._since),
        }
        self._numbers, self._tokens, self._since = [], 0, time.monotonic()
        return found
