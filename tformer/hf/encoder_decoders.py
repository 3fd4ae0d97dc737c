"""T5, BART and Marian on the hub: fields of config.json, names and layouts of tensors."""

from typing import Any

import numpy as np

from tformer.config import Model
from tformer.errors import UserError
from tformer.hf.fields import ACTIVATIONS, Field, HubConfig, field, fields
from tformer.hf.rules import ALL_BIASES, Family, Rule, gated, linear, norm, tensor, untied

# ---------------------------------------------------------------------------------------------------- config.json
T5: dict[str, Any] = {
    'family': 'encoder_decoder',
    'embedding_scale': None,
    'position': 'relative',
    'norm': 'rmsnorm',
    'attention_scale': 'unscaled',
    'mlp_bias': False,
    'initializer': 't5',
}
T5_ACTIVATIONS = {  # feed_forward_proj
    'relu': 'relu',
    'gelu': 'gelu',
    'silu': 'silu',
    'gated-relu': 'reglu',
    'gated-gelu': 'geglu_tanh',
    'gated-silu': 'swiglu',
}
VOCABULARY = Field(
    lambda hub: {'vocab_size': hub['vocab_size'], 'encoder_vocab_size': hub['vocab_size']},
    lambda model: {'vocab_size': model.vocab_size},
)


def _read_t5(hub: HubConfig) -> dict[str, Any]:
    """T5 1.0 scales its tied output; 1.1 has an output of its own, which `tie_word_embeddings` says, or after version 5
    of the hub's library `scale_decoder_outputs`."""
    gate, _, activation = str(hub['feed_forward_proj']).rpartition('-')
    named = {'dense_act_fn': 'gelu_new' if gate and activation == 'gelu' else activation, 'is_gated_act': bool(gate)}
    for name, implied in named.items():  # the hub's library reads these two where a file has them
        if name in hub and hub[name] != implied:
            raise UserError(f'config.json: {name}={hub[name]!r} is not that of feed_forward_proj: {implied!r}')
    tied = hub['tie_word_embeddings']
    if 'scale_decoder_outputs' in hub:
        tied = hub['scale_decoder_outputs']
    return {
        'tied_embeddings': 'all' if tied else 'inputs',
        'output_scale': 'rsqrt_dim' if tied else None,
        'num_decoder_layers': hub.nullable('num_decoder_layers') or hub['num_layers'],
        'attention_dropout_rate': hub['dropout_rate'],
        'activation_dropout_rate': hub['dropout_rate'],
    }


def _write_t5(model: Model) -> dict[str, Any]:
    tied = model.tied_embeddings == 'all'
    return {
        'tie_word_embeddings': tied,
        'scale_decoder_outputs': tied,
        'num_decoder_layers': model.num_decoder_layers,
    }


BART: dict[str, Any] = {
    'family': 'encoder_decoder',
    'embedding_norm': True,
    'position': 'learned',
    'position_offset': 2,
    'norm_placement': 'post',
    'norm_epsilon': 1e-5,
    'attention_bias': ALL_BIASES,
    'initializer': 'truncated_normal',
}
# Marian is BART with sinusoids, an output bias, and no norm of the embeddings.
MARIAN = BART | {'position': 'sinusoidal', 'position_offset': 0, 'embedding_norm': False, 'output_bias': True}
BART_FIELDS = (
    *fields(
        emb_dim='d_model',
        num_encoder_layers='encoder_layers',
        num_decoder_layers='decoder_layers',
        max_len='max_position_embeddings',
        dropout_rate='dropout',
        attention_dropout_rate='attention_dropout',
        activation_dropout_rate='activation_dropout',
    ),
    field('num_heads', 'encoder_attention_heads', 'decoder_attention_heads'),
    field('mlp_dim', 'encoder_ffn_dim', 'decoder_ffn_dim'),
    field('embedding_scale', 'scale_embedding', values={True: 'sqrt_dim', False: None}),
    field('activation', 'activation_function', values=ACTIVATIONS),
)


def _read_marian(hub: HubConfig) -> dict[str, Any]:
    if hub.nullable('decoder_vocab_size') not in (None, hub['vocab_size']):
        raise UserError('config.json: decoder_vocab_size differs from vocab_size, which has no counterpart')
    return {}


