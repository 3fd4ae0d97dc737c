"""The start of a run, or its resumption: its data, its resolved config and its first state."""

import contextlib
import dataclasses
import os
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jax.sharding import Mesh

from tformer import checks
from tformer import config as config_lib
from tformer.checks.conditions import require_multiple
from tformer.config import OUTSIDE_THE_FUNCTION, Config, Model
from tformer.config.tasks import HEADS, TASKS
from tformer.data.batches import mixture, pipeline
from tformer.data.tokenizers.tokenizers import Tokenizers
from tformer.distributed import devices, meshes, processes, sharding
from tformer.errors import NoSplitError, UserError, choose
from tformer.evaluation import scorer
from tformer.layers import kernel_choice
from tformer.layers.resolved import with_resolved_model
from tformer.optim.hyperparameters import Hyperparameters
from tformer.training import checkpoint, copies, pretrained, teacher, workdir
from tformer.training.program import Program
from tformer.training.state import TrainState, variables
from tformer.training.versions import versions

Record = Mapping[str, Any]  # `run`, the metadata of a checkpoint

VALIDATION = 'fingerprint of the validation data'
NAMED = ' (or name the fields in --may_differ, where parameters and the state of the optimizer keep their shapes)'
NEVER = '; --may_differ does not accept other batches'
# Fields that say where a host has the data and how it reads them, which may differ between hosts.
PLACES = tuple(
    f'data.{name}'
    for name in 'path valid_path test_path mixture tfds_dir tokenizer_path chat_template cache_dir num_workers'.split()
)


def load_state(program: Program, config: Config, home: pathlib.Path, last: int | None) -> TrainState:
    """Returns the state of a workdir's checkpoint at step `last`; None: the one that training starts from.

    The program may be of another run, whose config differs only in its hyperparameters.

    Raises:
      UserError: the checkpoint, or the run that train.init_from names, does not fit the model.
    """
    hyper = Hyperparameters.of(config)
    state = program.init(hyper)
    if last is not None:
        return checkpoint.restore(home, last, state)
    source = workdir.lender(config, home)
    if source is None:
        return state
    fresh, where = (variables(tree.params, tree.statistics) for tree in (state, program.shardings))
    vocabulary = HEADS[TASKS[config.train.objective].head].vocabulary
    loaded = pretrained.load(source, fresh, where, config.train.init_except, vocabulary)
    if processes.first():
        _say_other_function(config, source)
    return program.init_from(hyper, loaded['params'], loaded.get('statistics', {}))


def _say_other_function(config: Config, pretrained: str) -> None:
    """Prints which fields make the model, or the tokens before its texts, others than those of the parameters."""
    theirs = checks.settled(workdir.lent_config(pretrained))
    differing = config_lib.difference(with_resolved_model(theirs), with_resolved_model(config))
    inside = [f'model.{field.name}' for field in dataclasses.fields(Model) if field.name not in OUTSIDE_THE_FUNCTION]
    sizes = ('model.vocab_size', 'model.encoder_vocab_size', 'model.max_len', 'model.lora_rank')
    inside = [name for name in inside if name not in sizes] + ['data.start', 'data.source_start', 'data.source_end']
    inside += [] if HEADS[TASKS[config.train.objective].head].vocabulary else ['data.end', 'data.separator']
    said = [f'{name}={differing[name][1]!r} ({differing[name][0]!r} there)' for name in inside if name in differing]
    if said:
        print(f'train.init_from={pretrained} was trained otherwise: {", ".join(said)}', file=sys.stderr, flush=True)


class RunData(NamedTuple):
    """The data of a run, and its config, resolved by them."""

    config: Config
    tokenizers: Tokenizers
    batches: pipeline.Batches
    valid: pipeline.Batches
    teacher: dict[str, str]  # `teacher.fingerprint`

    @property
    def fingerprint(self) -> dict[str, int | float | str]:
        """The facts that the data of all lives of a run must share."""
        own = data_fingerprint(self.batches, self.tokenizers)
        return {**own, VALIDATION: self.valid.fingerprint, **self.teacher}


