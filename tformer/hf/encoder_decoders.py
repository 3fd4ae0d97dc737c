"""T5, BART and Marian on the hub: fields of config.json, names and layouts of tensors."""

import dataclasses

import numpy as np

from tformer.config import Model
from tformer.errors import UserError, choose
from tformer.hf.rules import (
    ACTIVATIONS,
    ALL_BIASES,
    DOWN,
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
    gated,
    linear,
    norm,
    untied,
)

T5_ACTIVATIONS = {  # feed_forward_proj
    'relu': 'relu',
    'gelu': 'gelu',
    'silu': 'silu',
    'gated-relu': 'reglu',
    'gated-gelu': 'geglu_tanh',
    'gated-silu': 'swiglu',
}


# ---------------------------------------------------------------------------------------------------- config.json
def t5(hub: Fields) -> Model:
    """T5 1.0 scales its tied output; 1.1 has an output of its own, which `tie_word_embeddings` says, or after version 5
    of the hub's library `scale_decoder_outputs`."""
    tied = hub.get('scale_decoder_outputs', hub['tie_word_embeddings'])
    return Model(
        family='encoder_decoder',
        vocab_size=hub['vocab_size'],
        encoder_vocab_size=hub['vocab_size'],
        emb_dim=hub['d_model'],
        mlp_dim=hub['d_ff'],
        num_encoder_layers=hub['num_layers'],
        num_decoder_layers=hub['num_decoder_layers'] or hub['num_layers'],
        num_heads=hub['num_heads'],
        head_dim=hub['d_kv'],
        max_len=hub['n_positions'],
        tied_embeddings='all' if tied else 'inputs',
        embedding_scale=None,
        position='relative',
        relative_buckets=hub['relative_attention_num_buckets'],
        relative_max_distance=hub['relative_attention_max_distance'],
        norm='rmsnorm',
        norm_epsilon=hub['layer_norm_epsilon'],
        attention_scale='unscaled',
        mlp_bias=False,
        activation=choose(T5_ACTIVATIONS, hub['feed_forward_proj'], 'config.json: feed_forward_proj'),
        output_scale='rsqrt_dim' if tied else None,
        dropout_rate=hub['dropout_rate'],
        attention_dropout_rate=hub['dropout_rate'],
        activation_dropout_rate=hub['dropout_rate'],
        initializer='t5',
    )


def bart(hub: Fields) -> Model:
    for name in ('attention_heads', 'ffn_dim'):
        if hub[f'encoder_{name}'] != hub[f'decoder_{name}']:
            raise UserError(f'config.json: encoder_{name} and decoder_{name} differ, which has no counterpart')
    return Model(
        family='encoder_decoder',
        vocab_size=hub['vocab_size'],
        encoder_vocab_size=hub['vocab_size'],
        emb_dim=hub['d_model'],
        mlp_dim=hub['encoder_ffn_dim'],
        num_encoder_layers=hub['encoder_layers'],
        num_decoder_layers=hub['decoder_layers'],
        num_heads=hub['encoder_attention_heads'],
        max_len=hub['max_position_embeddings'],
        embedding_scale='sqrt_dim' if hub['scale_embedding'] else None,
        embedding_norm=True,
        position='learned',
        position_offset=2,
        norm_placement='post',
        norm_epsilon=1e-5,
        attention_bias=ALL_BIASES,
        activation=choose(ACTIVATIONS, hub['activation_function'], 'config.json: activation_function'),
        dropout_rate=hub['dropout'],
        attention_dropout_rate=hub['attention_dropout'],
        activation_dropout_rate=hub['activation_dropout'],
        initializer='truncated_normal',
    )


def marian(hub: Fields) -> Model:
    """BART with sinusoids, an output bias, and no norm of the embeddings."""
    if hub.get('decoder_vocab_size') not in (None, hub['vocab_size']):
        raise UserError('config.json: decoder_vocab_size differs from vocab_size, which has no counterpart')
    differences = {'position': 'sinusoidal', 'position_offset': 0, 'embedding_norm': False, 'output_bias': True}
    return dataclasses.replace(bart(hub), **differences)  # type: ignore[arg-type]


