"""GPT-2, Llama, Gemma 2 and Mixtral on the hub: fields of config.json, names and layouts of tensors."""

from typing import Any

from tformer.config import Model
from tformer.errors import UserError, choose
from tformer.hf.fields import ACTIVATIONS, GATED_ACTIVATIONS, Field, HubConfig, field, fields
from tformer.hf.rules import ALL_BIASES, Family, Rule, linear, norm, tensor, untied

# ---------------------------------------------------------------------------------------------------- config.json
GPT2: dict[str, Any] = {
    'family': 'decoder',
    'embedding_scale': None,
    'position': 'learned',
    'attention_bias': ALL_BIASES,
    'initializer': 'gpt2',
}


def _read_gpt2(hub: HubConfig) -> dict[str, Any]:
    if hub.get('embd_pdrop') == hub['resid_pdrop']:  # one rate for both here
        hub.was_read.add('embd_pdrop')
    return {'mlp_dim': hub.nullable('n_inner') or 4 * hub.size('n_embd'), 'dropout_rate': hub['resid_pdrop']}


def _write_gpt2(model: Model) -> dict[str, Any]:
    return {'n_inner': model.mlp_dim, 'resid_pdrop': model.dropout_rate, 'embd_pdrop': model.dropout_rate}


LLAMA: dict[str, Any] = {
    'family': 'decoder',
    'embedding_scale': None,
    'position': 'rope',
    'norm': 'rmsnorm',
    'dropout_rate': 0.0,
    'initializer': 'truncated_normal',
}

ROPE_FIELDS = (
    'rope_type type rope_theta factor original_max_position_embeddings model_type low_freq_factor high_freq_factor'
).split()


def _read_rotary(hub: HubConfig) -> dict[str, Any]:
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


def _write_rotary(model: Model) -> dict[str, Any]:
    rope: dict[str, Any] = {'rope_type': model.rope_scaling or 'default', 'rope_theta': model.rope_theta}
    if model.rope_scaling is not None:
        rope['factor'] = model.rope_factor
    if model.rope_scaling == 'llama3':
        rope['original_max_position_embeddings'] = model.rope_trained_len
        rope |= {'low_freq_factor': 1.0, 'high_freq_factor': 4.0}
    return {'rope_parameters': rope}


OF_LLAMA = (
    *fields(
        vocab_size='vocab_size',
        emb_dim='hidden_size',
        mlp_dim='intermediate_size',
        num_decoder_layers='num_hidden_layers',
        num_heads='num_attention_heads',
        max_len='max_position_embeddings',
        norm_epsilon='rms_norm_eps',
        attention_dropout_rate='attention_dropout',
    ),
    field('num_kv_heads', 'num_key_value_heads', null=True),
    field('head_dim', 'head_dim', null=True),
    field('tied_embeddings', 'tie_word_embeddings', values={True: 'all', False: None}),
    Field(_read_rotary, _write_rotary),
)

ATTENTION_BIAS = field('attention_bias', 'attention_bias', values={True: ALL_BIASES, False: ()})
LAYER_TYPES = {'sliding_attention': 'local', 'full_attention': 'global'}


def _read_gemma2(hub: HubConfig) -> dict[str, Any]:
    kinds = hub.nullable('layer_types') or ['sliding_attention', 'full_attention']
    if not isinstance(kinds, list):
        raise UserError(f'config.json: layer_types={kinds!r} is not a list')
    pattern = [choose(LAYER_TYPES, str(kind), 'config.json: layer_types') for kind in kinds]
    period = next(n for n in range(1, len(pattern) + 1) if all(k == pattern[i % n] for i, k in enumerate(pattern)))
    scales = {hub.size('hidden_size'): 'sqrt_emb_dim', hub.size('head_dim'): None}
    return {
        'attention_pattern': tuple(pattern[:period]),
        'window': hub['sliding_window'] if 'local' in pattern else None,
        'attention_scale': choose(scales, hub.number('query_pre_attn_scalar'), 'config.json: query_pre_attn_scalar'),
    }


