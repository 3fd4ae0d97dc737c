"""The conditions under which a field of the model has an effect."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from tformer.config import Model
from tformer.errors import UserError
from tformer.layers.attention import has_window
from tformer.layers.moe import DISPATCHES
from tformer.layers.norms import HEAD_NORMS, NORMS, RMSNorm
from tformer.layers.parametrization import parametrization
from tformer.layers.placements import PLACEMENTS
from tformer.layers.positions import POSITIONS
from tformer.layers.resolved import resolve_model
from tformer.layers.rope_scalings import ROPE_SCALINGS

Condition = Callable[[Model], bool]
Rule = tuple[Condition, str]  # where a field applies, and the same in words

_EVERYWHERE: Rule = (lambda m: True, '')
_BLOCK: Rule = (lambda m: m.recurrence is None, 'model.recurrence is None')
_ENCODER = (lambda m: m.family != 'decoder', 'model.family is encoder or encoder_decoder')
_DECODER = (lambda m: m.family != 'encoder', 'model.family is decoder or encoder_decoder')
_ENCODER_ONLY = (lambda m: m.family == 'encoder', 'model.family is encoder')
_PROJECTIONS = (lambda m: m.attention_projections, 'model.attention_projections is True')
_LATENT = (lambda m: m.kv_latent_dim is not None, 'model.kv_latent_dim is set')
_NORM = (lambda m: m.norm is not None, 'model.norm is not None')
_LORA = (lambda m: m.lora_rank is not None, 'model.lora_rank is set')
_TRANSFORM = (
    lambda m: m.mlm_transform or m.task_transform,
    'model.mlm_transform or model.task_transform is True',
)
_EXPERTS = (lambda m: m.num_experts is not None, 'model.num_experts is set')


def _has_norms(m: Model) -> bool:
    return bool(
        PLACEMENTS[m.norm_placement].has_norm or m.final_norm or m.embedding_norm or m.mlm_transform or m.task_transform
    )


# Fields of the model that pick a row of a table whose rows name the fields that they read.
_ROWS: dict[str, Mapping[Any, Any]] = {
    'position': POSITIONS,
    'rope_scaling': ROPE_SCALINGS,
    'expert_dispatch': DISPATCHES,
}


def _of_rows(choice: str, field: str) -> Rule:
    """Returns the rule that a field applies where the chosen row of a table reads it."""
    table = _ROWS[choice]
    keys = [str(key) for key, row in table.items() if field in row.fields]
    return lambda m: field in table[getattr(m, choice)].fields, f'model.{choice} is {" or ".join(keys)}'


def _of_norms(field: str) -> Rule:
    """Returns the rule that a field applies where a norm of the stream, of queries and keys, or of latents reads it."""
    keys = [str(key) for key, row in NORMS.items() if field in row.fields]

    def applies(m: Model) -> bool:
        latents = m.kv_latent_dim is not None and field in RMSNorm.fields
        return latents or field in HEAD_NORMS[m.qk_norm].fields or (_has_norms(m) and field in NORMS[m.norm].fields)

    return applies, f'model.norm is {" or ".join(keys)} (or model.qk_norm or model.kv_latent_dim is set)'


def rules() -> dict[str, Rule]:
    """Returns field -> (where it applies, the same in words); fields that are absent apply everywhere."""
    by_row = {field: choice for choice, table in _ROWS.items() for row in table.values() for field in row.fields}
    by_norm = {field for row in NORMS.values() for field in row.fields}
    found = {field: _of_rows(choice, field) for field, choice in by_row.items()}
    return {**APPLIES, **found, **{field: _of_norms(field) for field in by_norm}}


APPLIES: dict[str, Rule] = {
    'bidirectional': (
        lambda m: m.recurrence is not None and m.family != 'decoder',
        'model.recurrence is set and model.family is encoder or encoder_decoder',
    ),
    'recurrent_attention': (
        lambda m: m.recurrence is not None and m.family == 'encoder_decoder',
        'model.recurrence is set and model.family is encoder_decoder',
    ),
    'encoder_vocab_size': (lambda m: m.family == 'encoder_decoder', 'model.family is encoder_decoder'),
    'num_encoder_layers': _ENCODER,
    'num_decoder_layers': _DECODER,
    'num_kv_heads': _PROJECTIONS,
    'head_dim': _PROJECTIONS,
    'value_dim': _PROJECTIONS,
    'attention_bias': _PROJECTIONS,
    'query_latent_dim': _LATENT,
    'rotary_dim': _LATENT,
    'embedding_norm': _NORM,
    'num_token_types': _ENCODER_ONLY,
    'cross_position': (
        lambda m: m.family == 'encoder_decoder' and POSITIONS[m.position].pairwise,
        'model.family is encoder_decoder and model.position turns or biases, as rope, alibi and relative do',
    ),
    'local_rope_theta': (
        lambda m: 'rope_theta' in POSITIONS[m.position].fields and has_window(m),
        'model.position is rope and model.attention_pattern has a local layer',
    ),
    'attention_scale_dim': (
        lambda m: m.attention_scale == 'sqrt_scale_dim',
        'model.attention_scale is sqrt_scale_dim',
    ),
    'norm': (_has_norms, 'model.norm_placement has norms: not rezero (or another field asks for a norm)'),
    'final_norm': _NORM,
    'first_norm': (
        lambda m: m.norm is not None and PLACEMENTS[m.norm_placement].before,
        'model.norm is not None and model.norm_placement is '
        + ' or '.join(k for k, row in PLACEMENTS.items() if row.before),
    ),
    'window': (has_window, 'model.attention_pattern has a local layer'),
    'experts_per_token': _EXPERTS,
    'router_bias': _EXPERTS,
    'expert_dispatch': _EXPERTS,
    'balance_weight': _EXPERTS,
    'router_z_weight': _EXPERTS,
    'generator_fraction': _ENCODER_ONLY,
    'task_transform': (lambda m: not NORMS[m.norm].whole_batch, 'model.norm is not batchnorm'),
    'transform_activation': _TRANSFORM,
    'transform_bias': _TRANSFORM,
    'lora_alpha': _LORA,
    'lora_targets': _LORA,
    'base_emb_dim': (lambda m: parametrization(m).from_base, 'model.parametrization is mup'),
}
# The fields of a recurrent model. All others are the block's.
RECURRENT = (
    *('family', 'recurrence', 'bidirectional', 'recurrent_attention', 'vocab_size', 'encoder_vocab_size', 'emb_dim'),
    *('num_encoder_layers', 'num_decoder_layers', 'max_len', 'tied_embeddings', 'embedding_scale'),
    *('embedding_factor_dim', 'num_token_types', 'output_bias', 'output_scale', 'output_softcap', 'num_classes'),
    *(
        'pooling',
        'pooler',
        'pooler_activation',
        'class_bias',
        'similarity_temperature',
        'dropout_rate',
        'head_dropout_rate',
        'initializer',
        'init_scale',
        'scan_layers',
    ),
    *('dtype', 'param_dtype'),
)


# A resolved model sets these.
_DERIVED = (
    *('num_kv_heads', 'head_dim', 'value_dim', 'rotary_dim', 'encoder_vocab_size', 'final_norm', 'attention_scale'),
    'transform_activation',
)
_DEFAULTS = {field.name: field.default for field in dataclasses.fields(Model)}


def check_applies(model: Model) -> None:
    """Raises a `UserError` of one line where a field that does not apply differs from its default."""
    for name, default in _DEFAULTS.items():
        value = getattr(model, name)
        words = None if value == default else elsewhere(model, name)
        if words is not None and not as_derived(model, name):
            raise UserError(f'model.{name}={value} has no effect here: it applies where {words}')


def elsewhere(model: Model, name: str) -> str | None:
    """Returns where a field applies, in words, if it has no effect in this model; else None."""
    applies, words = rules().get(name, _EVERYWHERE)
    if model.recurrence is not None and name not in RECURRENT:
        applies, words = _BLOCK
    return None if applies(model) else words


def as_derived(model: Model, name: str) -> bool:
    """Returns whether the field has the value that `None` stands for, or `auto` stood for in earlier versions."""
    if name == 'attention_kernel':
        return model.attention_kernel == 'reference'
    if name not in _DERIVED:
        return False
    cleared: dict[str, Any] = {name: None}
    return getattr(resolve_model(dataclasses.replace(model, **cleared)), name) == getattr(model, name)
