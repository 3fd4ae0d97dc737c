"""BERT and RoBERTa on the hub: fields of config.json, names and layouts of tensors."""

import dataclasses

from tformer.config import Model
from tformer.errors import choose
from tformer.hf.rules import (
    ACTIVATIONS,
    ALL_BIASES,
    DOWN,
    IN,
    KEY,
    OUT,
    POSITIONS,
    QUERY,
    SQUARE,
    TABLE,
    VALUE,
    Family,
    Fields,
    Rule,
    linear,
    norm,
)


def bert(hub: Fields) -> Model:
    return Model(
        family='encoder',
        vocab_size=hub['vocab_size'],
        emb_dim=hub['hidden_size'],
        mlp_dim=hub['intermediate_size'],
        num_encoder_layers=hub['num_hidden_layers'],
        num_heads=hub['num_attention_heads'],
        max_len=hub['max_position_embeddings'],
        embedding_scale=None,
        embedding_norm=True,
        num_token_types=hub['type_vocab_size'],
        position='learned',
        norm_placement='post',
        norm_epsilon=hub['layer_norm_eps'],
        attention_bias=ALL_BIASES,
        activation=choose(ACTIVATIONS, hub['hidden_act'], 'config.json: hidden_act'),
        output_bias=True,
        mlm_transform=True,
        pooling='cls',
        pooler=True,
        dropout_rate=hub['hidden_dropout_prob'],
        attention_dropout_rate=hub['attention_probs_dropout_prob'],
        initializer='truncated_normal',
    )


def roberta(hub: Fields) -> Model:
    """BERT, with positions that count from padding's token plus 1."""
    model, offset = bert(hub), hub['pad_token_id'] + 1
    return dataclasses.replace(model, position_offset=offset, max_len=model.max_len - offset)


def trunk(name: str) -> tuple[Rule, ...]:
    """Returns the rules of all but the masked-LM head; the hub's names begin with `name`."""
    theirs, ours = f'{name}.encoder.layer.{{layer}}', 'encoder/stack/layers'
    return (
        Rule(f'{name}.embeddings.word_embeddings.weight', 'embed/table', TABLE),
        Rule(f'{name}.embeddings.position_embeddings.weight', 'encoder/input_embedding/positions/table', POSITIONS),
        Rule(
            f'{name}.embeddings.token_type_embeddings.weight',
            'encoder/input_embedding/token_types/table',
            'types D -> types D',
        ),
        *norm(f'{name}.embeddings.LayerNorm', 'encoder/input_embedding/LayerNorm_0'),
        *linear(f'{theirs}.attention.self.query', f'{ours}/attention/query', QUERY),
        *linear(f'{theirs}.attention.self.key', f'{ours}/attention/key', KEY),
        *linear(f'{theirs}.attention.self.value', f'{ours}/attention/value', VALUE),
        *linear(f'{theirs}.attention.output.dense', f'{ours}/attention/out', OUT),
        *norm(f'{theirs}.attention.output.LayerNorm', f'{ours}/attention_norm'),
        *linear(f'{theirs}.intermediate.dense', f'{ours}/mlp/in_0', IN),
        *linear(f'{theirs}.output.dense', f'{ours}/mlp/out', DOWN),
        *norm(f'{theirs}.output.LayerNorm', f'{ours}/mlp_norm'),
        *linear(f'{name}.pooler.dense', 'pooler/dense', SQUARE, head='pooler'),
    )


FIXED = {
    'position_embedding_type': 'absolute',
    'is_decoder': False,
    'add_cross_attention': False,
    'tie_word_embeddings': True,
}

FAMILIES = {
    'bert': Family(  # Devlin et al. 2019
        model=bert,
        rules=(
            *trunk('bert'),
            *linear('cls.predictions.transform.dense', 'head/transform_0', SQUARE, head='masked_lm'),
            *norm('cls.predictions.transform.LayerNorm', 'head/LayerNorm_0', head='masked_lm'),
            Rule('cls.predictions.bias', 'head/bias', 'vocab -> vocab', head='masked_lm'),
        ),
        prefix='bert.',
        renamed=(('LayerNorm.gamma', 'LayerNorm.weight'), ('LayerNorm.beta', 'LayerNorm.bias')),
        ignored=('bert.embeddings.position_ids', 'cls.seq_relationship.*'),  # the latter: the next sentence's head
        copies={
            'cls.predictions.decoder.weight': 'bert.embeddings.word_embeddings.weight',
            'cls.predictions.decoder.bias': 'cls.predictions.bias',
        },
        defaults={'hidden_act': 'gelu', 'layer_norm_eps': 1e-12},
        fixed=FIXED,
    ),
    'roberta': Family(  # Liu et al. 2019
        model=roberta,
        rules=(
            *trunk('roberta'),
            *linear('lm_head.dense', 'head/transform_0', SQUARE, head='masked_lm'),
            *norm('lm_head.layer_norm', 'head/LayerNorm_0', head='masked_lm'),
            Rule('lm_head.bias', 'head/bias', 'vocab -> vocab', head='masked_lm'),
        ),
        prefix='roberta.',
        ignored=('roberta.embeddings.position_ids',),
        copies={
            'lm_head.decoder.weight': 'roberta.embeddings.word_embeddings.weight',
            'lm_head.decoder.bias': 'lm_head.bias',
        },
        defaults={'hidden_act': 'gelu', 'layer_norm_eps': 1e-12, 'pad_token_id': 1},
        fixed={**FIXED, 'hidden_act': 'gelu'},  # its masked-LM head has gelu whatever the layers have
    ),
}
