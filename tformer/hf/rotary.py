"""The rotary embedding in config.json: `rope_parameters`, or the `rope_theta` and `rope_scaling` of earlier files."""

from typing import Any

from tformer.config import Model
from tformer.errors import UserError, choose
from tformer.hf.fields import Field, HubConfig

ROPE_FIELDS = (
    'rope_type type rope_theta factor original_max_position_embeddings model_type low_freq_factor high_freq_factor'
).split()


def _read(hub: HubConfig) -> dict[str, Any]:
    """Reads `rope_parameters`, or the `rope_theta` and `rope_scaling` of earlier files."""
    rope = hub.section('rope_parameters')
    if rope is not None and hub.section('rope_scaling') is not None:
        raise UserError('config.json: rope_parameters and rope_scaling are both given; valid: one of them')
    if rope is None:
        rope = HubConfig({'rope_theta': hub['rope_theta'], **(hub.section('rope_scaling') or {})}, {})
    kind = rope.get('rope_type', rope.get('type', 'default'))
    scaling = choose({'default': None, 'linear': 'linear', 'llama3': 'llama3'}, str(kind), 'config.json: rope_type')
    found = {'rope_theta': rope['rope_theta'], 'rope_scaling': scaling}
    if scaling is not None:
        found['rope_factor'] = rope['factor']
    if others := [name for name, value in rope.items() if name not in ROPE_FIELDS and value is not None]:
        raise UserError(f'config.json: {", ".join(others)} of the rotary embedding have no counterpart')
    if scaling == 'llama3':
        found['rope_trained_len'] = trained = rope['original_max_position_embeddings']
        if hub.get('original_max_position_embeddings') not in (None, trained):
            raise UserError(f'config.json: original_max_position_embeddings is given twice; valid: {trained}')
        if (rope['low_freq_factor'], rope['high_freq_factor']) != (1, 4):
            raise UserError('config.json: low_freq_factor and high_freq_factor other than 1 and 4 have no counterpart')
    return found


def _write(model: Model) -> dict[str, Any]:
    rope: dict[str, Any] = {'rope_type': model.rope_scaling or 'default', 'rope_theta': model.rope_theta}
    if model.rope_scaling is not None:
        rope['factor'] = model.rope_factor
    if model.rope_scaling == 'llama3':
        rope['original_max_position_embeddings'] = model.rope_trained_len
        rope |= {'low_freq_factor': 1.0, 'high_freq_factor': 4.0}
    return {'rope_parameters': rope}


ROTARY = Field(_read, _write)
