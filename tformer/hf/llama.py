"""Llama and its dense relatives but Gemma on the hub: fields of config.json, names and layouts of tensors."""

from collections.abc import Callable, Sequence
from typing import Any

from tformer.config import Model
from tformer.errors import UserError, choose
from tformer.hf.fields import GATED_ACTIVATIONS, Field, HubConfig, field, fields
from tformer.hf.heads import task_heads
from tformer.hf.rotary import PHI3_TYPES, ROTARY, rotary
from tformer.hf.rules import ALL_BIASES, Family, Rule, linear, tensor, untied

# ---------------------------------------------------------------------------------------------------- config.json
LLAMA: dict[str, Any] = {
    'family': 'decoder',
    'embedding_scale': None,
    'position': 'rope',
    'norm': 'rmsnorm',
    'mlp_bias': False,
    'dropout_rate': 0.0,
    'initializer': 'truncated_normal',
    'pooling': 'last',
    'class_bias': False,
}
WITHOUT_HEADS = (
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
    field('tied_embeddings', 'tie_word_embeddings', values={True: 'all', False: None}),
)
WITHOUT_ROTARY = (*WITHOUT_HEADS, field('head_dim', 'head_dim', null=True))
OF_LLAMA = (*WITHOUT_ROTARY, ROTARY)
ACTIVATION = field('activation', 'hidden_act', values=GATED_ACTIVATIONS)
ATTENTION_BIAS = field('attention_bias', 'attention_bias', values={True: ALL_BIASES, False: ()})
LAYER_TYPES = {'sliding_attention': 'local', 'full_attention': 'global'}
Kinds = Sequence[str]


def depth(hub: HubConfig) -> int:
    """Returns the number of layers. Raises a `UserError` where it is beyond any model, before anything is that long."""
    layers = hub.size('num_hidden_layers')
    if layers > _MOST_LAYERS:
        raise UserError(f'config.json: num_hidden_layers={layers} must be at most {_MOST_LAYERS:,}')
    return layers


_MOST_LAYERS = 1024  # as of model.num_encoder_layers and model.num_decoder_layers


def windows(default: Callable[[HubConfig], Kinds], window: Callable[[HubConfig], Any] | None = None) -> Field:
    """Returns the correspondence of `layer_types`, and of the window of its sliding layers.

    Args:
      default: the kinds of the layers where config.json does not list them, repeated over the depth.
      window: the window where it is not plainly `sliding_window`.
    """

    def read(hub: HubConfig) -> dict[str, Any]:
        kinds, layers = hub.nullable('layer_types'), depth(hub)
        if kinds is None:
            kinds = [kind for _, kind in zip(range(layers), list(default(hub)) * layers, strict=False)]
        if not isinstance(kinds, list) or len(kinds) != layers:
            raise UserError(f'config.json: layer_types={kinds!r} is not a list of num_hidden_layers={layers} kinds')
        pattern = [choose(LAYER_TYPES, str(kind), 'config.json: layer_types') for kind in kinds]
        period = next(n for n in range(1, layers + 1) if all(k == pattern[i % n] for i, k in enumerate(pattern)))
        width = hub.nullable('sliding_window') if window is None else window(hub)
        if width is None and 'local' in pattern:
            raise UserError('config.json: layer_types has sliding layers, and sliding_window does not say how far')
        return {'attention_pattern': tuple(pattern[:period]), 'window': width if 'local' in pattern else None}

    def write(model: Model) -> dict[str, Any]:
        names = {ours: theirs for theirs, ours in LAYER_TYPES.items()}
        pattern, layers = model.attention_pattern, model.num_decoder_layers
        if model.family == 'encoder':
            layers = model.num_encoder_layers
        return {
            'layer_types': [names[pattern[i % len(pattern)]] for i in range(layers)],
            # The hub's library needs one of some families even where no layer has it.
            'sliding_window': model.window if 'local' in pattern else model.max_len,
        }

    return Field(read, write)


def _read_window(hub: HubConfig) -> dict[str, Any]:
    window = hub.nullable('sliding_window') or None
    return {'attention_pattern': ('local',) if window else ('global',), 'window': window}


# A window, where there is one, is that of every layer.
WINDOW = Field(_read_window, lambda model: {'sliding_window': model.window})


def _last_layers(hub: HubConfig) -> Kinds:
    """Qwen's layers after the first `max_window_layers` have the window."""
    first = hub.size('max_window_layers', least=0)
    windowed = [hub.nullable('use_sliding_window') and i >= first for i in range(depth(hub))]
    return ['sliding_attention' if local else 'full_attention' for local in windowed]


def _qwen_window(hub: HubConfig) -> Any:
    hub.was_read |= {'max_window_layers', 'sliding_window'}
    return hub.nullable('sliding_window') if hub.nullable('use_sliding_window') else None


QWEN_WINDOWS = (
    windows(_last_layers, _qwen_window),
    Field(lambda hub: {}, lambda model: {'use_sliding_window': 'local' in model.attention_pattern}),
)


# ---------------------------------------------------------------------------------------------------- tensors
TASK_HEADS = task_heads('score', 'score', 'qa_outputs', bias=False)  # of tags the bias tells them apart
LAYER, OURS = 'model.layers.{layer}', 'decoder/stack/layers'
ENDS = (
    tensor('model.embed_tokens.weight', 'embed/table'),
    tensor('lm_head.weight', 'head/logits/kernel', when=untied, head='tokens'),
    *TASK_HEADS,
)


def bias_of(role: str) -> dict[str, Any]:
    return {'when': lambda model: role in model.attention_bias}