def halves(emb_dim: int) -> np.ndarray:
    """Returns the hub's channel of each of ours: its sinusoids have all sines first, ours sine and cosine in turn."""
    return np.arange(emb_dim).reshape(2, emb_dim // 2).T.reshape(-1)


# ---------------------------------------------------------------------------------------------------- tensors
def t5_stack(stack: str) -> tuple[Rule, ...]:
    theirs, ours = f'{stack}.block.{{layer}}.layer', f'{stack}/stack/layers'
    mlp = f'{theirs}.{2 if stack == "decoder" else 1}'
    attentions = [('0.SelfAttention', 'attention')] + [('1.EncDecAttention', 'cross_attention')] * (stack == 'decoder')
    kernels = [
        Rule(f'{theirs}.{hub}.{letter}.weight', f'{ours}/{name}/{role}/kernel', layout)
        for hub, name in attentions
        for letter, role, layout in (('q', 'query', QUERY), ('k', 'key', KEY), ('v', 'value', VALUE), ('o', 'out', OUT))
    ]
    norms = ['attention_norm', *(['cross_norm'] if stack == 'decoder' else []), 'mlp_norm']
    return (
        Rule(
            f'{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight',
            f'{stack}/bias/table',
            'buckets N -> buckets N',
        ),
        *kernels,
        *[Rule(f'{theirs}.{i}.layer_norm.weight', f'{ours}/{name}/scale', 'D -> D') for i, name in enumerate(norms)],
        Rule(f'{mlp}.DenseReluDense.wi.weight', f'{ours}/mlp/in_0/kernel', IN, when=lambda model: not gated(model)),
        Rule(f'{mlp}.DenseReluDense.wi_0.weight', f'{ours}/mlp/in_0/kernel', IN, when=gated),
        Rule(f'{mlp}.DenseReluDense.wi_1.weight', f'{ours}/mlp/in_1/kernel', IN, when=gated),
        Rule(f'{mlp}.DenseReluDense.wo.weight', f'{ours}/mlp/out/kernel', DOWN),
        Rule(f'{stack}.final_layer_norm.weight', f'{stack}/stack/norm/scale', 'D -> D'),
    )


def bart_stack(stack: str) -> tuple[Rule, ...]:
    theirs, ours = f'model.{stack}.layers.{{layer}}', f'{stack}/stack/layers'
    attentions = [('self_attn', 'attention', 'attention_norm')]
    attentions += [('encoder_attn', 'cross_attention', 'cross_norm')] * (stack == 'decoder')
    rules: list[Rule] = []
    for hub, name, norm_name in attentions:
        rules += linear(f'{theirs}.{hub}.q_proj', f'{ours}/{name}/query', QUERY)
        rules += linear(f'{theirs}.{hub}.k_proj', f'{ours}/{name}/key', KEY)
        rules += linear(f'{theirs}.{hub}.v_proj', f'{ours}/{name}/value', VALUE)
        rules += linear(f'{theirs}.{hub}.out_proj', f'{ours}/{name}/out', OUT)
        rules += norm(f'{theirs}.{hub}_layer_norm', f'{ours}/{norm_name}')
    return (
        *rules,
        *linear(f'{theirs}.fc1', f'{ours}/mlp/in_0', IN),
        *linear(f'{theirs}.fc2', f'{ours}/mlp/out', DOWN),
        *norm(f'{theirs}.final_layer_norm', f'{ours}/mlp_norm'),
    )


def bart_input_embedding(stack: str) -> tuple[Rule, ...]:
    return (
        Rule(f'model.{stack}.embed_positions.weight', f'{stack}/input_embedding/positions/table', POSITIONS),
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
    'normalize_before': False,
    'add_final_layer_norm': False,
    'add_bias_logits': False,
    'tie_word_embeddings': True,
}

FAMILIES = {
    't5': Family(  # Raffel et al. 2020; 1.1: Shazeer 2020
        model=t5,
        rules=(
            Rule('shared.weight', 'embed/table', TABLE),
            *t5_stack('encoder'),
            *t5_stack('decoder'),
            Rule('lm_head.weight', 'head/logits/kernel', HEAD, when=untied),
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
    ),
    'bart': Family(  # Lewis et al. 2020
        model=bart,
        rules=(
            Rule('model.shared.weight', 'embed/table', TABLE),
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
    ),
    'marian': Family(  # Junczys-Dowmunt et al. 2018
        model=marian,
        rules=(
            Rule('model.shared.weight', 'embed/table', TABLE),
            *bart_stack('encoder'),
            *bart_stack('decoder'),
            Rule('final_logits_bias', 'head/bias', '1 vocab -> vocab'),
        ),
        prefix='model.',
        ignored=('model.encoder.embed_positions.weight', 'model.decoder.embed_positions.weight'),
        copies=BART_COPIES,
        order=halves,
        defaults=BART_DEFAULTS,
        fixed={
            **BART_FIXED,
            'static_position_embeddings': True,
            'normalize_embedding': False,
            'share_encoder_decoder_embeddings': True,
        },
    ),
}
