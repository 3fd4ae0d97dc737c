"""BART and its relatives on the hub: fields of config.json, names and layouts of tensors."""

from typing import Any

import numpy as np

from tformer.config import Model
from tformer.errors import UserError
from tformer.hf.fields import ACTIVATIONS, VOCABULARY, Field, HubConfig, field, fields
from tformer.hf.heads import task_heads
from tformer.hf.rules import ALL_BIASES, Family, Rule, linear, norm, tensor

# ---------------------------------------------------------------------------------------------------- config.json
BART: dict[str, Any] = {
    'family': 'encoder_decoder',
    'embedding_norm': True,
    'position': 'learned',
    'position_offset': 2,
    'norm_placement': 'post',
    'norm_epsilon': 1e-5,
    'attention_bias': ALL_BIASES,
    'initializer': 'truncated_normal',
    'pooling': 'last',
    'pooler': True,
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


FIRST_POSITION = Field(  # positions count from the padding's id plus 1
    lambda hub: {'position_offset': hub.size('pad_token_id', least=0) + 1},
    lambda model: {'pad_token_id': model.position_offset - 1},
)


def halves(model: Model) -> np.ndarray:
    """Returns the hub's channel of each of ours: its sinusoids have all sines first, ours sine and cosine in turn."""
    return np.arange(model.emb_dim).reshape(2, model.emb_dim // 2).T.reshape(-1)


# ---------------------------------------------------------------------------------------------------- tensors
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
    last = norm(f'model.{stack}.layer_norm', f'{stack}/stack/norm')
    return (
        *rules,
        *linear(f'{theirs}.fc1', f'{ours}/mlp/in_0'),
        *linear(f'{theirs}.fc2', f'{ours}/mlp/out'),
        *norm(f'{theirs}.final_layer_norm', f'{ours}/mlp_norm'),
        *[rule._replace(when=lambda model: bool(model.final_norm)) for rule in last],
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
BART_FIXED = {'is_encoder_decoder': True, 'add_bias_logits': False, 'tie_word_embeddings': True}
POST_NORM = {**BART_FIXED, 'normalize_before': False, 'add_final_layer_norm': False}
PRE_NORM = {**BART_FIXED, 'normalize_before': True, 'add_final_layer_norm': True}
BART_RULES = (
    tensor('model.shared.weight', 'embed/table'),
    *bart_input_embedding('encoder'),
    *bart_stack('encoder'),
    *bart_input_embedding('decoder'),
    *bart_stack('decoder'),
    *task_heads('classification_head.out_proj', spans='qa_outputs', pooler='classification_head.dense'),
)

BART_FAMILY = Family(  # Lewis et al. 2020
    model=BART,
    fields=(VOCABULARY, *BART_FIELDS),
    rules=BART_RULES,
    prefix='model.',
    copies=BART_COPIES,
    zeros=('final_logits_bias',),
    defaults=BART_DEFAULTS,
    fixed={**POST_NORM, 'static_position_embeddings': False, 'normalize_embedding': True},
    start={'decoder_start_token_id': 'eos', 'forced_bos_token_id': 'bos'},
    source_start={'bos_token_id': 'bos'},
    separator=('sep', 'sep'),
)

FAMILIES = {
    'bart': BART_FAMILY,
    'mbart': BART_FAMILY._replace(  # Liu et al. 2020
        model=BART | {'norm_placement': 'pre'},
        fixed={**PRE_NORM, 'static_position_embeddings': False, 'normalize_embedding': True},
        start={'decoder_start_token_id': 'eos', 'forced_bos_token_id': ''},
        source_start={},
        separator=('sep',),
    ),
    'm2m_100': Family(  # Fan et al. 2021; NLLB: NLLB Team 2022
        model=BART | {'norm_placement': 'pre', 'position': 'timing_signal', 'embedding_norm': False},
        fields=(VOCABULARY, *BART_FIELDS, FIRST_POSITION),
        rules=(
            tensor('model.shared.weight', 'embed/table'),
            *bart_stack('encoder'),
            *bart_stack('decoder'),
        ),
        prefix='model.',
        ignored=('model.encoder.embed_positions.weights', 'model.decoder.embed_positions.weights'),
        copies=BART_COPIES,
        defaults={
            **BART_DEFAULTS,
            'activation_function': 'relu',
            'scale_embedding': True,
            'attention_dropout': 0.1,
            'pad_token_id': 1,
        },
        fixed={**PRE_NORM, 'static_position_embeddings': True, 'normalize_embedding': False},
        padded_positions=True,
        start={'decoder_start_token_id': 'eos', 'forced_bos_token_id': ''},
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
        order={'D': halves, 'E': halves},
        defaults={**BART_DEFAULTS, 'decoder_vocab_size': None},
        fixed={
            **POST_NORM,
            'static_position_embeddings': True,
            'normalize_embedding': False,
            'share_encoder_decoder_embeddings': True,
        },
        start={'decoder_start_token_id': 'pad', 'forced_bos_token_id': ''},
    ),
}
