"""What the commands do with a run: train it to the end, load it, evaluate, generate, look inside."""

import dataclasses
import functools
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from flax import linen as nn
from jax.experimental import multihost_utils

from tformer import atomic, checks
from tformer import config as config_lib
from tformer.config import Config, Mesh
from tformer.config.tasks import TASKS
from tformer.data import cache
from tformer.data.batches import mixture, pipeline
from tformer.data.inspection import rendering
from tformer.data.sources.records import Record
from tformer.data.tokenizers.tokenizers import Tokenizers
from tformer.decode.text import make_text_generator
from tformer.distributed import processes, sharding
from tformer.errors import NoSplitError, UserError
from tformer.evaluation import predictions, text_scores
from tformer.evaluation import scorer as evaluate_lib
from tformer.lab.sweep import batched_training, trials
from tformer.model import build
from tformer.objectives import OBJECTIVES
from tformer.optim.hyperparameters import standard
from tformer.training import checkpoint, setup, workdir, writers
from tformer.training import loop as train_lib
from tformer.training.dummy_batch import random_batch
from tformer.training.state import variable_shardings
from tformer.training.stopping import StopMonitor


@dataclasses.dataclass(frozen=True)
class Run:
    """A trained run: its workdir, resolved config, tokenizers, the model's variables and the step they are of."""

    home: pathlib.Path
    config: Config
    tokenizers: Tokenizers
    variables: dict[str, Any]
    step: int

    @property
    def model(self) -> nn.Module:
        return build(self.config.model)

    @property
    def params(self) -> Any:
        return self.variables['params']


def load_config(directory: str) -> Config:
    """Returns the resolved config of a workdir."""
    return workdir.load_config(pathlib.Path(directory))


def load(
    directory: str | pathlib.Path,
    overrides: Mapping[str, str] | None = None,
    which: str = 'best',
    average: int | None = None,
    placed: bool = False,
) -> Run:
    """Returns a run with its best or latest parameters, or the mean of the newest `average` checkpoints kept.

    Args:
      directory: its workdir.
      overrides: of its config.
      which: best or latest.
      average: how many checkpoints.
      placed: whether the parameters go where config.mesh says; otherwise they are whole on the first device.

    Raises:
      UserError: no workdir, no checkpoint, or overrides that do not fit.
    """
    home = pathlib.Path(directory)
    config = workdir.changed_config(home, overrides or {})
    checks.check_here(config)
    if average is not None and config.model.norm == 'batchnorm':
        raise UserError(f'--average={average}: the statistics of model.norm=batchnorm belong to one checkpoint')
    shardings = _shardings(config, sharding.make_mesh(config.mesh)) if placed else None
    if average is None:
        variables, step = checkpoint.load_variables(home, which, shardings)
    else:
        variables, step = checkpoint.load_average(home, average, config.train.keep_last, shardings)
    return Run(home, config, Tokenizers.load(home), variables, step)


def _shardings(config: Config, mesh: jax.sharding.Mesh) -> Any:
    model, objective = build(config.model), OBJECTIVES[config.train.objective]
    return variable_shardings(model, objective, random_batch(config), mesh, sharding.make_rules(config.mesh))


@functools.lru_cache(maxsize=8)
def _text_generator(model: nn.Module, config: Config, tokenizers: Tokenizers, cut: bool) -> Any:
    return make_text_generator(model, config, tokenizers, cut=cut)


@functools.lru_cache(maxsize=8)
def _scorer(config: Config, mesh: jax.sharding.Mesh) -> evaluate_lib.Scorer:
    return evaluate_lib.make_scorer(build(config.model), config, mesh)


def generated_scores(
    config: Config, variables: Any, tokenizers: Tokenizers, records: Sequence[Mapping[str, Any]]
) -> dict[str, float]:
    """Returns the metrics of config.evaluate of what the model generates for `records`."""
    return text_scores.generation_scores(config.evaluate, _generated(config, variables, tokenizers, records), records)


def _generated(
    config: Config, variables: Any, tokenizers: Tokenizers, records: Sequence[Mapping[str, Any]]
) -> list[str]:
    plain = standard(config)  # so that runs that differ in numbers share a program
    generate = _text_generator(build(plain.model), plain, tokenizers, True)
    return generate(variables, [record['source'] for record in records])


def prepare(config: Config, directory: str) -> str:
    """Makes all that `train` makes before its first step: a workdir's tokenizers and the cache of its tokens.

    Returns what is there now, in words.
    """
    home, mesh = pathlib.Path(directory), sharding.make_mesh(config.mesh)
    with workdir.lock(home):
        last = max(checkpoint.steps(home), default=None)
        before = None if last is None else checkpoint.read_metadata(home, last)
        config, _, batches, valid = setup.load_data(config, home, mesh, before)
        workdir.save_config(home, config)
    place = cache.directory(config.data)
    return f'tokens are in {place}\n  train  {batches.summary}\n  valid  {valid.summary}'


def train(config: Config, directory: str, may_differ: Sequence[str] = ()) -> dict[str, float]:
    """Trains, then scores the best checkpoint on the test split (valid where there is none); writes result.json.

    A sweep's trial that is done stays as it is; why one fails is kept in its workdir.
    """
    home = pathlib.Path(directory)
    if processes.same_number(lambda: trials.is_done_as(home, config)):
        print(f'{home} is done')
        return dict(next(iter(config_lib.read_json(home / trials.RESULT).values()), {}))
    with trials.kept(home):
        trained = train_lib.train(config, directory, generated_scores, may_differ)
        with StopMonitor(None, training=False):
            return finish(directory, trained)


