"""Trains a model, resumes by itself, and scores the best checkpoint at the end.

    tformer train --config=FILE[:argument] --workdir=DIR [--config.section.field=value ...] [--may_differ=FIELD,FIELD]
                  [--profile=FIRST:LAST] [--until=STEP]
    tformer train WORKDIR WORKDIR ... [--transform=vmap]
    tformer train --jobs

The second form trains trials of a sweep together in one program. The third trains trial after trial, as `tformer sweep`
tells it on standard input.
"""

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from tformer import checks, commands
from tformer.commands import evaluate, scoring, trainer
from tformer.commands.run import Run
from tformer.config import Config, extensions
from tformer.data import store_copies
from tformer.data.batches import mixture
from tformer.data.sources.records import Record
from tformer.distributed import processes
from tformer.errors import NoSplitError, UserError
from tformer.lab.sweep import batched_training, trials
from tformer.training import loop, stopping, trackers, writers
from tformer.training.step_trace import StepTrace
from tformer.training.stopping import StopMonitor

SHARED_FLAGS = ('config', 'workdir', 'transform', 'profile')
FLAGS: dict[str, commands.Flag] = {
    'may_differ': ('list', [], "fields that may differ from those of the workdir's checkpoint"),
    'until': ('int', None, 'pause after this step, saved; the same command without it goes on to the same bits'),
    'jobs': ('bool', False, 'train the jobs on standard input, one after another'),
}
ARGUMENTS = 'WORKDIR'
PROCESSES = True


def run(arguments: list[str], overrides: dict[str, str], flags: commands.Flags) -> None:
    if flags.jobs:
        trainer.serve(do)
        return
    if arguments:
        of_one = flags.config, flags.workdir, flags.may_differ, flags.coordinator, flags.profile, flags.until
        if overrides or any(of_one):
            raise UserError('trials that train together have their own configs: the only flag is --transform')
        train_together(arguments, flags.transform)
        return
    config = checks.load(commands.needed(flags, 'config'), overrides)
    home = pathlib.Path(commands.needed(flags, 'workdir'))
    if flags.until is not None and flags.until < 1:
        raise UserError(f'--until={flags.until} must be a positive number of steps')
    trace = None if flags.profile is None else StepTrace(flags.profile, home)
    if trace is not None and config.train.num_steps is not None:
        trace.check_last(config.train.num_steps)  # before there is anything in the workdir
    train_and_evaluate(config, home, flags.may_differ, trace, flags.until)


def do(job: Mapping[str, Any]) -> None:
    """Trains what a job of `trainer.serve` names."""
    homes = job['homes']
    if len(homes) > 1:
        train_together(homes, job['transform'])
        return
    config = checks.load(str(pathlib.Path(homes[0]) / trials.STATED))
    train_and_evaluate(config, homes[0], until=job['until'])


def train(config: Config, workdir: str | pathlib.Path, may_differ: Sequence[str] = ()) -> Run:
    """Trains in a workdir as `config` says and returns the run with its best checkpoint.

        >>> run = tformer.train(tformer.load_config('configs/g2p.py:demo'), 'runs/demo')
        >>> run.results['test']['word_error_rate']

    A workdir that holds a checkpoint is continued, and a finished one is only loaded.

    `may_differ` are dotted fields that may differ from the checkpoint's.

    Raises:
      UserError: the config, the data or the workdir has a mistake.
      Stopped: a signal or train.max_minutes asked for it, and everything is saved.
    """
    train_and_evaluate(config, workdir, may_differ)
    return Run.load(workdir)


def train_and_evaluate(
    config: Config,
    workdir: str | pathlib.Path,
    may_differ: Sequence[str] = (),
    trace: StepTrace | None = None,
    until: int | None = None,
) -> dict[str, float]:
    """Trains, scores the best checkpoint on the test split (on valid if there is none), and writes result.json.

    Returns the scores; {} if the run is paused after step `until` (`loop.train`). A trial of a sweep that is done stays
    as it is; if one fails, its workdir keeps the reason.
    """
    config = checks.settle(extensions.load(config, trusted=True, place='the config'))
    checks.check_here(config)
    home = pathlib.Path(workdir)
    if processes.same_number(lambda: trials.is_done_as(home, config)):
        print(f'{store_copies.shown(home)} is done')
        return dict(next(iter(writers.results(home).values()), {}))
    with trials.kept(home):
        trained = loop.train(config, home, scoring.generated_scores, may_differ, trace, until)
        if trained is None:
            return {}
        with StopMonitor(None, training=False):
            return finish(home, trained)


def train_together(workdirs: Sequence[str], transform: str | None = None) -> None:
    """Trains the trials that are stated in workdirs in one program, and scores each as `train_and_evaluate` does.

    A trial that fails leaves its error in its workdir, and the others go on.

    Raises:
      UserError: they cannot be trained together; as `train`.
      Stopped: as `train`.
    """
    trained = batched_training.train([pathlib.Path(each) for each in workdirs], transform, scoring.generated_scores)
    with StopMonitor(None, training=False):
        for home, left in trained.items():
            with batched_training.failing(home):
                finish(home, left)


def finish(workdir: pathlib.Path, trained: loop.Trained) -> dict[str, float]:
    """Scores the best checkpoint of a trained run on the test split, or on valid if there is none."""
    with trained.account.clock as clock, clock.spending('evaluating'):
        scores = _score(workdir, trained)
    trained.account.write(trained.step)
    if processes.first():
        stopping.release(workdir)  # a request that came after the last step
        final = {
            f'{split}/{name}': value
            for split, scored in writers.results(workdir).items()
            for name, value in scored.items()
            if name != 'step'
        }
        trackers.finish(trackers.Tracked(workdir, trained.config), writers.read(workdir), final)
    return scores


def _score(workdir: pathlib.Path, trained: loop.Trained) -> dict[str, float]:
    split = 'test'
    records: Sequence[Record] | None = None
    try:
        records = mixture.load(trained.config, split)
        len(records)
    except NoSplitError as error:
        print(f'there is no test split, so the run is scored on valid: {error}')
        split, records = 'valid', None
    loaded = dataclasses.replace(Run.load(workdir, placed=True), tokenizers=trained.tokenizers)
    return evaluate.evaluate(loaded, split, records, trained.account, parameters=trained.num_parameters)
