"""GPT-2, Llama, Gemma 2 and Mixtral on the hub: fields of config.json, names and layouts of tensors."""

import dataclasses
from typing import Any

from tformer.config import Model
from tformer.errors import UserError, choose
from tformer.hf.rules import (
    ACTIVATIONS,
    ALL_BIASES,
    DOWN,
    GATED_ACTIVATIONS,
    HEAD,
    IN,
    KEY,
    OUT,
    POSITIONS,
    QUERY,
    TABLE,
    VALUE,
    Family,
    Fields,
    Rule,
    linear,
    norm,
    untied,
)


# ---------------------------------------------------------------------------------------------------- config.json
def gpt2(hub: Fields) -> Model:
    return Model(
        family='decoder',
        vocab_size=hub['vocab_size'],
        emb_dim=hub['n_embd'],
        mlp_dim=hub['n_inner'] or 4 * hub['n_embd'],
        num_decoder_layers=hub['n_layer'],
        num_heads=hub['n_head'],
        max_len=hub['n_positions'],
        embedding_scale=None,
        position='learned',
        norm_epsilon=hub['layer_norm_epsilon'],
        attention_bias=ALL_BIASES,
        activation=choose(ACTIVATIONS, hub['activation_function'], 'config.json: activation_function'),
        dropout_rate=hub['resid_pdrop'],
        attention_dropout_rate=hub['attn_pdrop'],
        initializer='gpt2',
    )


def llama(hub: Fields) -> Model:
    return Model(
        family='decoder',
        vocab_size=hub['vocab_size'],
        emb_dim=hub['hidden_size'],
        mlp_dim=hub['intermediate_size'],
        num_decoder_layers=hub['num_hidden_layers'],
        num_heads=hub['num_attention_heads'],
        num_kv_heads=hub['num_key_value_heads'],
        head_dim=hub['head_dim'],
        max_len=hub['max_position_embeddings'],
        tied_embeddings='all' if hub['tie_word_embeddings'] else None,
        embedding_scale=None,
        position='rope',
        **rotary(hub),
        norm='rmsnorm',
        norm_epsilon=hub['rms_norm_eps'],
        attention_bias=ALL_BIASES if hub['attention_bias'] else (),
        mlp_bias=hub['mlp_bias'],
        activation=choose(GATED_ACTIVATIONS, hub['hidden_act'], 'config.json: hidden_act'),
        dropout_rate=0.0,
        attention_dropout_rate=hub['attention_dropout'],
        initializer='truncated_normal',
    )


def gemma2(hub: Fields) -> Model:
    kinds = ['local' if kind == 'sliding_attention' else 'global' for kind in hub['layer_types'] or ()]
    pattern = kinds or ['local', 'global']
    period = next(n for n in range(1, len(pattern) + 1) if all(k == pattern[i % n] for i, k in enumerate(pattern)))
    scales = {hub['hidden_size']: 'sqrt_emb_dim', hub['head_dim']: None}
    return dataclasses.replace(
        llama(Fields({**hub, 'hidden_act': hub['hidden_activation']})),
        embedding_scale='sqrt_dim',
        norm_placement='sandwich',
        attention_scale=choose(scales, hub['query_pre_attn_scalar'], 'config.json: query_pre_attn_scalar'),
        attention_pattern=tuple(pattern[:period]),
        window=hub['sliding_window'] if 'local' in pattern else None,
        attention_softcap=hub['attn_logit_softcapping'],
        output_softcap=hub['final_logit_softcapping'],
    )


def mixtral(hub: Fields) -> Model:
    return dataclasses.replace(
        llama(hub),
        attention_pattern=('local',) if hub['sliding_window'] else ('global',),
        window=hub['sliding_window'],
        num_experts=hub['num_local_experts'],
        experts_per_token=hub['num_experts_per_tok'],
        # The hub's loss adds up the choices and averages over layers; ours averages over choices, and layers add up.
        balance_weight=hub['router_aux_loss_coef'] * hub['num_experts_per_tok'] / hub['num_hidden_layers'],
        router_z_weight=0.0,
    )