def load_data(
    config: Config, home: pathlib.Path, mesh: Mesh, before: Record | None = None, may_differ: Sequence[str] = ()
) -> RunData:
    """Returns the data of a run and its resolved config; the tokenizers of a new run are written to its workdir.

    `before` is the metadata of the checkpoint that the run resumes from; None: it is a new run. `may_differ` are dotted
    fields that may differ from the checkpoint's, besides those that always may.

    Raises:
      UserError: the config or the data have a mistake, or they differ from those of the checkpoint.
    """
    names = (*scorer.score_names(config), *scorer.score_names(config, ['a plain tag']))
    choose(dict.fromkeys(names), config.train.best_metric, 'train.best_metric')
    began = None if before is None else config_lib.from_dict(before['config'])
    if began is not None:  # before minutes go into other data
        own = {name: config_lib.values(config)[name] for name in ('model.family', 'train.objective')}
        workdir.check_config(home, began, config_lib.override(began, own), may_differ)
    records = mixture.load(config, 'train')
    tokens = copies.after_first(
        home,
        make=lambda: (
            workdir.load_tokenizers(home) if before is not None else workdir.make_tokenizers(home, config, records)
        ),
        find=lambda: workdir.load_tokenizers(home),
    )
    choose(dict.fromkeys(scorer.score_names(config, tokens.labels)), config.train.best_metric, 'train.best_metric')
    if tokens.labels and config.evaluate.positive_label is not None:
        choose(dict.fromkeys(tokens.labels), config.evaluate.positive_label, 'evaluate.positive_label')
    if began is not None and config.data.num_buckets is None:
        config = config_lib.override(config, {'data.num_buckets': began.data.num_buckets})
    multiple = row_multiple(config, began, mesh)
    batches = pipeline.Batches(config, tokens, 'train', training=True, records=records, row_multiple=multiple)
    config = config_lib.override(config, {'data.num_buckets': batches.num_buckets})
    config = resolve_config(config, tokens, batches.steps_per_epoch, multiple)
    if config.data.num_workers is None:
        number = num_workers(meshes.jax_platform(mesh), os.cpu_count() or 1)
        config = config_lib.override(config, {'data.num_workers': number})
    if before is not None and began is not None:
        same = not differing_facts(before['data'], data_fingerprint(batches, tokens))
        workdir.check_config(home, checks.settled(began), checks.settled(config), may_differ, NAMED if same else NEVER)
    valid = pipeline.Batches(config, tokens, 'valid', training=False)
    made = RunData(config, tokens, batches, valid, teacher.fingerprint(config, tokens))
    if before is not None and began is not None:
        changed = workdir.differing_data(checks.settled(began), checks.settled(config))
        check_same_data(before['data'], made.fingerprint, may_differ, changed)
    test = None
    with contextlib.suppress(NoSplitError):  # reports a mistake in the test split before training and not after
        test = pipeline.Batches(config, tokens, 'test', training=False).fingerprint
    processes.agree({
        **made.fingerprint,
        'fingerprint of the test data': test,
        **{name: value for name, value in config_lib.values(config).items() if name not in PLACES},
    })  # fmt: skip
    return made


def row_multiple(config: Config, began: Config | None, mesh: Mesh) -> int | None:
    """Returns the number that the rows of a data.batch_tokens batch are a multiple of; None with train.batch_size.

    A resumed run keeps the number of the config that it `began` with, so its batches are the same on other devices.

    Raises:
      UserError: the rows are not a multiple of microbatches x data-parallel size x microbatches of a pipeline.
    """
    ways, rows = meshes.batch_ways(mesh), config.train.batch_size
    needed = config.train.microbatches * meshes.row_multiple(mesh, config.mesh)
    asked = f'train.microbatches={config.train.microbatches} x the {ways} ways that the mesh splits it'
    if needed > config.train.microbatches * ways:
        asked += f', and the {config.mesh.microbatches} parts of a pipeline (mesh.microbatches)'
    if config.data.batch_tokens is None:
        require_multiple('train.batch_size', rows, needed, asked)
        return None
    multiple = config.data.row_multiple or (began and began.data.row_multiple) or needed
    if multiple % needed:
        raise UserError(f'data.row_multiple={multiple} is not a multiple of {asked}, {needed}')
    return multiple