def _write_gemma2(model: Model) -> dict[str, Any]:
    names = {ours: theirs for theirs, ours in LAYER_TYPES.items()}
    pattern = model.attention_pattern
    return {
        'layer_types': [names[pattern[i % len(pattern)]] for i in range(model.num_decoder_layers)],
        'sliding_window': model.window if 'local' in pattern else None,
        'query_pre_attn_scalar': model.emb_dim if model.attention_scale == 'sqrt_emb_dim' else model.head_dim,
    }


def _read_mixtral(hub: HubConfig) -> dict[str, Any]:
    window, chosen = hub.nullable('sliding_window'), hub.size('num_experts_per_tok')
    if chosen == 1:
        raise UserError(
            'config.json: num_experts_per_tok=1 has no counterpart: a single expert counts as its probability here '
            '(Fedus et al. 2022, eq. 2) and as 1 there; valid: 2 or more'
        )
    return {
        'attention_pattern': ('local',) if window else ('global',),
        'window': window or None,
        'experts_per_token': chosen,
        # The hub's loss adds up the choices of a token; ours averages over them, and adds up over layers. It is still
        # another loss: a sum over layers of products of means here, a product of means over all layers there.
        'balance_weight': hub.number('router_aux_loss_coef') * chosen / hub.size('num_hidden_layers'),
    }


def _write_mixtral(model: Model) -> dict[str, Any]:
    return {
        'sliding_window': model.window,
        'num_experts_per_tok': model.experts_per_token,
        'router_aux_loss_coef': model.balance_weight * model.num_decoder_layers / model.experts_per_token,
    }


# ---------------------------------------------------------------------------------------------------- tensors
LAYER, OURS = 'model.layers.{layer}', 'decoder/stack/layers'


def bias_of(role: str) -> dict[str, Any]:
    return {'when': lambda model: role in model.attention_bias}


def attention() -> tuple[Rule, ...]:
    """Returns the rules of embeddings, attention and output that Llama's relatives share; biases where there are."""
    rules = [
        tensor('model.embed_tokens.weight', 'embed/table'),
        tensor('lm_head.weight', 'head/logits/kernel', when=untied),
    ]
    for role in ALL_BIASES:
        kernel, bias = linear(f'{LAYER}.self_attn.{role[0]}_proj', f'{OURS}/attention/{role}')
        rules += [kernel, bias._replace(**bias_of(role))]
    return tuple(rules)


def gated_mlp() -> tuple[Rule, ...]:
    rules = (
        *linear(f'{LAYER}.mlp.gate_proj', f'{OURS}/mlp/in_0'),
        *linear(f'{LAYER}.mlp.up_proj', f'{OURS}/mlp/in_1'),
        *linear(f'{LAYER}.mlp.down_proj', f'{OURS}/mlp/out'),
    )
    return tuple(r._replace(when=lambda model: model.mlp_bias) if r.hub.endswith('bias') else r for r in rules)


def scales(plus: float = 0.0, **names: str) -> tuple[Rule, ...]:
    """Returns the rules of RMSNorms, our name = theirs."""
    layers = [tensor(f'{LAYER}.{hub}.weight', f'{OURS}/{ours}/scale', plus=plus) for ours, hub in names.items()]
    return (*layers, tensor('model.norm.weight', 'decoder/stack/norm/scale', plus=plus))


PARTS = ('query', 'key', 'value')
BLOCK = 'transformer.h.{layer}'
EXPERT = f'{LAYER}.block_sparse_moe.experts.{{expert}}'
NAMES: dict[str, Any] = {
    'prefix': 'model.',
    'ignored': ('model.layers.*.self_attn.rotary_emb.inv_freq',),
    'copies': {'lm_head.weight': 'model.embed_tokens.weight'},
}
DEFAULTS = {
    'head_dim': None,
    'num_key_value_heads': None,
    'tie_word_embeddings': False,
    'rope_theta': 10_000.0,
    'attention_dropout': 0.0,
}