def attention() -> tuple[Rule, ...]:
    """Returns the rules of embeddings, attention and output that Llama's relatives share; biases where there are."""
    rules = [*ENDS]
    for role in ALL_BIASES:
        kernel, bias = linear(f'{LAYER}.self_attn.{role[0]}_proj', f'{OURS}/attention/{role}')
        rules += [kernel, bias._replace(**bias_of(role))]
    return tuple(rules)


def head_norms(layout: str, key_layout: str) -> tuple[Rule, ...]:
    """Returns the rules of the norms of queries and keys, with these layouts of their scales."""
    return (
        Rule(f'{LAYER}.self_attn.q_norm.weight', f'{OURS}/attention/query_norm/scale', layout),
        Rule(f'{LAYER}.self_attn.k_norm.weight', f'{OURS}/attention/key_norm/scale', key_layout),
    )


def gated_mlp() -> tuple[Rule, ...]:
    rules = (
        *linear(f'{LAYER}.mlp.gate_proj', f'{OURS}/mlp/in_0'),
        *linear(f'{LAYER}.mlp.up_proj', f'{OURS}/mlp/in_1'),
        *linear(f'{LAYER}.mlp.down_proj', f'{OURS}/mlp/out'),
    )
    return tuple(r._replace(when=lambda model: model.mlp_bias) if r.hub.endswith('bias') else r for r in rules)


def scales(**names: str) -> tuple[Rule, ...]:
    """Returns the rules of RMSNorms, our name = theirs."""
    layers = [tensor(f'{LAYER}.{hub}.weight', f'{OURS}/{ours}/scale') for ours, hub in names.items()]
    return (*layers, tensor('model.norm.weight', 'decoder/stack/norm/scale'))


RULES = (
    *attention(),
    *gated_mlp(),
    *scales(attention_norm='input_layernorm', mlp_norm='post_attention_layernorm'),
)
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
SILU = {'hidden_act': 'silu'}
OF_QWEN = {
    **DEFAULTS,
    **SILU,
    'num_key_value_heads': 32,
    'layer_types': None,
    'use_sliding_window': False,
    'sliding_window': 4096,
    'max_window_layers': 28,
}

FAMILIES = {
    'llama': Family(  # Touvron et al. 2023, Llama Team 2024
        model=LLAMA,
        fields=(*OF_LLAMA, ATTENTION_BIAS, *fields(mlp_bias='mlp_bias'), ACTIVATION),
        rules=RULES,
        **NAMES,
        headed={'spans': 'transformer.'},
        defaults={**DEFAULTS, **SILU, 'attention_bias': False, 'mlp_bias': False},
        neutral=('is_llama_config', 'max_sequence_length'),
    ),
    'mistral': Family(  # Jiang et al. 2023
        model=LLAMA,
        fields=(*OF_LLAMA, ACTIVATION, WINDOW),
        rules=RULES,
        **NAMES,
        defaults={**DEFAULTS, **SILU, 'num_key_value_heads': 8, 'sliding_window': 4096},
    ),
    'qwen2': Family(  # Qwen Team 2024
        model=LLAMA | {'attention_bias': ('query', 'key', 'value')},
        fields=(*OF_LLAMA, ACTIVATION, *QWEN_WINDOWS),
        rules=RULES,
        **NAMES,
        headed={'spans': 'transformer.'},
        defaults=OF_QWEN,
        start={},
    ),
    'qwen3': Family(  # Qwen Team 2025
        model=LLAMA | {'qk_norm': 'rmsnorm'},
        fields=(*OF_LLAMA, ATTENTION_BIAS, ACTIVATION, *QWEN_WINDOWS),
        rules=(*RULES, *head_norms('H -> H', 'H -> H')),
        **NAMES,
        headed={'spans': 'transformer.'},
        defaults={**OF_QWEN, 'head_dim': 128, 'attention_bias': False},
        start={},
    ),
    'olmo2': Family(  # OLMo Team 2025
        model=LLAMA | {'norm_placement': 'res_post', 'qk_norm': 'rmsnorm_joint'},
        fields=(*OF_LLAMA, ATTENTION_BIAS, ACTIVATION),
        rules=(
            *attention(),
            *gated_mlp(),
            *scales(attention_norm='post_attention_layernorm', mlp_norm='post_feedforward_layernorm'),
            *head_norms('(N H) -> N H', '(K H) -> K H'),
        ),
        **NAMES,
        defaults={**DEFAULTS, **SILU, 'attention_bias': False},
        start={},
    ),
    'phi3': Family(  # Abdin et al. 2024
        model=LLAMA,
        fields=(*WITHOUT_ROTARY, rotary(partial='partial_rotary_factor', types=PHI3_TYPES), ACTIVATION, WINDOW),
        rules=(
            *ENDS,
            Rule(
                f'{LAYER}.self_attn.qkv_proj.weight',
                f'{OURS}/attention/{{part}}/kernel',
                '(part H) D -> D part H',
                parts=('query', 'key', 'value'),
                shares=('N', 'K', 'K'),
            ),
            tensor(f'{LAYER}.self_attn.o_proj.weight', f'{OURS}/attention/out/kernel'),
            Rule(
                f'{LAYER}.mlp.gate_up_proj.weight',
                f'{OURS}/mlp/{{part}}/kernel',
                '(part F) D -> part D F',
                parts=('in_0', 'in_1'),
            ),
            tensor(f'{LAYER}.mlp.down_proj.weight', f'{OURS}/mlp/out/kernel'),
            *scales(attention_norm='input_layernorm', mlp_norm='post_attention_layernorm'),
        ),
        **NAMES,
        defaults={
            **DEFAULTS,
            **SILU,
            'sliding_window': None,
            'partial_rotary_factor': 1.0,
            'original_max_position_embeddings': 4096,
        },
        neutral=('interpolate_factor', 'full_attn_mod', 'original_max_position_embeddings'),
        start={},
    ),
}