def rotary(hub: Fields) -> dict[str, Any]:
    """Returns the rotary fields: those of `rope_parameters`, in earlier files `rope_theta` and `rope_scaling`."""
    rope = Fields(hub.get('rope_parameters') or {'rope_theta': hub['rope_theta'], **(hub.get('rope_scaling') or {})})
    kind = rope.get('rope_type', rope.get('type', 'default'))
    scaling = choose({'default': None, 'linear': 'linear', 'llama3': 'llama3'}, kind, 'config.json: rope_type')
    fields = {'rope_theta': float(rope['rope_theta']), 'rope_scaling': scaling}
    if scaling is not None:
        fields['rope_factor'] = float(rope['factor'])
    if scaling == 'llama3':
        fields['rope_trained_len'] = rope['original_max_position_embeddings']
        if (rope['low_freq_factor'], rope['high_freq_factor']) != (1, 4):
            raise UserError('config.json: low_freq_factor and high_freq_factor other than 1 and 4 have no counterpart')
    return fields


# ---------------------------------------------------------------------------------------------------- tensors
LAYER, OURS = 'model.layers.{layer}', 'decoder/stack/layers'


def bias_of(role: str) -> dict[str, Any]:
    return {'when': lambda model: role in model.attention_bias}


def attention() -> tuple[Rule, ...]:
    """Returns the rules of embeddings, attention and output that Llama's relatives share; biases where there are."""
    layouts = {'query': ('q', QUERY), 'key': ('k', KEY), 'value': ('v', VALUE), 'out': ('o', OUT)}
    rules = [
        Rule('model.embed_tokens.weight', 'embed/table', TABLE),
        Rule('lm_head.weight', 'head/logits/kernel', HEAD, when=untied),
    ]
    for role, (letter, layout) in layouts.items():
        kernel, bias = linear(f'{LAYER}.self_attn.{letter}_proj', f'{OURS}/attention/{role}', layout)
        rules += [kernel, bias._replace(**bias_of(role))]
    return tuple(rules)


def gated_mlp() -> tuple[Rule, ...]:
    rules = (
        *linear(f'{LAYER}.mlp.gate_proj', f'{OURS}/mlp/in_0', IN),
        *linear(f'{LAYER}.mlp.up_proj', f'{OURS}/mlp/in_1', IN),
        *linear(f'{LAYER}.mlp.down_proj', f'{OURS}/mlp/out', DOWN),
    )
    return tuple(r._replace(when=lambda model: model.mlp_bias) if r.hub.endswith('bias') else r for r in rules)


def scales(plus: float = 0.0, **names: str) -> tuple[Rule, ...]:
    """Returns the rules of RMSNorms, our name = theirs."""
    layers = [Rule(f'{LAYER}.{hub}.weight', f'{OURS}/{ours}/scale', 'D -> D', plus) for ours, hub in names.items()]
    return (*layers, Rule('model.norm.weight', 'decoder/stack/norm/scale', 'D -> D', plus))


PARTS = ('query', 'key', 'value')
BLOCK = 'transformer.h.{layer}'
EXPERT = f'{LAYER}.block_sparse_moe.experts.{{expert}}'
OF_LLAMA: dict[str, Any] = {
    'prefix': 'model.',
    'ignored': ('model.layers.*.self_attn.rotary_emb.inv_freq',),
    'copies': {'lm_head.weight': 'model.embed_tokens.weight'},
}
DEFAULTS = {
    'head_dim': None,
    'num_key_value_heads': None,
    'tie_word_embeddings': False,
    'rope_theta': 10_000.0,
    'attention_bias': False,
    'mlp_bias': False,
    'attention_dropout': 0.0,
}