FAMILIES = {
    'gpt2': Family(  # Radford et al. 2019; its kernels are [in, out]
        model=GPT2,
        fields=(
            *fields(
                vocab_size='vocab_size',
                emb_dim='n_embd',
                num_decoder_layers='n_layer',
                num_heads='n_head',
                max_len='n_positions',
                norm_epsilon='layer_norm_epsilon',
                attention_dropout_rate='attn_pdrop',
            ),
            field('activation', 'activation_function', values=ACTIVATIONS),
            Field(_read_gpt2, _write_gpt2),
        ),
        rules=(
            tensor('transformer.wte.weight', 'embed/table'),
            tensor('transformer.wpe.weight', 'decoder/input_embedding/positions/table'),
            *norm(f'{BLOCK}.ln_1', f'{OURS}/attention_norm'),
            Rule(
                f'{BLOCK}.attn.c_attn.weight',
                f'{OURS}/attention/{{part}}/kernel',
                'D (part N H) -> part D N H',
                parts=PARTS,
            ),
            Rule(f'{BLOCK}.attn.c_attn.bias', f'{OURS}/attention/{{part}}/bias', '(part N H) -> part N H', parts=PARTS),
            Rule(f'{BLOCK}.attn.c_proj.weight', f'{OURS}/attention/out/kernel', '(N V) D -> N V D'),
            tensor(f'{BLOCK}.attn.c_proj.bias', f'{OURS}/attention/out/bias'),
            *norm(f'{BLOCK}.ln_2', f'{OURS}/mlp_norm'),
            Rule(f'{BLOCK}.mlp.c_fc.weight', f'{OURS}/mlp/in_0/kernel', 'D F -> D F'),
            tensor(f'{BLOCK}.mlp.c_fc.bias', f'{OURS}/mlp/in_0/bias'),
            Rule(f'{BLOCK}.mlp.c_proj.weight', f'{OURS}/mlp/out/kernel', 'F D -> F D'),
            tensor(f'{BLOCK}.mlp.c_proj.bias', f'{OURS}/mlp/out/bias'),
            *norm('transformer.ln_f', 'decoder/stack/norm'),
        ),
        prefix='transformer.',
        ignored=('transformer.h.*.attn.bias', 'transformer.h.*.attn.masked_bias'),  # causal masks
        copies={'lm_head.weight': 'transformer.wte.weight'},
        defaults={'n_inner': None, 'activation_function': 'gelu_new'},
        start={},
        fixed={
            'scale_attn_weights': True,
            'scale_attn_by_inverse_layer_idx': False,
            'is_encoder_decoder': False,
            'tie_word_embeddings': True,
        },
    ),
    'llama': Family(  # Touvron et al. 2023, Llama Team 2024
        model=LLAMA,
        fields=(
            *OF_LLAMA,
            ATTENTION_BIAS,
            *fields(mlp_bias='mlp_bias'),
            field('activation', 'hidden_act', values=GATED_ACTIVATIONS),
        ),
        rules=(
            *attention(),
            *gated_mlp(),
            *scales(attention_norm='input_layernorm', mlp_norm='post_attention_layernorm'),
        ),
        **NAMES,
        defaults={**DEFAULTS, 'attention_bias': False, 'mlp_bias': False},
    ),
    'gemma2': Family(  # Gemma Team 2024
        model=LLAMA | {'embedding_scale': 'sqrt_dim', 'norm_placement': 'sandwich', 'mlp_bias': False},
        fields=(
            *OF_LLAMA,
            ATTENTION_BIAS,
            field('activation', 'hidden_activation', values=GATED_ACTIVATIONS),
            field('attention_softcap', 'attn_logit_softcapping', null=True),
            field('output_softcap', 'final_logit_softcapping', null=True),
            Field(_read_gemma2, _write_gemma2),
        ),
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
        **NAMES,
        defaults={
            **DEFAULTS,
            'num_key_value_heads': 4,
            'head_dim': 256,
            'attention_bias': False,
            'tie_word_embeddings': True,
            'hidden_activation': 'gelu_pytorch_tanh',
            'layer_types': None,
        },
        fixed={'use_bidirectional_attention': None},
    ),
    'mixtral': Family(  # Jiang et al. 2024
        model=LLAMA | {'mlp_bias': False, 'router_z_weight': 0.0},
        fields=(
            *OF_LLAMA,
            field('activation', 'hidden_act', values=GATED_ACTIVATIONS),
            *fields(num_experts='num_local_experts'),
            Field(_read_mixtral, _write_mixtral),
        ),
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
            'num_key_value_heads': 8,
            'rope_theta': 1_000_000.0,
            'sliding_window': None,
            'router_aux_loss_coef': 0.001,
        },
    ),
}