def num_workers(kind: str, cores: int) -> int:
    """Returns how many processes make batches for devices of a kind if data.num_workers does not say it.

    On a CPU the step itself keeps the cores busy. Beside an accelerator some are left for reading ahead and saving.
    """
    return 0 if kind == 'cpu' else min(cores // 4, 4)


def data_fingerprint(batches: pipeline.Batches, tokens: Tokenizers) -> dict[str, int | float | str]:
    """Returns the facts that a resumed run must share with its checkpoint, so that every step has the same batch."""
    return {
        'tokenizers': tokens.fingerprint,
        'training examples': batches.num_examples,
        'steps an epoch': batches.steps_per_epoch,
        'fingerprint of the data': batches.fingerprint,
    }


def differing_facts(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, str]:
    """Returns the facts of two fingerprints that differ, as text; those that one of them lacks are not compared."""
    shared = [name for name in now if name in before]
    return {name: f'{name} {before[name]} there, {now[name]} here' for name in shared if before[name] != now[name]}


def check_same_data(
    before: Mapping[str, Any], now: Mapping[str, Any], may_differ: Sequence[str] = (), changed: str = ''
) -> None:
    """Raises a `UserError` where the data, or the way they form batches, are not those of the checkpoint.

    It says which fields of the config are `changed` that have a part in it. Where data.valid_path `may_differ`, a line
    says that the validation data do. Facts that the checkpoint of an earlier version lacks are not compared.
    """
    differing = differing_facts(before, now)
    if teacher.FACT in differing:
        raise UserError(f'the teacher has changed since the checkpoint was written: {differing[teacher.FACT]}')
    if VALIDATION in differing and 'data.valid_path' in may_differ:
        line = (
            f'earlier scores, and the best checkpoint so far, are of other validation data: {differing.pop(VALIDATION)}'
        )
        if processes.first():
            print(line, file=sys.stderr, flush=True)
    if differing:
        hint = '; --may_differ=data.valid_path accepts it' if [*differing] == [VALIDATION] else NEVER if changed else ''
        facts = [fact for name, fact in differing.items() if name != VALIDATION or len(differing) == 1]
        what = f'other data or batches, with {changed}' if changed else 'other data'
        raise UserError(f'the checkpoint was trained on {what}: {"; ".join(facts)}{hint}')


def resolve_config(config: Config, tokens: Tokenizers, steps_per_epoch: float, multiple: int | None = None) -> Config:
    """Returns `config` with the fields that the tokenizers, the data and the mesh (`row_multiple`) decide filled in."""
    return checks.resolve(
        config_lib.override(config, {'data.row_multiple': multiple or config.data.row_multiple}),
        vocab_size=tokens.target.vocab_size,
        encoder_vocab_size=tokens.source.vocab_size if tokens.source is not None else None,
        num_classes=len(tokens.labels) or None,
        steps_per_epoch=steps_per_epoch,
    )


def peak_flops(config: Config) -> float | None:
    """Returns the peak of the devices of a run together, in operations per second; None where it is not known."""
    mesh = meshes.make_mesh(config.mesh)
    each = devices.peak_flops(mesh.devices.flat[0].device_kind, config.model.dtype)
    return None if each is None else each * mesh.size


def checkpoint_metadata(data: RunData) -> dict[str, Any]:
    """Returns the part of every checkpoint's metadata that describes the run: config, data, versions of packages."""
    return _metadata(data.config, data.fingerprint)


def imported_metadata(config: Config, tokens: Tokenizers) -> dict[str, Any]:
    """Returns the same of a checkpoint that no data made, as of a hub's parameters."""
    return _metadata(config, {'tokenizers': tokens.fingerprint})


def _metadata(config: Config, fingerprints: Mapping[str, Any]) -> dict[str, Any]:
    return {
        'config': config_lib.to_dict(config),
        'config_digest': config_lib.digest(config),
        'data': fingerprints,
        'attention_kernel': None if config.model.recurrence else kernel_choice.pick(config.model, sharding.platform()),
        'versions': versions(),
    }
