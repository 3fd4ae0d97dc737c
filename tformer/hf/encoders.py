"""BERT and its relatives on the hub: fields of config.json, names and layouts of tensors."""

from typing import Any

from tformer.config import Model
from tformer.hf.fields import ACTIVATIONS, Field, HubConfig, field, fields
from tformer.hf.heads import task_heads
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
(TOKEN_TYPES,) = fields(num_token_types='type_vocab_size')
FIELDS = (
    *fields(
        vocab_size='vocab_size',
        emb_dim='hidden_size',
        mlp_dim='intermediate_size',
        num_encoder_layers='num_hidden_layers',
        num_heads='num_attention_heads',
        norm_epsilon='layer_norm_eps',
        dropout_rate='hidden_dropout_prob',
        attention_dropout_rate='attention_probs_dropout_prob',
    ),
    TOKEN_TYPES,
    field('activation', 'hidden_act', values=ACTIVATIONS),
)


TABLE_WIDTH = Field(  # ELECTRA projects its token table up where it is narrower
    lambda hub: {
        'embedding_factor_dim': None if hub['embedding_size'] == hub['hidden_size'] else hub['embedding_size']
    },
    lambda model: {'embedding_size': model.embedding_factor_dim or model.emb_dim},
)


def _read_positions(hub: HubConfig) -> dict[str, Any]:
    offset = hub.size('pad_token_id', least=0) + 1
    return {'position_offset': offset, 'max_len': hub.size('max_position_embeddings') - offset}


def _write_positions(model: Model) -> dict[str, Any]:
    rows = model.max_len + model.position_offset
    return {'pad_token_id': model.position_offset - 1, 'max_position_embeddings': rows}


# ---------------------------------------------------------------------------------------------------- tensors
OURS = 'encoder/stack/layers'


def layers(theirs: str, ours: str) -> tuple[Rule, ...]:
    """Returns the rules of BERT's layers; `theirs` names one on the hub, with {layer}."""
    return (
        *linear(f'{theirs}.attention.self.query', f'{ours}/attention/query'),
        *linear(f'{theirs}.attention.self.key', f'{ours}/attention/key'),
        *linear(f'{theirs}.attention.self.value', f'{ours}/attention/value'),
        *linear(f'{theirs}.attention.output.dense', f'{ours}/attention/out'),
        *norm(f'{theirs}.attention.output.LayerNorm', f'{ours}/attention_norm'),
        *linear(f'{theirs}.intermediate.dense', f'{ours}/mlp/in_0'),
        *linear(f'{theirs}.output.dense', f'{ours}/mlp/out'),
        *norm(f'{theirs}.output.LayerNorm', f'{ours}/mlp_norm'),
    )


def embeddings(name: str) -> tuple[Rule, ...]:
    """Returns the rules of the tables of tokens, positions and types, and of the norm of their sum."""
    return (
        tensor(f'{name}.embeddings.word_embeddings.weight', 'embed/table'),
        tensor(f'{name}.embeddings.position_embeddings.weight', 'encoder/input_embedding/positions/table'),
        tensor(
            f'{name}.embeddings.token_type_embeddings.weight',
            'encoder/input_embedding/token_types/table',
            when=lambda model: bool(model.num_token_types),
        ),
        *norm(f'{name}.embeddings.LayerNorm', 'encoder/input_embedding/LayerNorm_0'),
    )


def trunk(name: str) -> tuple[Rule, ...]:
    """Returns the rules of all but the heads; the hub's names begin with `name`."""
    return (
        *embeddings(name),
        *layers(f'{name}.encoder.layer.{{layer}}', OURS),
        *linear(f'{name}.pooler.dense', 'pooler/dense', head='pooler'),
    )


def masked_lm(dense: str, layer_norm: str, bias: str) -> tuple[Rule, ...]:
    """Returns the rules of the masked-LM head, by the hub's names of its parts."""
    return (
        *linear(dense, 'head/transform_0', head='masked_lm'),
        *norm(layer_norm, 'head/LayerNorm_0', head='masked_lm'),
        tensor(bias, 'head/bias', head='masked_lm'),
    )


FIXED = {
    'position_embedding_type': 'absolute',
    'is_encoder_decoder': False,
    'tie_word_embeddings': True,
}
DEFAULTS = {'hidden_act': 'gelu', 'layer_norm_eps': 1e-12}
DISTIL = 'distilbert.transformer.layer.{layer}'
MPNET = 'mpnet.encoder.layer.{layer}'
SHARED = 'albert.encoder.albert_layer_groups.0.albert_layers.0'

