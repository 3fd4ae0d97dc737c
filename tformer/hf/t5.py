"""T5 and mT5 on the hub: fields of config.json, names and layouts of tensors."""

from typing import Any

from tformer.config import Model
from tformer.errors import UserError
from tformer.hf.fields import VOCABULARY, Field, HubConfig, field, fields
from tformer.hf.heads import task_heads
from tformer.hf.rules import ALL_BIASES, Family, Rule, gated, tensor, untied

# ---------------------------------------------------------------------------------------------------- config.json
T5: dict[str, Any] = {
    'family': 'encoder_decoder',
    'embedding_scale': None,
    'position': 'relative',
    'norm': 'rmsnorm',
    'attention_scale': 'unscaled',
    'mlp_bias': False,
    'initializer': 't5',
    'pooling': 'last',
    'pooler': True,
}
T5_ACTIVATIONS = {  # feed_forward_proj
    'relu': 'relu',
    'gelu': 'gelu',
    'silu': 'silu',
    'gated-relu': 'reglu',
    'gated-gelu': 'geglu_tanh',
    'gated-silu': 'swiglu',
}


def _read_stacks(hub: HubConfig) -> dict[str, Any]:
    gate, _, activation = str(hub['feed_forward_proj']).rpartition('-')
    named = {'dense_act_fn': 'gelu_new' if gate and activation == 'gelu' else activation, 'is_gated_act': bool(gate)}
    for name, implied in named.items():  # the hub's library reads these two where a file has them
        if name in hub and hub[name] != implied:
            raise UserError(f'config.json: {name}={hub[name]!r} is not that of feed_forward_proj: {implied!r}')
    return {
        'num_decoder_layers': hub.nullable('num_decoder_layers') or hub['num_layers'],
        'attention_dropout_rate': hub['dropout_rate'],
        'activation_dropout_rate': hub['dropout_rate'],
    }


def _read_output(hub: HubConfig) -> dict[str, Any]:
    """T5 1.0 scales its tied output; 1.1 has an output of its own, which `tie_word_embeddings` says, or after version 5
    of the hub's library `scale_decoder_outputs`."""
    tied = hub['tie_word_embeddings']
    if 'scale_decoder_outputs' in hub:
        tied = hub['scale_decoder_outputs']
    return {'tied_embeddings': 'all' if tied else 'inputs', 'output_scale': 'rsqrt_dim' if tied else None}


def _write_output(model: Model) -> dict[str, Any]:
    tied = model.tied_embeddings == 'all'
    return {'tie_word_embeddings': tied, 'scale_decoder_outputs': tied}


FIELDS = (
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
    Field(_read_stacks, lambda model: {'num_decoder_layers': model.num_decoder_layers}),
)


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


STACKS: dict[str, Any] = {
    'rules': (
        tensor('shared.weight', 'embed/table'),
        *t5_stack('encoder'),
        *t5_stack('decoder'),
        tensor('lm_head.weight', 'head/logits/kernel', when=untied, head='tokens'),
        *task_heads('classification_head.out_proj', spans='qa_outputs', pooler='classification_head.dense'),
    ),
    'ignored': ('decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight',),  # early, and never read
    'copies': {
        'encoder.embed_tokens.weight': 'shared.weight',
        'decoder.embed_tokens.weight': 'shared.weight',
        'lm_head.weight': 'shared.weight',
    },
    'fixed': {'is_encoder_decoder': True},
    'headed': dict.fromkeys(('class', 'number'), 'transformer.'),
    'start': {'decoder_start_token_id': 'pad', 'forced_bos_token_id': ''},
}
DEFAULTS = {
    'num_decoder_layers': None,
    'n_positions': 512,
    'tie_word_embeddings': True,
    'feed_forward_proj': 'relu',
    'relative_attention_max_distance': 128,
}

FAMILIES = {
    't5': Family(  # Raffel et al. 2020; 1.1: Shazeer 2020; Flan-T5: Chung et al. 2022; ByT5: Xue et al. 2022
        model=T5,
        fields=(*FIELDS, Field(_read_output, _write_output)),
        **STACKS,
        defaults=DEFAULTS,
    ),
    'mt5': Family(  # Xue et al. 2021
        model=T5,
        fields=(*FIELDS, field('tied_embeddings', 'tie_word_embeddings', values={True: 'all', False: 'inputs'})),
        **STACKS,
        tied_by_tensors=True,
        defaults={**DEFAULTS, 'feed_forward_proj': 'gated-gelu'},
    ),
}
