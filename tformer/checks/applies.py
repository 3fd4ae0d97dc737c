"""Where a field of the model means something. Elsewhere it keeps its default: a knob that does nothing is an error."""

import dataclasses
from collections.abc import Callable
from typing import Any

from tformer.config import Model
from tformer.errors import UserError
from tformer.layers.resolved import resolve_model

Condition = Callable[[Model], bool]

_EVERYWHERE = (lambda m: True, '')
_BLOCK = (lambda m: m.recurrence is None, 'model.recurrence is None')
_ENCODER = (lambda m: m.family != 'decoder', 'model.family is encoder or encoder_decoder')
_DECODER = (lambda m: m.family != 'encoder', 'model.family is decoder or encoder_decoder')
_RECURRENT_ENCODER = (
    lambda m: m.recurrence is not None and m.family != 'decoder',
    'model.recurrence is set and model.family is encoder or encoder_decoder',
)
_RECURRENT_BOTH = (
    lambda m: m.recurrence is not None and m.family == 'encoder_decoder',
    'model.recurrence is set and model.family is encoder_decoder',
)
_ENCODER_ONLY = (lambda m: m.family == 'encoder', 'model.family is encoder')
_PROJECTIONS = (lambda m: m.attention_projections, 'model.attention_projections is True')
_ROPE = (lambda m: m.position == 'rope', 'model.position is rope')
_RELATIVE = (lambda m: m.position == 'relative', 'model.position is relative')
_NORM = (lambda m: m.norm is not None, 'model.norm is not None')
_LORA = (lambda m: m.lora_rank is not None, 'model.lora_rank is set')
_EXPERTS = (lambda m: m.num_experts is not None, 'model.num_experts is set')


def _has_norms(m: Model) -> bool:
    return bool(m.norm_placement != 'rezero' or m.final_norm or m.embedding_norm or m.mlm_transform)


def _divides_by_deviation(m: Model) -> bool:
    return m.qk_norm is not None or (_has_norms(m) and m.norm not in (None, 'dyt'))


_EPSILON = (_divides_by_deviation, 'model.norm, or model.qk_norm, divides by a deviation: not dyt, not None')

# Field -> (where it applies, in words). Those that are absent apply everywhere.
APPLIES: dict[str, tuple[Condition, str]] = {
    'bidirectional': _RECURRENT_ENCODER,
    'recurrent_attention': _RECURRENT_BOTH,
    'encoder_vocab_size': (lambda m: m.family == 'encoder_decoder', 'model.family is encoder_decoder'),
    'num_encoder_layers': _ENCODER,
    'num_decoder_layers': _DECODER,
    'num_kv_heads': _PROJECTIONS,
    'head_dim': _PROJECTIONS,
    'value_dim': _PROJECTIONS,
    'attention_bias': _PROJECTIONS,
    'embedding_norm': _NORM,
    'num_token_types': _ENCODER_ONLY,
    'position_offset': (lambda m: m.position == 'learned', 'model.position is learned'),
    'rope_theta': _ROPE,
    'rope_fraction': _ROPE,
    'rope_scaling': _ROPE,
    'rope_factor': (lambda m: m.rope_scaling is not None, 'model.rope_scaling is linear or llama3'),
    'rope_trained_len': (lambda m: m.rope_scaling == 'llama3', 'model.rope_scaling is llama3'),
    'relative_buckets': _RELATIVE,
    'relative_max_distance': _RELATIVE,
    'relative_per_layer': _RELATIVE,
    'cross_position': (
        lambda m: m.family == 'encoder_decoder' and m.position not in ('sinusoidal', 'learned', None),
        'model.family is encoder_decoder and model.position turns or biases, as rope, alibi and relative do',
    ),
    'norm': (_has_norms, 'model.norm_placement is not rezero (or another field asks for a norm)'),
    'norm_epsilon': _EPSILON,
    'norm_epsilon_in_root': _EPSILON,
    'final_norm': _NORM,
    'window': (lambda m: 'local' in m.attention_pattern, 'model.attention_pattern has a local layer'),
    'experts_per_token': _EXPERTS,
    'expert_dispatch': _EXPERTS,
    'expert_capacity': (lambda m: m.expert_dispatch == 'capacity', 'model.expert_dispatch is capacity'),
    'balance_weight': _EXPERTS,
    'router_z_weight': _EXPERTS,
    'generator_fraction': _ENCODER_ONLY,
    'lora_alpha': _LORA,
    'lora_targets': _LORA,
    'base_emb_dim': (lambda m: m.parametrization == 'mup', 'model.parametrization is mup'),
}
# The fields of a recurrent model. All others are the block's.
RECURRENT = (
    *('family', 'recurrence', 'bidirectional', 'recurrent_attention', 'vocab_size', 'encoder_vocab_size', 'emb_dim'),
    *('num_encoder_layers', 'num_decoder_layers', 'max_len', 'tied_embeddings', 'embedding_scale'),
    *('embedding_factor_dim', 'num_token_types', 'output_bias', 'output_scale', 'output_softcap', 'num_classes'),
    *('pooling', 'pooler', 'dropout_rate', 'head_dropout_rate', 'initializer', 'init_scale', 'scan_layers'),
    *('dtype', 'param_dtype'),
)
# A resolved model sets these.
_DERIVED = ('num_kv_heads', 'head_dim', 'value_dim', 'encoder_vocab_size', 'final_norm', 'attention_scale')
_DEFAULTS = {field.name: field.default for field in dataclasses.fields(Model)}


def check_applies(model: Model) -> None:
    """Raises a `UserError` of one line where a field that does not apply differs from its default."""
    for name, default in _DEFAULTS.items():
        applies, words = APPLIES.get(name, _EVERYWHERE)
        if model.recurrence is not None and name not in RECURRENT:
            applies, words = _BLOCK
        value = getattr(model, name)
        if value != default and not applies(model) and not _as_derived(model, name):
            raise UserError(f'model.{name}={value} has no effect here: it applies where {words}')


def _as_derived(model: Model, name: str) -> bool:
    """Returns whether the field has the value that `None` stands for."""
    if name not in _DERIVED:
        return False
    cleared: dict[str, Any] = {name: None}
    return getattr(resolve_model(dataclasses.replace(model, **cleared)), name) == getattr(model, name)
