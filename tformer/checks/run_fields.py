"""The conditions under which a field of a run has an effect, besides those within the model (model_fields.py)."""

import dataclasses
import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple

from tformer.config import Config, Data, Decode, Model, parts, stated_in_parts
from tformer.config.tasks import HEADS, TASKS, Task
from tformer.data.batches.packing import BATCHING
from tformer.data.examples.corrupt import NOISES
from tformer.data.examples.example_formats import FORMATS
from tformer.data.sources.algorithmic import TASKS as ALGORITHMIC
from tformer.data.sources.sources import SOURCES
from tformer.data.tokenizers.tokenizers import TOKENIZERS
from tformer.decode.generate import STRATEGIES
from tformer.evaluation.metrics import METRICS
from tformer.evaluation.scorer import JUDGES
from tformer.objectives import LOSSES, computed_in_parts
from tformer.optim.optimizers import OPTIMIZERS
from tformer.optim.schedules import SCHEDULES

Rule = tuple[Callable[[Config], bool], str]  # where a field applies, and the same in words


class Rows(NamedTuple):
    """A table whose rows name the fields that they read."""

    choice: str  # the dotted field that picks rows
    section: str  # of the fields that rows read
    fields: Mapping[str, Collection[str] | None]  # the fields that each row reads; None: all that other rows read
    picked: Callable[[Config], Iterable[str]]  # the rows of a config

    def read(self, config: Config, field: str) -> bool:
        """Returns whether a picked row reads a field."""
        read = [self.fields[key] for key in self.picked(config)]
        return any(names is None or field in names for names in read)


def _fields(table: Mapping[Any, Any]) -> dict[str, Collection[str] | None]:
    return {key: row.fields for key, row in table.items()}


def _of_schedule(schedule: Callable[..., Any]) -> list[str]:
    """Returns the fields that a schedule reads, which are keywords of its function."""
    return [f'{name}_fraction' for name in ('final', 'decay') if name in inspect.signature(schedule).parameters]


def _tables() -> tuple[Rows, ...]:
    judged = {name: JUDGES[task.judge].fields if task.judge else () for name, task in TASKS.items()}
    formats = {name: FORMATS[task.format].reads for name, task in TASKS.items()}
    schedules = {name: _of_schedule(schedule) for name, schedule in SCHEDULES.items()}
    denoises = {name for name, task in TASKS.items() if 'noise' in FORMATS[task.format].reads}
    return (
        Rows('data.source', 'data', _fields(SOURCES), lambda c: [part.source for part in parts(c.data)]),
        Rows(
            'data.task', 'data', _fields(ALGORITHMIC),
            lambda c: [part.task for part in parts(c.data) if 'task' in SOURCES[part.source].fields],
        ),
        Rows(
            'data.tokenizer', 'data', _fields(TOKENIZERS),
            lambda c: filter(None, (c.data.tokenizer, c.data.source_tokenizer)),
        ),
        Rows('data.batching', 'data', _fields(BATCHING), lambda c: [c.data.batching]),
        Rows('train.objective', 'data', formats, lambda c: [c.train.objective]),
        Rows('data.noise', 'data', _fields(NOISES), lambda c: c.data.noise if c.train.objective in denoises else ()),
        Rows('optimizer.name', 'optimizer', _fields(OPTIMIZERS), lambda c: [c.optimizer.name]),
        Rows('optimizer.schedule', 'optimizer', schedules, lambda c: [c.optimizer.schedule]),
        Rows('decode.strategy', 'decode', _fields(STRATEGIES), lambda c: [c.decode.strategy]),
        Rows('evaluate.metrics', 'evaluate', _fields(METRICS), lambda c: c.evaluate.metrics),
        Rows('train.objective', 'evaluate', judged, lambda c: [c.train.objective]),
    )  # fmt: skip