def halves(emb_dim: int) -> np.ndarray:
    """Returns the hub's channel of each of ours: its sinusoids have all sines first, ours sine and cosine in turn."""
    return np.arange(emb_dim).reshape(2, emb_dim // 2).T.reshape(-1)


# ---------------------------------------------------------------------------------------------------- tensors
def t5_stack(stack: str) -> tuple[Rule, ...]:
    theirs, ours = f'{stack}.block.{{layer}}.layer', f'{stack}/stack/layers'
    mlp = f'{theirs}.{2 if stack == "decoder" else 1}'
    attentions = [('0.SelfAttention', 'attention')] + [('1.EncDecAttention', 'cross_attention')] * (stack == 'decoder')
    kernels = [
        tensor(f'{theirs}.{hub}.{role[0]}.weight', f'{ours}/{name}/{role}/kernel')
        for hub, name in attentions
        for role in ALL_BIASES
    ]
    norms = ['attention_norm', *(['cross_norm'] if stack == 'decoder' else []), 'mlp_norm']
    return (
        tensor(f'{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight', f'{stack}/bias/table'),
        *kernels,
        *[tensor(f'{theirs}.{i}.layer_norm.weight', f'{ours}/{name}/scale') for i, name in enumerate(norms)],
        tensor(f'{mlp}.DenseReluDense.wi.weight', f'{ours}/mlp/in_0/kernel', when=lambda model: not gated(model)),
        tensor(f'{mlp}.DenseReluDense.wi_0.weight', f'{ours}/mlp/in_0/kernel', when=gated),
        tensor(f'{mlp}.DenseReluDense.wi_1.weight', f'{ours}/mlp/in_1/kernel', when=gated),
        tensor(f'{mlp}.DenseReluDense.wo.weight', f'{ours}/mlp/out/kernel'),
        tensor(f'{stack}.final_layer_norm.weight', f'{stack}/stack/norm/scale'),
    )


def bart_stack(stack: str) -> tuple[Rule, ...]:
    theirs, ours = f'model.{stack}.layers.{{layer}}', f'{stack}/stack/layers'
    attentions = [('self_attn', 'attention', 'attention_norm')]
    attentions += [('encoder_attn', 'cross_attention', 'cross_norm')] * (stack == 'decoder')
    rules: list[Rule] = []
    for hub, name, norm_name in attentions:
        rules += linear(f'{theirs}.{hub}.q_proj', f'{ours}/{name}/query')
        rules += linear(f'{theirs}.{hub}.k_proj', f'{ours}/{name}/key')
        rules += linear(f'{theirs}.{hub}.v_proj', f'{ours}/{name}/value')
        rules += linear(f'{theirs}.{hub}.out_proj', f'{ours}/{name}/out')
        rules += norm(f'{theirs}.{hub}_layer_norm', f'{ours}/{norm_name}')
    return (
        *rules,
        *linear(f'{theirs}.fc1', f'{ours}/mlp/in_0'),
        *linear(f'{theirs}.fc2', f'{ours}/mlp/out'),
        *norm(f'{theirs}.final_layer_norm', f'{ours}/mlp_norm'),
    )


def bart_input_embedding(stack: str) -> tuple[Rule, ...]:
    return (
        tensor(f'model.{stack}.embed_positions.weight', f'{stack}/input_embedding/positions/table'),
        *norm(f'model.{stack}.layernorm_embedding', f'{stack}/input_embedding/LayerNorm_0'),
    )


BART_COPIES = {
    'model.encoder.embed_tokens.weight': 'model.shared.weight',
    'model.decoder.embed_tokens.weight': 'model.shared.weight',
    'lm_head.weight': 'model.shared.weight',
}
BART_DEFAULTS = {
    'activation_function': 'gelu',
    'scale_embedding': False,
    'attention_dropout': 0.0,
    'activation_dropout': 0.0,
}
BART_FIXED = {
    'is_encoder_decoder': True,
    'normalize_before': False,
    'add_final_layer_norm': False,
    'add_bias_logits': False,
    'tie_word_embeddings': True,
}

FAMILIES = {
    't5': Family(  # Raffel et al. 2020; 1.1: Shazeer 2020
        model=T5,
        fields=(
            VOCABULARY,
            *fields(
                emb_dim='d_model',
                mlp_dim='d_ff',
                num_encoder_layers='num_layers',
                num_heads='num_heads',
                head_dim='d_kv',
                max_len='n_positions',
                relative_buckets='relative_attention_num_buckets',
                relative_max_distance='relative_attention_max_distance',
                norm_epsilon='layer_norm_epsilon',
                dropout_rate='dropout_rate',
            ),
            field('activation', 'feed_forward_proj', values=T5_ACTIVATIONS),
            Field(_read_t5, _write_t5),
        ),
        rules=(
            tensor('shared.weight', 'embed/table'),
            *t5_stack('encoder'),
            *t5_stack('decoder'),
            tensor('lm_head.weight', 'head/logits/kernel', when=untied),
        ),
        ignored=('decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight',),  # early, and never read
        copies={
            'encoder.embed_tokens.weight': 'shared.weight',
            'decoder.embed_tokens.weight': 'shared.weight',
            'lm_head.weight': 'shared.weight',
        },
        defaults={
            'num_decoder_layers': None,
            'n_positions': 512,
            'tie_word_embeddings': True,
            'feed_forward_proj': 'relu',
            'relative_attention_max_distance': 128,
        },
        fixed={'is_encoder_decoder': True},
        start={'decoder_start_token_id': 'pad', 'forced_bos_token_id': ''},
    ),
    'bart': Family(  # Lewis et al. 2020
        model=BART,
        fields=(VOCABULARY, *BART_FIELDS),
        rules=(
            tensor('model.shared.weight', 'embed/table'),
            *bart_input_embedding('encoder'),
            *bart_stack('encoder'),
            *bart_input_embedding('decoder'),
            *bart_stack('decoder'),
        ),
        prefix='model.',
        copies=BART_COPIES,
        zeros=('final_logits_bias',),
        defaults=BART_DEFAULTS,
        fixed={**BART_FIXED, 'static_position_embeddings': False, 'normalize_embedding': True},
        start={'decoder_start_token_id': 'eos', 'forced_bos_token_id': 'bos'},
        source_start={'bos_token_id': 'bos'},
    ),
    'marian': Family(  # Junczys-Dowmunt et al. 2018
        model=MARIAN,
        fields=(VOCABULARY, *BART_FIELDS, Field(_read_marian, lambda model: {})),
        rules=(
            tensor('model.shared.weight', 'embed/table'),
            *bart_stack('encoder'),
            *bart_stack('decoder'),
            Rule('final_logits_bias', 'head/bias', '1 vocab -> vocab'),
        ),
        prefix='model.',
        ignored=('model.encoder.embed_positions.weight', 'model.decoder.embed_positions.weight'),
        copies=BART_COPIES,
        order=halves,
        defaults={**BART_DEFAULTS, 'decoder_vocab_size': None},
        fixed={
            **BART_FIXED,
            'static_position_embeddings': True,
            'normalize_embedding': False,
            'share_encoder_decoder_embeddings': True,
        },
        start={'decoder_start_token_id': 'pad', 'forced_bos_token_id': ''},
    ),
}
