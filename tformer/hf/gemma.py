"""Gemma 1, 2 and 3 on the hub: fields of config.json, names and layouts of tensors."""

from typing import Any

from tformer.config import Model
from tformer.errors import UserError
from tformer.hf.fields import GATED_ACTIVATIONS, Field, HubConfig, field
from tformer.hf.llama import (
    ATTENTION_BIAS,
    DEFAULTS,
    LLAMA,
    NAMES,
    OF_LLAMA,
    RULES,
    WITHOUT_ROTARY,
    Kinds,
    attention,
    depth,
    gated_mlp,
    head_norms,
    scales,
    windows,
)
from tformer.hf.rotary import layered_rotary
from tformer.hf.rules import Family


# ---------------------------------------------------------------------------------------------------- config.json
def _five_local_layers(hub: HubConfig) -> Kinds:
    """Each layer of Gemma 3 that sees all comes after five that do not, or as `sliding_window_pattern` says."""
    period = hub.size('sliding_window_pattern')
    return ['sliding_attention' if (i + 1) % period else 'full_attention' for i in range(depth(hub))]


GEMMA3_WINDOWS = windows(_five_local_layers)


def _read_other_name(hub: HubConfig) -> dict[str, Any]:
    """The files of Gemma 1 may name its activation twice; versions of the hub's library read one or the other."""
    other = hub.get('hidden_activation')
    hub.was_read.add('hidden_activation')
    if other not in (None, 'gelu_pytorch_tanh') or (other and hub['hidden_act'] not in ('gelu', other)):
        raise UserError(
            f'config.json: hidden_activation={other!r} with hidden_act={hub["hidden_act"]!r} has no counterpart'
        )
    return {}


def _read_scale(hub: HubConfig) -> dict[str, Any]:
    scales = {hub.size('hidden_size'): 'sqrt_emb_dim', hub.size('head_dim'): None}
    size = hub.number('query_pre_attn_scalar')
    if size in scales:
        return {'attention_scale': scales[size]}
    return {'attention_scale': 'sqrt_scale_dim', 'attention_scale_dim': size}


def _write_scale(model: Model) -> dict[str, Any]:
    scale_dim = float(model.attention_scale_dim)
    whole = int(scale_dim) if scale_dim.is_integer() else scale_dim  # as the hub writes it
    sizes = {'sqrt_emb_dim': model.emb_dim, 'sqrt_scale_dim': whole}
    return {'query_pre_attn_scalar': sizes.get(str(model.attention_scale), model.head_dim)}


# ---------------------------------------------------------------------------------------------------- tensors
SANDWICH = (
    *attention(),
    *gated_mlp(),
    *scales(
        attention_norm='input_layernorm',
        attention_out_norm='post_attention_layernorm',
        mlp_norm='pre_feedforward_layernorm',
        mlp_out_norm='post_feedforward_layernorm',
    ),
)
GEMMA = LLAMA | {'embedding_scale': 'sqrt_dim', 'norm': 'rmsnorm_offset'}
OF_GEMMA = {**DEFAULTS, 'head_dim': 256, 'attention_bias': False, 'tie_word_embeddings': True}
OF_GEMMA2 = {
    **OF_GEMMA,
    'num_key_value_heads': 4,
    'hidden_activation': 'gelu_pytorch_tanh',
    'layer_types': None,
}

FAMILIES = {
    'gemma': Family(  # Gemma Team 2024; 'gelu' of its early files is the approximation, too
        model=GEMMA,
        fields=(
            *OF_LLAMA,
            ATTENTION_BIAS,
            field('activation', 'hidden_act', values={**GATED_ACTIVATIONS, 'gelu': 'geglu_tanh'}),
            Field(_read_other_name, lambda model: {}),
        ),
        rules=RULES,
        **NAMES,
        defaults={**OF_GEMMA, 'num_key_value_heads': 16, 'hidden_act': 'gelu_pytorch_tanh'},
        fixed={'use_bidirectional_attention': None},
    ),
    'gemma2': Family(  # Gemma Team 2024
        model=GEMMA | {'norm_placement': 'sandwich'},
        fields=(
            *OF_LLAMA,
            ATTENTION_BIAS,
            field('activation', 'hidden_activation', values=GATED_ACTIVATIONS),
            field('attention_softcap', 'attn_logit_softcapping', null=True),
            field('output_softcap', 'final_logit_softcapping', null=True),
            windows(lambda hub: ('sliding_attention', 'full_attention')),
            Field(_read_scale, _write_scale),
        ),
        rules=SANDWICH,
        **NAMES,
        defaults=OF_GEMMA2,
        fixed={'use_bidirectional_attention': None},
        neutral=('hidden_act',),
    ),
    'gemma3_text': Family(  # Gemma Team 2025
        model=GEMMA | {'norm_placement': 'sandwich', 'qk_norm': 'rmsnorm_offset'},
        fields=(
            *WITHOUT_ROTARY,
            ATTENTION_BIAS,
            field('activation', 'hidden_activation', values=GATED_ACTIVATIONS),
            field('output_softcap', 'final_logit_softcapping', null=True),
            GEMMA3_WINDOWS,
            layered_rotary(lambda hub: GEMMA3_WINDOWS.read(hub)['attention_pattern']),
            Field(_read_scale, _write_scale),
        ),
        rules=(*SANDWICH, *head_norms('H -> H', 'H -> H')),
        **NAMES,
        defaults={
            **OF_GEMMA2,
            'rope_theta': 1_000_000.0,
            'rope_local_base_freq': 10_000.0,
            'sliding_window': 4096,
            'sliding_window_pattern': 6,
            'query_pre_attn_scalar': 256,
            'final_logit_softcapping': None,
        },
        # The hub's library has no soft-cap in the attention of this family, though its files have the field.
        fixed={'use_bidirectional_attention': False, 'attn_logit_softcapping': None},
        neutral=('hidden_act', 'sliding_window_pattern', '_sliding_window_pattern'),
    ),
}