def _of_rows(tables: Iterable[Rows], field: str) -> Rule:
    """Returns the rule that a field applies where a picked row reads it."""
    readers = [table for table in tables if any(field in (read or ()) for read in table.fields.values())]
    words = []
    for table in readers:
        keys = [key for key, read in table.fields.items() if read is None or field in read]
        words.append(f'{table.choice} is {" or ".join(keys)}')
    return lambda c: any(table.read(c, field) for table in readers), ', or '.join(words)


def _objectives(fact: Callable[[Task], Any]) -> Rule:
    """Returns the rule that a field applies to the objectives of which `fact` is true."""
    names, others = ([name for name, task in TASKS.items() if bool(fact(task)) is holds] for holds in (True, False))
    words = ' or '.join(names) if len(names) <= len(others) else f'not {" or ".join(others)}'
    return lambda c: bool(fact(TASKS[c.train.objective])), f'train.objective is {words}'


def _single_rules() -> dict[str, Rule]:
    """Returns the rules of fields that no row of a table reads."""
    pairs, writes = _objectives(lambda task: task.in_pairs), _objectives(lambda task: task.writes)
    from_data = _objectives(lambda task: task.classes_from_data)
    given = _objectives(lambda task: task.given)
    pooled = _objectives(lambda task: HEADS[task.head].pools)
    pooler = _objectives(lambda task: 'pooler' in HEADS[task.head].per_row)
    prefixed = _objectives(lambda task: task.prefix)
    distils = _objectives(lambda task: task.teacher and not LOSSES[task.loss].with_reference)
    return {
        'model.num_classes': from_data,
        'model.pooling': pooled,
        'model.pooler': pooler,
        'model.pooler_activation': _both((lambda c: c.model.pooler, 'model.pooler is True'), pooler),
        'model.similarity_temperature': _objectives(lambda task: task.head == 'comparison'),
        'model.class_bias': _objectives(lambda task: task.head in ('class', 'number', 'choice')),
        'model.task_transform': _objectives(lambda task: task.head in ('class', 'number', 'choice', 'tags', 'spans')),
        'model.head_dropout_rate': _objectives(lambda task: HEADS[task.head].drops),
        'model.generator_fraction': _objectives(lambda task: 'generator' in HEADS[task.head].per_token),
        'data.source_template': pairs,
        'data.target_template': pairs,
        'data.mixture_temperature': (lambda c: bool(c.data.mixture), 'data.mixture has parts'),
        'data.mixture_stages': (lambda c: bool(c.data.mixture), 'data.mixture has parts'),
        'data.labels': from_data,
        'data.label_range': _objectives(lambda task: task.records in ('number', 'similarity')),
        'data.source_tokenizer': pairs,
        'data.encoder_length': (
            lambda c: c.model.family == 'encoder_decoder' or given[0](c),
            f'model.family is encoder_decoder, or {given[1]}',
        ),
        'data.start': (lambda c: c.model.family != 'encoder', 'model.family is decoder or encoder_decoder'),
        'data.end': (lambda c: c.model.family != 'encoder', 'model.family is decoder or encoder_decoder'),
        'data.source_start': (lambda c: c.model.family == 'encoder_decoder', 'model.family is encoder_decoder'),
        'data.source_end': (lambda c: c.model.family == 'encoder_decoder', 'model.family is encoder_decoder'),
        'data.row_multiple': (lambda c: c.data.batch_tokens is not None, 'data.batch_tokens is set'),
        'data.bidirectional_prefix': (
            lambda c: c.model.family == 'decoder' and prefixed[0](c),
            f'model.family is decoder and {prefixed[1]}',
        ),
        'optimizer.decayed_roles': (lambda c: c.optimizer.weight_decay > 0, 'optimizer.weight_decay is above 0'),
        'optimizer.master_dtype': (lambda c: c.model.param_dtype == 'bfloat16', 'model.param_dtype is bfloat16'),
        'train.init_narrow': (lambda c: c.train.init_model, 'train.init_model is True'),
        'train.init_except': (lambda c: c.train.init_from is not None, 'train.init_from is set'),
        'train.label_smoothing': _objectives(lambda task: LOSSES[task.loss].smoothing),
        'train.z_loss': _objectives(lambda task: LOSSES[task.loss].z_loss),
        'train.teacher': _objectives(lambda task: task.teacher),
        'train.distillation_weight': distils,
        'train.distillation_temperature': _both(distils, _objectives(lambda task: task.loss != 'numbers')),
        'train.preference_beta': _objectives(lambda task: LOSSES[task.loss].with_reference),
        'train.loss_chunk': _objectives(computed_in_parts),
        'train.second_loss_weight': _objectives(lambda task: LOSSES[task.loss].second),
        'mesh.microbatches': (lambda c: c.mesh.pipeline != 1, 'mesh.pipeline is above 1'),
        'mesh.pipeline_repeats': (lambda c: c.mesh.pipeline != 1, 'mesh.pipeline is above 1'),
        **{f'decode.{field.name}': writes for field in dataclasses.fields(Decode)},
        'decode.diversity_penalty': _both(
            writes, (lambda c: c.decode.beam_groups > 1, 'decode.beam_groups is above 1')
        ),
        'decode.gap': _objectives(lambda task: task.gap),
        'decode.prefill_chunk': _both(writes, (lambda c: c.model.family == 'decoder', 'model.family is decoder')),
        'decode.coverage_penalty': _both(writes, (lambda c: _attends(c.model), _ATTENDS)),
        'evaluate.metrics': pairs,
        'evaluate.examples_while_training': pairs,
        'evaluate.lengths': _objectives(lambda task: task.running_text),
    }


