"""Every table of choices, by the config field that picks from it."""

import dataclasses
import inspect
import re
import typing
from collections.abc import Iterable
from typing import Any

from tformer import config as config_lib
from tformer import errors, evaluate, model, objectives, optimizers, sharding
from tformer.config import Config
from tformer.data import examples, packing, sources, tokenizers
from tformer.decode import STRATEGIES
from tformer.layers import block, embed, heads, initializers, mlp, norms, positions

DTYPES = ('float32', 'bfloat16')

TABLES: dict[str, Iterable[Any]] = {
    'model.family': model.FAMILIES,
    'model.tied_embeddings': model.TIED_EMBEDDINGS,
    'model.embedding_scale': embed.EMBEDDING_SCALES,
    'model.position': positions.POSITIONS,
    'model.norm': norms.NORMS,
    'model.norm_placement': block.PLACEMENTS,
    'model.activation': mlp.ACTIVATIONS,
    'model.pooling': heads.POOLINGS,
    'model.initializer': initializers.INITIALIZERS,
    'model.remat': block.REMAT,
    'model.dtype': DTYPES,
    'model.param_dtype': DTYPES,
    'data.source': sources.SOURCES,
    'data.tokenizer': tokenizers.TOKENIZERS,
    'data.source_tokenizer': (*tokenizers.TOKENIZERS, None),
    'data.tokenizer_model': ('unigram', 'bpe'),
    'data.batching': packing.BATCHING,
    'data.overlong': examples.OVERLONG,
    'data.split_by': sources.SPLITS_BY,
    'optimizer.name': optimizers.OPTIMIZERS,
    'optimizer.schedule': optimizers.SCHEDULES,
    'train.objective': objectives.OBJECTIVES,
    'mesh.rules': sharding.RULES,
    'decode.strategy': STRATEGIES,
    'evaluate.metrics': evaluate.METRICS,
}


def validate(config: Config) -> None:
    """Raises a `UserError` of one line for an unknown key of any table, or fields that do not fit together."""
    for field, table in TABLES.items():
        section, name = field.split('.')
        value = getattr(getattr(config, section), name)
        for key in value if isinstance(value, tuple) else (value,):
            errors.choose(dict.fromkeys(table), key, field)
    config_lib.check(config)


def ablation_table() -> str:
    """Returns every field of the configuration as a Markdown table: default, keys, meaning (the field's comment)."""
    lines = ['| field | default | keys | meaning |', '| --- | --- | --- | --- |']
    for section, cls in typing.get_type_hints(Config).items():
        comments = dict(re.findall(r'^    (\w+):.*?  # (.*)$', inspect.getsource(cls), re.MULTILINE))
        for field in dataclasses.fields(cls):
            keys = ', '.join(f'`{key}`' for key in TABLES.get(f'{section}.{field.name}', ()))
            meaning = comments.get(field.name, '').replace('|', '\\|')
            lines.append(f'| `{section}.{field.name}` | `{field.default}` | {keys} | {meaning} |')
    return '\n'.join(lines)