GELU_TRANSFORM = {'transform_activation': 'gelu'}  # whatever the layers have
ROBERTA = Family(  # Liu et al. 2019
    model=BERT | GELU_TRANSFORM,
    fields=(*FIELDS, Field(_read_positions, _write_positions)),  # positions count from the padding's id plus 1
    rules=(
        *trunk('roberta'),
        *masked_lm('lm_head.dense', 'lm_head.layer_norm', 'lm_head.bias'),
        *task_heads('classifier.out_proj', 'classifier', 'qa_outputs', pooler='classifier.dense'),
    ),
    prefix='roberta.',
    ignored=('roberta.embeddings.position_ids',),
    copies={
        'lm_head.decoder.weight': 'roberta.embeddings.word_embeddings.weight',
        'lm_head.decoder.bias': 'lm_head.bias',
    },
    defaults={**DEFAULTS, 'pad_token_id': 1},
    fixed=FIXED,
    padded_positions=True,
    separator=('sep', 'sep'),
)

FAMILIES = {
    'bert': Family(  # Devlin et al. 2019
        model=BERT,
        fields=(*FIELDS, *fields(max_len='max_position_embeddings')),
        rules=(
            *trunk('bert'),
            *masked_lm(
                'cls.predictions.transform.dense', 'cls.predictions.transform.LayerNorm', 'cls.predictions.bias'
            ),
            *linear('cls.seq_relationship', 'sentence_head/classes', head='sentences'),
            *task_heads('classifier', 'classifier', 'qa_outputs', pooler='bert.pooler.dense', choices=True),
        ),
        prefix='bert.',
        renamed=(('LayerNorm.gamma', 'LayerNorm.weight'), ('LayerNorm.beta', 'LayerNorm.bias')),
        ignored=('bert.embeddings.position_ids',),
        copies={
            'cls.predictions.decoder.weight': 'bert.embeddings.word_embeddings.weight',
            'cls.predictions.decoder.bias': 'cls.predictions.bias',
        },
        defaults=DEFAULTS,
        fixed=FIXED,
    ),
    'roberta': ROBERTA,
    'xlm-roberta': ROBERTA,  # Conneau et al. 2020
    'camembert': ROBERTA,  # Martin et al. 2020
    'mpnet': Family(  # Song et al. 2020
        model=BERT | GELU_TRANSFORM | {'position': 'learned_relative', 'position_offset': 2, 'num_token_types': None},
        fields=(
            *[each for each in FIELDS if each is not TOKEN_TYPES],
            Field(
                lambda hub: {'max_len': hub.size('max_position_embeddings') - 2},
                lambda model: {'max_position_embeddings': model.max_len + 2},
            ),
        ),
        rules=(
            *embeddings('mpnet'),
            tensor('mpnet.encoder.relative_attention_bias.weight', 'encoder/bias/table'),
            *linear(f'{MPNET}.attention.attn.q', f'{OURS}/attention/query'),
            *linear(f'{MPNET}.attention.attn.k', f'{OURS}/attention/key'),
            *linear(f'{MPNET}.attention.attn.v', f'{OURS}/attention/value'),
            *linear(f'{MPNET}.attention.attn.o', f'{OURS}/attention/out'),
            *norm(f'{MPNET}.attention.LayerNorm', f'{OURS}/attention_norm'),
            *linear(f'{MPNET}.intermediate.dense', f'{OURS}/mlp/in_0'),
            *linear(f'{MPNET}.output.dense', f'{OURS}/mlp/out'),
            *norm(f'{MPNET}.output.LayerNorm', f'{OURS}/mlp_norm'),
            *linear('mpnet.pooler.dense', 'pooler/dense', head='pooler'),
            *masked_lm('lm_head.dense', 'lm_head.layer_norm', 'lm_head.bias'),
            *task_heads('classifier.out_proj', 'classifier', 'qa_outputs', pooler='classifier.dense'),
        ),
        prefix='mpnet.',
        ignored=('mpnet.embeddings.position_ids',),
        copies={
            'lm_head.decoder.weight': 'mpnet.embeddings.word_embeddings.weight',
            'lm_head.decoder.bias': 'lm_head.bias',
        },
        defaults=DEFAULTS,
        # The hub's library has these numbers whatever a file says.
        fixed={'tie_word_embeddings': True, 'pad_token_id': 1, 'relative_attention_num_buckets': 32},
        padded_positions=True,
    ),
    'distilbert': Family(  # Sanh et al. 2019
        model=BERT | {'norm_epsilon': 1e-12, 'pooler_activation': 'relu'},
        fields=(
            *fields(
                vocab_size='vocab_size',
                emb_dim='dim',
                mlp_dim='hidden_dim',
                num_encoder_layers='n_layers',
                num_heads='n_heads',
                max_len='max_position_embeddings',
                dropout_rate='dropout',
                attention_dropout_rate='attention_dropout',
            ),
            field('activation', 'activation', values=ACTIVATIONS),
        ),
        rules=(
            *embeddings('distilbert'),
            *linear(f'{DISTIL}.attention.q_lin', f'{OURS}/attention/query'),
            *linear(f'{DISTIL}.attention.k_lin', f'{OURS}/attention/key'),
            *linear(f'{DISTIL}.attention.v_lin', f'{OURS}/attention/value'),
            *linear(f'{DISTIL}.attention.out_lin', f'{OURS}/attention/out'),
            *norm(f'{DISTIL}.sa_layer_norm', f'{OURS}/attention_norm'),
            *linear(f'{DISTIL}.ffn.lin1', f'{OURS}/mlp/in_0'),
            *linear(f'{DISTIL}.ffn.lin2', f'{OURS}/mlp/out'),
            *norm(f'{DISTIL}.output_layer_norm', f'{OURS}/mlp_norm'),
            *masked_lm('vocab_transform', 'vocab_layer_norm', 'vocab_projector.bias'),
            *task_heads('classifier', 'classifier', 'qa_outputs', pooler='pre_classifier', choices=True),
        ),
        prefix='distilbert.',
        ignored=('distilbert.embeddings.position_ids',),
        copies={'vocab_projector.weight': 'distilbert.embeddings.word_embeddings.weight'},
        defaults={'activation': 'gelu'},
        fixed={'sinusoidal_pos_embds': False, 'tie_word_embeddings': True},
        neutral=('qa_dropout', 'seq_classif_dropout'),
    ),
    'electra': Family(  # Clark et al. 2020: a discriminator, or a generator alone
        model=BERT | GELU_TRANSFORM | {'pooler_activation': 'gelu'},
        fields=(*FIELDS, *fields(max_len='max_position_embeddings'), TABLE_WIDTH),
        rules=(
            *embeddings('electra'),
            *[
                rule._replace(when=lambda model: model.embedding_factor_dim is not None)
                for rule in linear('electra.embeddings_project', 'encoder/input_embedding/projection')
            ],
            *layers('electra.encoder.layer.{layer}', OURS),
            *masked_lm('generator_predictions.dense', 'generator_predictions.LayerNorm', 'generator_lm_head.bias'),
            *linear('discriminator_predictions.dense', 'detection_head/dense_0', head='detection'),
            *linear('discriminator_predictions.dense_prediction', 'detection_head/score/classes', head='detection'),
            *task_heads('classifier.out_proj', 'classifier', 'qa_outputs', pooler='classifier.dense'),
        ),
        prefix='electra.',
        ignored=('electra.embeddings.position_ids',),
        copies={'generator_lm_head.weight': 'electra.embeddings.word_embeddings.weight'},
        defaults=DEFAULTS,
        fixed=FIXED,
    ),
    'albert': Family(  # Lan et al. 2020: one layer at every depth, and a narrow token table
        model=BERT | {'layer_sharing': 'all'},
        fields=(
            *FIELDS,
            *fields(max_len='max_position_embeddings', embedding_factor_dim='embedding_size'),
        ),
        rules=(
            *embeddings('albert'),
            *linear('albert.encoder.embedding_hidden_mapping_in', 'encoder/input_embedding/projection'),
            *linear(f'{SHARED}.attention.query', f'{OURS}/attention/query'),
            *linear(f'{SHARED}.attention.key', f'{OURS}/attention/key'),
            *linear(f'{SHARED}.attention.value', f'{OURS}/attention/value'),
            *linear(f'{SHARED}.attention.dense', f'{OURS}/attention/out'),
            *norm(f'{SHARED}.attention.LayerNorm', f'{OURS}/attention_norm'),
            *linear(f'{SHARED}.ffn', f'{OURS}/mlp/in_0'),
            *linear(f'{SHARED}.ffn_output', f'{OURS}/mlp/out'),
            *norm(f'{SHARED}.full_layer_layer_norm', f'{OURS}/mlp_norm'),
            *linear('albert.pooler', 'pooler/dense', head='pooler'),
            *masked_lm('predictions.dense', 'predictions.LayerNorm', 'predictions.bias'),
            *linear('sop_classifier.classifier', 'sentence_head/classes', head='sentences'),
            *task_heads('classifier', 'classifier', 'qa_outputs', pooler='albert.pooler', choices=True),
        ),
        prefix='albert.',
        ignored=('albert.embeddings.position_ids',),
        copies={
            'predictions.decoder.weight': 'albert.embeddings.word_embeddings.weight',
            'predictions.decoder.bias': 'predictions.bias',
        },
        defaults={**DEFAULTS, 'hidden_act': 'gelu_new', 'embedding_size': 128},
        fixed={**FIXED, 'num_hidden_groups': 1, 'inner_group_num': 1},
        neutral=('classifier_dropout_prob', 'down_scale_factor', 'net_structure_type', 'gap_size', 'num_memory_blocks'),
    ),
}