def train_together(directories: Sequence[str], transform: str | None = None) -> None:
    """Trains the trials that are stated in workdirs in one program, and scores each as `train` does.

    What fails leaves its error in its workdir, and the others go on.

    Raises:
      UserError: they cannot be trained together; as `train`.
      Stopped: as `train`.
    """
    trained = batched_training.train([pathlib.Path(each) for each in directories], transform, generated_scores)
    with StopMonitor(None, training=False):
        for home, left in trained.items():
            with batched_training.failing(home):
                finish(home, left)


def finish(directory: str | pathlib.Path, trained: train_lib.Trained) -> dict[str, float]:
    """Scores the best checkpoint of a trained run on the test split, or on valid where there is none."""
    split = 'test'
    records: Sequence[Record] | None = None
    try:
        records = mixture.load(trained.config, split)
        len(records)
    except NoSplitError as error:
        print(f'scored on valid, for there is no test split: {error}')
        split, records = 'valid', None
    run = dataclasses.replace(load(directory, placed=True), tokenizers=trained.tokenizers)
    return evaluate(run, split, records, parameters=trained.num_parameters)


def evaluate(run: Run, split: str, records: Sequence[Record] | None = None, **facts: float) -> dict[str, float]:
    """Scores a run on a split, prints the numbers and samples, and adds them to the workdir's result.json.

    Where config.evaluate.metrics score generated text, it stands in predictions_SPLIT.jsonl, for reports.
    """
    config = run.config
    mesh = sharding.make_mesh(config.mesh)
    records = mixture.load(config, split) if records is None else records
    if config.evaluate.max_examples is not None:
        records = [records[i] for i in range(min(len(records), config.evaluate.max_examples))]
    multiple = sharding.row_multiple(mesh, config.mesh)
    divided = dataclasses.replace(config, data=dataclasses.replace(config.data, row_multiple=multiple))
    batches = pipeline.Batches(divided, run.tokenizers, split, training=False, records=records)
    with sharding.placed(mesh, config.mesh):
        run = dataclasses.replace(run, variables=jax.device_put(run.variables, _shardings(config, mesh)))
        score = _scorer(standard(config), mesh)
        found = score(run.variables, batches, None, run.tokenizers)
        for length in config.evaluate.lengths:
            windows = pipeline.Batches(
                windowed(divided, length), run.tokenizers, split, training=False, records=records
            )
            found[f'loss_at_{length}'] = score(run.variables, windows, None, run.tokenizers)['loss']
    if jax.process_count() > 1 and (config.evaluate.metrics or config.evaluate.samples):  # each generates all itself
        whole = multihost_utils.process_allgather(run.variables, tiled=True)
        run, mesh = dataclasses.replace(run, variables=whole), sharding.make_mesh(Mesh(), jax.local_devices()[:1])
    with jax.set_mesh(mesh):
        if config.evaluate.metrics:
            generated = _generated(config, run.variables, run.tokenizers, records)
            found |= text_scores.generation_scores(config.evaluate, generated, records)
        shown = samples(run, records)
    print(f'{run.home} step {run.step}, {split}: {len(records):,} records')
    print(writers.format_table(found.items()))
    references = [text_scores.references_of(record) for record in records] if config.evaluate.metrics else []
    for name in config.evaluate.metrics:
        if signature := text_scores.signature(name, config.evaluate, references):
            print(f'  {name} signature: {signature}')
    for line in shown:
        print(line)
    if (run.home / trials.STATED).is_file() and 'parameters' not in facts:
        print(f'{run.home} is a trial of a sweep, whose result is that of its end: this one is not written')
    elif processes.first():
        if config.evaluate.metrics:
            predictions.write(run.home, split, generated, references)
        file = run.home / 'result.json'
        results = json.loads(file.read_text()) if file.is_file() else {}
        results[split] = {'step': run.step, **facts, **found}
        atomic.write(file, json.dumps(results, indent=2) + '\n')
    return found


def windowed(config: Config, length: int) -> Config:
    """Returns the config with rows of `length` tokens, as many tokens a batch as before, or one row a device."""
    tokens = config.data.batch_tokens or config.train.batch_size * config.data.length
    changed = dataclasses.replace(config.data, length=length, batching='pad', batch_tokens=tokens)
    return dataclasses.replace(config, data=changed)


def samples(run: Run, records: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns lines that show what the run makes of some records, evenly spread over the split."""
    count = min(run.config.evaluate.samples, len(records))
    task = TASKS[run.config.train.objective]
    pairs, continues = task.in_pairs, run.config.model.family == 'decoder' and task.writes and not task.given
    if not count or not (pairs or continues):
        return []
    chosen = [records[i * len(records) // count] for i in range(count)]
    if not pairs:
        outputs = generate(run, [''] * min(count, 2))
        return [line for output in outputs for line in ('--- sample', output)]
    outputs = generate(run, [record['source'] for record in chosen], cut=True)
    lines = ['', f'{count} of the split: source | generated | reference']
    for record, output in zip(chosen, outputs, strict=True):
        references = text_scores.references_of(record)
        right = ' ' if output not in references else '='
        shown = (rendering.harmless(text, 200) for text in (record['source'], output, references[0]))
        lines.append(f'{right} {" | ".join(shown)}')
    return lines


def generate(run: Run, texts: Sequence[str], seed: int = 0, *, cut: bool = False) -> list[str]:
    """Returns the run's output for each text: a prompt's continuation, or what the decoder makes of a source.

    Raises:
      UserError: the family does not generate, or a text is over the model's length and may not be `cut`.
    """
    plain = standard(run.config)
    return _text_generator(build(plain.model), plain, run.tokenizers, cut)(run.variables, texts, seed)
