"""Scores a checkpoint, or the mean of several, on a split.

    tformer evaluate --workdir=DIR [--split=valid] [--checkpoint=latest] [--average=N] [--baseline]

The scores are printed and added to result.json in the workdir. With --baseline, classification and regression are
compared with TF-IDF and a linear model, and tags with each word's most frequent one, fitted on the training split.
"""

import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from tformer import atomic, checks, commands
from tformer import config as config_lib
from tformer.commands import baseline as baseline_lib
from tformer.commands import scoring
from tformer.commands.run import Run, opened
from tformer.data import locks, store_copies
from tformer.data.sources.records import Record
from tformer.distributed import processes
from tformer.evaluation import metrics, predictions
from tformer.lab.sweep import trials
from tformer.training import digests, writers
from tformer.training import workdir as workdir_lib
from tformer.training.wall_time import WALL_TIME, Account

SHARED_FLAGS = ('workdir', 'checkpoint')
FLAGS = {
    'split': ('string', 'test', 'the split to score: train, valid or test'),
    'average': ('int', None, 'score the mean of the newest N checkpoints (train.keep_last keeps them)'),
    'baseline': ('bool', False, 'also fit a linear model on the training split, and say which is better'),
}
PROCESSES = True
ALONE = ('baseline',)
NEUTRAL = (  # fields that change no score
    'data.cache_dir data.prefetch data.num_threads data.num_workers decode.batch_size evaluate.samples'
).split()


def run(arguments: list[str], overrides: dict[str, str], flags: commands.Flags) -> None:
    workdir = commands.needed(flags, 'workdir')
    loaded = Run.load(workdir, overrides, flags.checkpoint, flags.average, placed=True)
    evaluate(loaded, flags.split, baseline=flags.baseline)


def evaluate(
    run: Run | str | pathlib.Path,
    split: str = 'test',
    records: Sequence[Record] | None = None,
    account: Account | None = None,
    baseline: bool = False,
    **facts: float,
) -> dict[str, float]:
    """Scores a run on a split, prints the scores with some samples, and adds them to result.json in the workdir.

        >>> tformer.evaluate('runs/demo', 'valid')['loss']

    If config.evaluate.metrics score generated text, that text is written to predictions_SPLIT.jsonl for reports.
    `run.evaluate(split)` returns the scores without printing or writing them.

    `run` may be a workdir. `records` are those of the split (train, valid or test), if they are loaded already. At the
    end of a training its `account` is written as `wall_time`. With `baseline`, the scores of `baseline.compare` are
    added. The facts are numbers to write beside the scores.
    """
    run = opened(run)
    if baseline:
        baseline_lib.of_objective(run.config.train.objective)  # before minutes of scoring
    writers.results(run.workdir)  # which says before minutes of scoring that it cannot be read
    found = scoring.score(run.config, run.tokenizers, run.variables, split, records, run.workdir)
    print(f'{store_copies.shown(run.workdir)} step {run.step}, {split}: {found.num_records:,} records')
    print(writers.format_table(found.scores.items()))
    for name in run.config.evaluate.metrics:
        if signature := metrics.signature(name, run.config.evaluate, found.references):
            print(f'  {name} signature: {signature}')
    for line in found.samples:
        print(line)
    scores = found.scores
    if baseline:
        compared = baseline_lib.compare(run, scoring.scored_records(run.config, split, records))
        print('\n'.join(compared.lines))
        print(writers.format_table(compared.scores.items()))
        scores |= compared.scores
    if (run.workdir / trials.STATED).is_file() and 'parameters' not in facts:
        line = 'is a trial of a sweep: its result.json keeps the scores of the end of its training'
        print(f'{store_copies.shown(run.workdir)} {line}')
    elif processes.first():
        written, others = {'step': run.step, **facts, **scores}, _overrides(run)

        def add() -> None:
            """Adds the scores to what other processes may have written while these were computed."""
            spent = account.seconds() if account is not None else writers.seconds(run.workdir)
            fields = {**writers.overrides(run.workdir), split: others}
            more = {WALL_TIME: spent, writers.OVERRIDES: _there(fields)}
            found_all = {**run.results, split: written, **_there(more)}
            with digests.recording(run.workdir, *names):
                if run.config.evaluate.metrics:
                    predictions.write(run.workdir, split, found.outputs, found.references)
                atomic.write(run.workdir / trials.RESULT, json.dumps(found_all, indent=2) + '\n')

        names = [predictions.place(run.workdir, split).name, trials.RESULT]
        with locks.in_turn(run.workdir):
            store_copies.revise(run.workdir, add, [*names, digests.FILE])
        if others:
            named = ', '.join(f'{name}={value}' for name, value in others.items())
            print(f'{split} in result.json is now by {named}; without that, evaluate scores the run as it was trained')
    return scores


def _there(found: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the entries that are not empty."""
    return {name: value for name, value in found.items() if value}


def _overrides(run: Run) -> dict[str, Any]:
    """Returns by what scores are others than those of the best checkpoint by the config in the workdir: fields and what
    is `Run.chosen`, with their values."""
    if not (run.workdir / 'config.json').is_file():
        return dict(run.chosen)
    changed = config_lib.difference(checks.settled(workdir_lib.load_config(run.workdir)), run.config)
    sections = ('data', 'decode', 'evaluate')
    fields = {name: b for name, (_, b) in changed.items() if name.split('.')[0] in sections and name not in NEUTRAL}
    return {**run.chosen, **fields}
