"""BERT and RoBERTa on the hub: fields of config.json, names and layouts of tensors."""

from typing import Any

from tformer.config import Model
from tformer.hf.fields import ACTIVATIONS, Field, HubConfig, field, fields
from tformer.hf.rules import ALL_BIASES, Family, Rule, linear, norm, tensor

# ---------------------------------------------------------------------------------------------------- config.json
BERT: dict[str, Any] = {
    'family': 'encoder',
    'embedding_scale': None,
    'embedding_norm': True,
    'position': 'learned',
    'norm_placement': 'post',
    'attention_bias': ALL_BIASES,
    'output_bias': True,
    'mlm_transform': True,
    'pooling': 'cls',
    'pooler': True,
    'initializer': 'truncated_normal',
}
FIELDS = (
    *fields(
        vocab_size='vocab_size',
        emb_dim='hidden_size',
        mlp_dim='intermediate_size',
        num_encoder_layers='num_hidden_layers',
        num_heads='num_attention_heads',
        num_token_types='type_vocab_size',
        norm_epsilon='layer_norm_eps',
        dropout_rate='hidden_dropout_prob',
        attention_dropout_rate='attention_probs_dropout_prob',
    ),
    field('activation', 'hidden_act', values=ACTIVATIONS),
)


def _read_positions(hub: HubConfig) -> dict[str, Any]:
    offset = hub.size('pad_token_id', least=0) + 1
    return {'position_offset': offset, 'max_len': hub.size('max_position_embeddings') - offset}


def _write_positions(model: Model) -> dict[str, Any]:
    rows = model.max_len + model.position_offset
    return {'pad_token_id': model.position_offset - 1, 'max_position_embeddings': rows}


# ---------------------------------------------------------------------------------------------------- tensors
def trunk(name: str) -> tuple[Rule, ...]:
    """Returns the rules of all but the masked-LM head; the hub's names begin with `name`."""
    theirs, ours = f'{name}.encoder.layer.{{layer}}', 'encoder/stack/layers'
    return (
        tensor(f'{name}.embeddings.word_embeddings.weight', 'embed/table'),
        tensor(f'{name}.embeddings.position_embeddings.weight', 'encoder/input_embedding/positions/table'),
        tensor(f'{name}.embeddings.token_type_embeddings.weight', 'encoder/input_embedding/token_types/table'),
        *norm(f'{name}.embeddings.LayerNorm', 'encoder/input_embedding/LayerNorm_0'),
        *linear(f'{theirs}.attention.self.query', f'{ours}/attention/query'),
        *linear(f'{theirs}.attention.self.key', f'{ours}/attention/key'),
        *linear(f'{theirs}.attention.self.value', f'{ours}/attention/value'),
        *linear(f'{theirs}.attention.output.dense', f'{ours}/attention/out'),
        *norm(f'{theirs}.attention.output.LayerNorm', f'{ours}/attention_norm'),
        *linear(f'{theirs}.intermediate.dense', f'{ours}/mlp/in_0'),
        *linear(f'{theirs}.output.dense', f'{ours}/mlp/out'),
        *norm(f'{theirs}.output.LayerNorm', f'{ours}/mlp_norm'),
        *linear(f'{name}.pooler.dense', 'pooler/dense', head='pooler'),
    )


FIXED = {
    'position_embedding_type': 'absolute',
    'is_encoder_decoder': False,
    'tie_word_embeddings': True,
}

FAMILIES = {
    'bert': Family(  # Devlin et al. 2019
        model=BERT,
        fields=(*FIELDS, *fields(max_len='max_position_embeddings')),
        rules=(
            *trunk('bert'),
            *linear('cls.predictions.transform.dense', 'head/transform_0', head='masked_lm'),
            *norm('cls.predictions.transform.LayerNorm', 'head/LayerNorm_0', head='masked_lm'),
            tensor('cls.predictions.bias', 'head/bias', head='masked_lm'),
            *linear('cls.seq_relationship', 'sentence_head/classes', head='sentences'),
        ),
        prefix='bert.',
        renamed=(('LayerNorm.gamma', 'LayerNorm.weight'), ('LayerNorm.beta', 'LayerNorm.bias')),
        ignored=('bert.embeddings.position_ids',),
        copies={
            'cls.predictions.decoder.weight': 'bert.embeddings.word_embeddings.weight',
            'cls.predictions.decoder.bias': 'cls.predictions.bias',
        },
        defaults={'hidden_act': 'gelu', 'layer_norm_eps': 1e-12},
        fixed=FIXED,
    ),
    'roberta': Family(  # Liu et al. 2019
        model=BERT,
        fields=(*FIELDS, Field(_read_positions, _write_positions)),  # positions count from the padding's id plus 1
        rules=(
            *trunk('roberta'),
            *linear('lm_head.dense', 'head/transform_0', head='masked_lm'),
            *norm('lm_head.layer_norm', 'head/LayerNorm_0', head='masked_lm'),
            tensor('lm_head.bias', 'head/bias', head='masked_lm'),
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