FAMILIES = {
    'gpt2': Family(  # Radford et al. 2019; its kernels are [in, out]
        model=gpt2,
        rules=(
            Rule('transformer.wte.weight', 'embed/table', TABLE),
            Rule('transformer.wpe.weight', 'decoder/input_embedding/positions/table', POSITIONS),
            *norm(f'{BLOCK}.ln_1', f'{OURS}/attention_norm'),
            Rule(
                f'{BLOCK}.attn.c_attn.weight',
                f'{OURS}/attention/{{part}}/kernel',
                'D (part N H) -> part D N H',
                parts=PARTS,
            ),
            Rule(f'{BLOCK}.attn.c_attn.bias', f'{OURS}/attention/{{part}}/bias', '(part N H) -> part N H', parts=PARTS),
            Rule(f'{BLOCK}.attn.c_proj.weight', f'{OURS}/attention/out/kernel', '(N V) D -> N V D'),
            Rule(f'{BLOCK}.attn.c_proj.bias', f'{OURS}/attention/out/bias', 'D -> D'),
            *norm(f'{BLOCK}.ln_2', f'{OURS}/mlp_norm'),
            Rule(f'{BLOCK}.mlp.c_fc.weight', f'{OURS}/mlp/in_0/kernel', 'D F -> D F'),
            Rule(f'{BLOCK}.mlp.c_fc.bias', f'{OURS}/mlp/in_0/bias', 'F -> F'),
            Rule(f'{BLOCK}.mlp.c_proj.weight', f'{OURS}/mlp/out/kernel', 'F D -> F D'),
            Rule(f'{BLOCK}.mlp.c_proj.bias', f'{OURS}/mlp/out/bias', 'D -> D'),
            *norm('transformer.ln_f', 'decoder/stack/norm'),
        ),
        prefix='transformer.',
        ignored=('transformer.h.*.attn.bias', 'transformer.h.*.attn.masked_bias'),  # causal masks
        copies={'lm_head.weight': 'transformer.wte.weight'},
        defaults={'n_inner': None, 'activation_function': 'gelu_new'},
        fixed={
            'scale_attn_weights': True,
            'scale_attn_by_inverse_layer_idx': False,
            'add_cross_attention': False,
            'tie_word_embeddings': True,
        },
    ),
    'llama': Family(  # Touvron et al. 2023, Llama Team 2024
        model=llama,
        rules=(
            *attention(),
            *gated_mlp(),
            *scales(attention_norm='input_layernorm', mlp_norm='post_attention_layernorm'),
        ),
        **OF_LLAMA,
        defaults=DEFAULTS,
    ),
    'gemma2': Family(  # Gemma Team 2024
        model=gemma2,
        rules=(
            *attention(),
            *gated_mlp(),
            *scales(
                plus=1.0,
                attention_norm='input_layernorm',
                attention_out_norm='post_attention_layernorm',
                mlp_norm='pre_feedforward_layernorm',
                mlp_out_norm='post_feedforward_layernorm',
            ),
        ),
        **OF_LLAMA,
        defaults={
            **DEFAULTS,
            'tie_word_embeddings': True,
            'hidden_activation': 'gelu_pytorch_tanh',
            'layer_types': None,
        },
        fixed={'use_bidirectional_attention': None},
    ),
    'mixtral': Family(  # Jiang et al. 2024
        model=mixtral,
        rules=(
            *attention(),
            Rule(f'{LAYER}.block_sparse_moe.gate.weight', f'{OURS}/mlp/router/kernel', 'experts D -> D experts'),
            Rule(f'{EXPERT}.w1.weight', f'{OURS}/mlp/in_0/kernel', IN),
            Rule(f'{EXPERT}.w3.weight', f'{OURS}/mlp/in_1/kernel', IN),
            Rule(f'{EXPERT}.w2.weight', f'{OURS}/mlp/out/kernel', DOWN),
            *scales(attention_norm='input_layernorm', mlp_norm='post_attention_layernorm'),
        ),
        **OF_LLAMA,
        defaults={**DEFAULTS, 'rope_theta': 1_000_000.0, 'sliding_window': None, 'router_aux_loss_coef': 0.001},
    ),
}
