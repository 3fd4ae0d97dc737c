"""GPT-2 and GPT-NeoX on the hub: fields of config.json, names and layouts of tensors."""

from typing import Any

from tformer.config import Model
from tformer.hf.fields import ACTIVATIONS, Field, HubConfig, field, fields
from tformer.hf.heads import task_heads
from tformer.hf.rotary import rotary
from tformer.hf.rules import ALL_BIASES, Family, Rule, linear, norm, tensor, untied

# ---------------------------------------------------------------------------------------------------- config.json
GPT2: dict[str, Any] = {
    'family': 'decoder',
    'embedding_scale': None,
    'position': 'learned',
    'attention_bias': ALL_BIASES,
    'initializer': 'gpt2',
    'pooling': 'last',
    'class_bias': False,
}


def _read_gpt2(hub: HubConfig) -> dict[str, Any]:
    if hub.get('embd_pdrop') == hub['resid_pdrop']:  # one rate for both here
        hub.was_read.add('embd_pdrop')
    return {'mlp_dim': hub.nullable('n_inner') or 4 * hub.size('n_embd'), 'dropout_rate': hub['resid_pdrop']}


def _write_gpt2(model: Model) -> dict[str, Any]:
    return {'n_inner': model.mlp_dim, 'resid_pdrop': model.dropout_rate, 'embd_pdrop': model.dropout_rate}


# ---------------------------------------------------------------------------------------------------- tensors
PARTS = ('query', 'key', 'value')
NEOX = 'gpt_neox.layers.{layer}'
BLOCK, OURS = 'transformer.h.{layer}', 'decoder/stack/layers'


def has_biases(model: Model) -> bool:
    return bool(model.attention_bias)


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
            *task_heads('score', 'classifier', 'qa_outputs', bias=False),
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
    'gpt_neox': Family(  # Black et al. 2022; Pythia: Biderman et al. 2023
        model={
            'family': 'decoder',
            'embedding_scale': None,
            'position': 'rope',
            'initializer': 'truncated_normal',
            'pooling': 'last',
            'class_bias': False,
        },
        fields=(
            *fields(
                vocab_size='vocab_size',
                emb_dim='hidden_size',
                mlp_dim='intermediate_size',
                num_decoder_layers='num_hidden_layers',
                num_heads='num_attention_heads',
                max_len='max_position_embeddings',
                norm_epsilon='layer_norm_eps',
                dropout_rate='hidden_dropout',
                attention_dropout_rate='attention_dropout',
            ),
            field('activation', 'hidden_act', values={**ACTIVATIONS, 'gelu_fast': 'gelu_tanh'}),
            field('norm_placement', 'use_parallel_residual', values={True: 'parallel_norms', False: 'pre'}),
            field('attention_bias', 'attention_bias', values={True: ALL_BIASES, False: ()}),
            field('tied_embeddings', 'tie_word_embeddings', values={True: 'all', False: None}),
            rotary('rotary_emb_base', 'rotary_pct'),
        ),
        rules=(
            tensor('gpt_neox.embed_in.weight', 'embed/table'),
            *norm(f'{NEOX}.input_layernorm', f'{OURS}/attention_norm'),
            Rule(
                f'{NEOX}.attention.query_key_value.weight',
                f'{OURS}/attention/{{part}}/kernel',
                '(N part H) D -> part D N H',
                parts=PARTS,
            ),
            Rule(
                f'{NEOX}.attention.query_key_value.bias',
                f'{OURS}/attention/{{part}}/bias',
                '(N part H) -> part N H',
                parts=PARTS,
                when=has_biases,
            ),
            tensor(f'{NEOX}.attention.dense.weight', f'{OURS}/attention/out/kernel'),
            tensor(f'{NEOX}.attention.dense.bias', f'{OURS}/attention/out/bias', when=has_biases),
            *norm(f'{NEOX}.post_attention_layernorm', f'{OURS}/mlp_norm'),
            *linear(f'{NEOX}.mlp.dense_h_to_4h', f'{OURS}/mlp/in_0'),
            *linear(f'{NEOX}.mlp.dense_4h_to_h', f'{OURS}/mlp/out'),
            *norm('gpt_neox.final_layer_norm', 'decoder/stack/norm'),
            tensor('embed_out.weight', 'head/logits/kernel', when=untied, head='tokens'),
            *task_heads('score', 'classifier', 'qa_outputs', bias=False),
        ),
        prefix='gpt_neox.',
        ignored=(
            'gpt_neox.layers.*.attention.bias',
            'gpt_neox.layers.*.attention.masked_bias',
            'gpt_neox.layers.*.attention.rotary_emb.inv_freq',
        ),
        copies={'embed_out.weight': 'gpt_neox.embed_in.weight'},
        defaults={
            'hidden_act': 'gelu',
            'hidden_dropout': 0.0,
            'attention_dropout': 0.0,
            'layer_norm_eps': 1e-5,
            'use_parallel_residual': True,
            'attention_bias': True,
            'tie_word_embeddings': False,
            'rotary_emb_base': 10_000.0,
            'rotary_pct': 0.25,
        },
        neutral=('classifier_dropout',),
        start={},
    ),
}