_ATTENDS = 'model.family is encoder_decoder, and model.recurrent_attention is set where model.recurrence is'


def _attends(model: Model) -> bool:
    """Returns whether a decoder attends to an encoder's output."""
    recurs = model.recurrence is not None and model.recurrent_attention is None
    return model.family == 'encoder_decoder' and not recurs


def _read_by(part: Data) -> set[str]:
    """Returns the fields that say where a part's examples come from."""
    own = {'source', *SOURCES[part.source].fields}
    return own | set(ALGORITHMIC[part.task].fields if 'task' in own else ())


# The fields of tokenizers that a run makes for itself.
TOKENIZER = (
    *('tokenizer', 'source_tokenizer', 'tokenizer_path', 'tokenizer_vocab_size', 'tokenizer_model'),
    *('byte_fallback', 'normalization', 'sentinels'),
)
_OWN_TOKENIZERS: Rule = (
    lambda c: c.data.tokenizer_from is None and c.train.init_from is None and c.train.teacher is None,
    'data.tokenizer_from, train.init_from and train.teacher are None',
)


def _of_parts(config: Config) -> dict[str, Rule]:
    """Returns the rules of fields that each part of a mixture which reads them states for itself."""
    stated = stated_in_parts(config.data)
    readers = [_read_by(part) for part in parts(config.data)]
    names = {name for own in stated for name in own} - {'weight'}
    pairs = list(zip(stated, readers, strict=False))
    vain = [name for name in names if all(name in own for own, read in pairs if name in read)]
    return {f'data.{name}': (lambda c: False, 'a part of data.mixture does not set it') for name in vain}


def rules(config: Config) -> dict[str, Rule]:
    """Returns dotted field -> (where it applies, the same in words); fields that are absent apply everywhere."""
    tables = _tables()
    read = {f'{table.section}.{name}' for table in tables for names in table.fields.values() for name in names or ()}
    found = {
        field: _of_rows([t for t in tables if t.section == field.split('.')[0]], field.split('.')[1]) for field in read
    }
    for extra in (_single_rules(), {f'data.{name}': _OWN_TOKENIZERS for name in TOKENIZER}, _of_parts(config)):
        for field, rule in extra.items():
            found[field] = _both(found[field], rule) if field in found else rule
    return found


def _both(a: Rule, b: Rule) -> Rule:
    return lambda c: a[0](c) and b[0](c), f'{a[1]}, and {b[1]}'
