"""Decoders with a mixture of experts on the hub: fields of config.json, names and layouts of tensors."""

from typing import Any

from tformer.config import Model
from tformer.errors import UserError
from tformer.hf.fields import Field, HubConfig, fields
from tformer.hf.llama import (
    ACTIVATION,
    ATTENTION_BIAS,
    DEFAULTS,
    LAYER,
    LLAMA,
    NAMES,
    OF_LLAMA,
    OURS,
    SILU,
    WINDOW,
    WITHOUT_ROTARY,
    attention,
    scales,
    windows,
)
from tformer.hf.rotary import rotary
from tformer.hf.rules import Family, Rule, linear, tensor


def _read_choices(hub: HubConfig) -> dict[str, Any]:
    chosen = hub.size('num_experts_per_tok')
    if chosen == 1:
        raise UserError(
            'config.json: num_experts_per_tok=1 has no counterpart: a single expert counts as its probability here '
            '(Fedus et al. 2022, eq. 2) and as 1 there; valid: 2 or more'
        )
    return {
        'experts_per_token': chosen,
        # The hub's loss adds up the choices of a token; ours averages over them, and adds up over layers. It is still
        # another loss: a sum over layers of products of means here, a product of means over all layers there.
        'balance_weight': hub.number('router_aux_loss_coef') * chosen / hub.size('num_hidden_layers'),
    }


def _write_choices(model: Model) -> dict[str, Any]:
    return {
        'num_experts_per_tok': model.experts_per_token,
        'router_aux_loss_coef': model.balance_weight * model.num_decoder_layers / model.experts_per_token,
    }


CHOICES = Field(_read_choices, _write_choices)
GPT_OSS_ROPE = {
    'rope_type': 'yarn',
    'factor': 32.0,
    'beta_fast': 32.0,
    'beta_slow': 1.0,
    'truncate': False,
    'original_max_position_embeddings': 4096,
}
EXPERTS = f'{LAYER}.mlp.experts'
EXPERT = f'{LAYER}.block_sparse_moe.experts.{{expert}}'

FAMILIES = {
    'mixtral': Family(  # Jiang et al. 2024
        model=LLAMA | {'router_z_weight': 0.0},
        fields=(*OF_LLAMA, ACTIVATION, *fields(num_experts='num_local_experts'), WINDOW, CHOICES),
        rules=(
            *attention(),
            tensor(f'{LAYER}.block_sparse_moe.gate.weight', f'{OURS}/mlp/router/kernel'),
            tensor(f'{EXPERT}.w1.weight', f'{OURS}/mlp/in_0/kernel'),
            tensor(f'{EXPERT}.w3.weight', f'{OURS}/mlp/in_1/kernel'),
            tensor(f'{EXPERT}.w2.weight', f'{OURS}/mlp/out/kernel'),
            *scales(attention_norm='input_layernorm', mlp_norm='post_attention_layernorm'),
        ),
        **NAMES,
        defaults={
            **DEFAULTS,
            **SILU,
            'num_key_value_heads': 8,
            'rope_theta': 1_000_000.0,
            'sliding_window': None,
            'router_aux_loss_coef': 0.001,
        },
    ),
    'gpt_oss': Family(  # Agarwal et al. 2025
        model=LLAMA
        | {
            'activation': 'swiglu_clamped',
            'attention_sink': 'learned',
            'mlp_bias': True,
            'router_bias': True,
            'router_z_weight': 0.0,
        },
        fields=(
            *WITHOUT_ROTARY,
            rotary(default=GPT_OSS_ROPE),
            ATTENTION_BIAS,
            *fields(num_experts='num_local_experts'),
            windows(lambda hub: ('sliding_attention', 'full_attention')),
            CHOICES,
        ),
        rules=(
            *attention(),
            tensor(f'{LAYER}.self_attn.sinks', f'{OURS}/attention/sink/sink'),
            *linear(f'{LAYER}.mlp.router', f'{OURS}/mlp/router'),
            Rule(
                f'{EXPERTS}.gate_up_proj',
                f'{OURS}/mlp/{{part}}/kernel',
                'experts D (F part) -> part experts D F',
                parts=('in_0', 'in_1'),
            ),
            Rule(
                f'{EXPERTS}.gate_up_proj_bias',
                f'{OURS}/mlp/{{part}}/bias',
                'experts (F part) -> part experts F',
                parts=('in_0', 'in_1'),
            ),
            Rule(f'{EXPERTS}.down_proj', f'{OURS}/mlp/out/kernel', 'experts F D -> experts F D'),
            Rule(f'{EXPERTS}.down_proj_bias', f'{OURS}/mlp/out/bias', 'experts D -> experts D'),
            *scales(attention_norm='input_layernorm', mlp_norm='post_attention_layernorm'),
        ),
        **NAMES,
        defaults={
            **DEFAULTS,
            'num_key_value_heads': 8,
            'head_dim': 64,
            'rope_theta': 150_000.0,
            'sliding_window': 128,
            'layer_types': None,
            'attention_bias': True,
            'router_aux_loss_coef': 0.001,
        },
        fixed={'hidden_act': 'silu', 'swiglu_alpha': 1.702, 'swiglu_limit': 7.0},
        neutral=('experts_per_token', 'initial_context_length'),
        start={},
    ),
}
