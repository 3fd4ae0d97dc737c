"""Every table of choices, by the config field that picks from it."""

import collections
import dataclasses
import inspect
import re
import typing
from collections.abc import Iterable
from typing import Any

from tformer import config as config_lib
from tformer import errors, model
from tformer.config import Config
from tformer.config.tasks import TASKS
from tformer.data.batches import packing
from tformer.data.examples import corrupt, denoisers, example_formats
from tformer.data.inspection import duplicates
from tformer.data.prepared import cleaning
from tformer.data.sources import algorithmic, records, sources
from tformer.data.tokenizers import tokenizers, vocabulary
from tformer.decode.beam import STOPPING
from tformer.decode.generate import DRAFTS, STRATEGIES
from tformer.decode.risk import UTILITIES
from tformer.distributed import meshes, sharding
from tformer.evaluation import metrics
from tformer.layers import (
    attention,
    block,
    embed,
    heads,
    initializers,
    kernel_choice,
    linear,
    mlp,
    moe,
    norms,
    parametrization,
    placements,
    positions,
    recurrent_attention,
    recurrent_cells,
    rope_scalings,
)
from tformer.optim import optimizers, parameters, schedules

DTYPES = ('float32', 'bfloat16')


def _or_none(table: dict[Any, Any]) -> Iterable[Any]:
    """Returns the keys of a table, also of rows that are added later, and None."""
    return collections.ChainMap({None: None}, table)


TABLES: dict[str, Iterable[Any]] = {
    'model.family': model.FAMILIES,
    'model.recurrence': _or_none(recurrent_cells.CELLS),
    'model.recurrent_attention': _or_none(recurrent_attention.SCORES),
    'model.tied_embeddings': model.TIED_EMBEDDINGS,
    'model.embedding_scale': embed.EMBEDDING_SCALES,
    'model.position': positions.POSITIONS,
    'model.rope_scaling': rope_scalings.ROPE_SCALINGS,
    'model.norm': norms.NORMS,
    'model.norm_placement': placements.PLACEMENTS,
    'model.attention_bias': attention.PROJECTIONS,
    'model.layer_sharing': block.LAYER_SHARING,
    'model.attention_scale': _or_none(attention.SCALES),
    'model.attention_pattern': attention.ATTENTION_PATTERNS,
    'model.attention_sink': attention.SINKS,
    'model.qk_norm': norms.HEAD_NORMS,
    'model.attention_kernel': collections.ChainMap[Any, Any]({kernel_choice.AUTO: None}, kernel_choice.KERNELS),
    'model.activation': mlp.ACTIVATIONS,
    'model.expert_dispatch': moe.DISPATCHES,
    'model.output_scale': heads.OUTPUT_SCALES,
    'model.transform_activation': _or_none(mlp.ACTIVATIONS),
    'model.pooling': heads.POOLINGS,
    'model.pooler_activation': heads.POOLER_ACTIVATIONS,
    'model.lora_targets': linear.LORA_TARGETS,
    'model.initializer': _or_none(initializers.INITIALIZERS),
    'model.parametrization': parametrization.PARAMETRIZATIONS,
    'model.remat': block.REMAT,
    'model.dtype': DTYPES,
    'model.param_dtype': DTYPES,
    'data.source': sources.SOURCES,
    'data.bad_lines': records.BAD_LINES,
    'data.cleaning': cleaning.CLEANING,
    'data.deduplicate': (*duplicates.ALIKE, 'minhash', None),
    'data.tokenizer': tokenizers.TOKENIZERS,
    'data.source_tokenizer': _or_none(tokenizers.TOKENIZERS),
    'data.tokenizer_model': ('unigram', 'bpe'),
    'data.normalization': vocabulary.NORMALIZATIONS,
    'data.start': vocabulary.NAMES,
    'data.source_start': vocabulary.NAMES,
    'data.source_end': vocabulary.NAMES,
    'data.end': vocabulary.NAMES,
    'data.separator': vocabulary.NAMES,
    'data.batching': packing.BATCHING,
    'data.overlong': example_formats.OVERLONG,
    'data.mask_unit': corrupt.MASK_UNITS,
    'data.noise': corrupt.NOISES,
    'data.denoisers': denoisers.DENOISERS,
    'data.split_by': sources.SPLITS_BY,
    'data.task': algorithmic.TASKS,
    'optimizer.name': optimizers.OPTIMIZERS,
    'optimizer.schedule': schedules.SCHEDULES,
    'optimizer.decayed_roles': parameters.ROLES,
    'optimizer.master_dtype': ('float32', None),
    'optimizer.moment_dtype': DTYPES,
    'train.objective': TASKS,
    'mesh.rules': sharding.RULES,
    'mesh.dcn_axis': meshes.AXES,
    'decode.strategy': STRATEGIES,
    'decode.early_stopping': STOPPING,
    'decode.utility': UTILITIES,
    'decode.draft': DRAFTS,
    'decode.quantization': (*model.QUANTIZATIONS, None),
    'decode.cache_quantization': (*model.QUANTIZATIONS, None),
    'evaluate.metrics': metrics.METRICS,
}


def check_choices(config: Config) -> None:
    """Raises a `UserError` that names the valid keys and the nearest for an unknown key of any table."""
    for field, table in TABLES.items():
        section, name = field.split('.')
        if table is vocabulary.NAMES and _lent_tokenizer(config):
            continue  # which may have more
        value = getattr(getattr(config, section), name)
        for key in value if isinstance(value, tuple) else (value,):
            errors.choose(dict.fromkeys(table), key, field)
    for number, part in enumerate(config_lib.parts(config.data) if config.data.mixture else ()):
        for name in ('source', 'bad_lines', 'split_by', 'task'):
            errors.choose(dict.fromkeys(TABLES[f'data.{name}']), getattr(part, name), f'data.mixture[{number}]: {name}')


def _lent_tokenizer(config: Config) -> bool:
    """Returns whether a run's tokenizer, and so the names of its special tokens, may be the hub's."""
    data = config.data
    kinds = data.tokenizer, data.source_tokenizer
    return 'huggingface' in kinds or (data.tokenizer_from or config.train.init_from) is not None


def ablation_table() -> str:
    """Returns every field of the configuration as a Markdown table: default, keys, meaning (the field's comment)."""
    lines = ['| field | default | keys | meaning |', '| --- | --- | --- | --- |']
    for section, cls in typing.get_type_hints(Config).items():
        if not dataclasses.is_dataclass(cls):
            continue
        comments = dict(re.findall(r'^    (\w+):.*?  # (.*)$', inspect.getsource(typing.cast(type, cls)), re.MULTILINE))
        for field in dataclasses.fields(cls):
            keys = ', '.join(f'`{key}`' for key in TABLES.get(f'{section}.{field.name}', ()))
            meaning = comments.get(field.name, '').replace('|', '\\|')
            lines.append(f'| `{section}.{field.name}` | `{field.default}` | {keys} | {meaning} |')
    return '\n'.join(lines)
