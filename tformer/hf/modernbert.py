"""ModernBERT on the hub: fields of config.json, names and layouts of tensors."""

from typing import Any

from tformer.config import Model
from tformer.hf.fields import ACTIVATIONS, GATED_ACTIVATIONS, Field, HubConfig, field, fields
from tformer.hf.heads import task_heads
from tformer.hf.llama import Kinds, depth, windows
from tformer.hf.rotary import layered_rotary
from tformer.hf.rules import ALL_BIASES, Family, Rule, linear, norm, tensor, untied

# ---------------------------------------------------------------------------------------------------- config.json
MODERNBERT: dict[str, Any] = {
    'family': 'encoder',
    'embedding_scale': None,
    'embedding_norm': True,
    'position': 'rope',
    'first_norm': False,
    'mlm_transform': True,
    'task_transform': True,
    'dropout_rate': 0.0,
    'initializer': 'truncated_normal',
}


def _every_third(hub: HubConfig) -> Kinds:
    """The first layer sees all, and so does every third after it, or as `global_attn_every_n_layers` says."""
    period = hub.size('global_attn_every_n_layers')
    return ['sliding_attention' if i % period else 'full_attention' for i in range(depth(hub))]


# The hub counts the places of a window on both sides of a token, without the token.
READ_WINDOWS, WRITE_LAYERS = windows(_every_third, lambda hub: hub.size('local_attention') // 2 + 1)


def _write_windows(model: Model) -> dict[str, Any]:
    written = WRITE_LAYERS(model)
    width = written.pop('sliding_window')
    return {**written, 'local_attention': DEFAULTS['local_attention'] if width is None else max(1, 2 * (width - 1))}


# ---------------------------------------------------------------------------------------------------- tensors
LAYER, OURS = 'model.layers.{layer}', 'encoder/stack/layers'


def biased(rules: tuple[Rule, Rule], bias: str) -> tuple[Rule, Rule]:
    """Returns the rules of a kernel or scale and its bias, which there is where a field of the model says so."""
    return rules[0], rules[1]._replace(when=lambda model: bool(getattr(model, bias)))


def layer_norm(theirs: str, ours: str, **more: Any) -> tuple[Rule, Rule]:
    return biased(norm(theirs, ours, **more), 'norm_bias')


DEFAULTS = {
    'global_rope_theta': 160_000.0,
    'local_rope_theta': 10_000.0,
    'layer_types': None,
    'global_attn_every_n_layers': 3,
    'local_attention': 128,
    'hidden_activation': 'gelu',
    'norm_eps': 1e-5,
    'norm_bias': False,
    'attention_bias': False,
    'mlp_bias': False,
    'decoder_bias': True,
    'attention_dropout': 0.0,
    'mlp_dropout': 0.0,
    'classifier_pooling': 'cls',
    'classifier_bias': False,
    'classifier_activation': 'gelu',
    'tie_word_embeddings': True,
}

FAMILIES = {
    'modernbert': Family(  # Warner et al. 2024
        model=MODERNBERT,
        fields=(
            *fields(
                vocab_size='vocab_size',
                emb_dim='hidden_size',
                mlp_dim='intermediate_size',
                num_encoder_layers='num_hidden_layers',
                num_heads='num_attention_heads',
                max_len='max_position_embeddings',
                norm_epsilon='norm_eps',
                norm_bias='norm_bias',
                mlp_bias='mlp_bias',
                output_bias='decoder_bias',
                transform_bias='classifier_bias',
                attention_dropout_rate='attention_dropout',
                activation_dropout_rate='mlp_dropout',
            ),
            field('attention_bias', 'attention_bias', values={True: ALL_BIASES, False: ()}),
            field('activation', 'hidden_activation', values=GATED_ACTIVATIONS),
            field('transform_activation', 'classifier_activation', values=ACTIVATIONS),
            field('tied_embeddings', 'tie_word_embeddings', values={True: 'all', False: None}),
            Field(
                field('pooling', 'classifier_pooling', values={'cls': 'cls', 'mean': 'mean'}).read,
                lambda model: {'classifier_pooling': 'mean' if model.pooling == 'mean' else 'cls'},
            ),
            Field(READ_WINDOWS, _write_windows),
            layered_rotary(lambda hub: READ_WINDOWS(hub)['attention_pattern'], 'global_rope_theta', 'local_rope_theta'),
        ),
        rules=(
            tensor('model.embeddings.tok_embeddings.weight', 'embed/table'),
            *layer_norm('model.embeddings.norm', 'encoder/input_embedding/LayerNorm_0'),
            *layer_norm(f'{LAYER}.attn_norm', f'{OURS}/attention_norm', first=1),
            Rule(
                f'{LAYER}.attn.Wqkv.weight',
                f'{OURS}/attention/{{part}}/kernel',
                '(part N H) D -> part D N H',
                parts=('query', 'key', 'value'),
            ),
            Rule(
                f'{LAYER}.attn.Wqkv.bias',
                f'{OURS}/attention/{{part}}/bias',
                '(part N H) -> part N H',
                parts=('query', 'key', 'value'),
                when=lambda model: bool(model.attention_bias),
            ),
            *biased(linear(f'{LAYER}.attn.Wo', f'{OURS}/attention/out'), 'attention_bias'),
            *layer_norm(f'{LAYER}.mlp_norm', f'{OURS}/mlp_norm'),
            Rule(
                f'{LAYER}.mlp.Wi.weight',
                f'{OURS}/mlp/{{part}}/kernel',
                '(part F) D -> part D F',
                parts=('in_0', 'in_1'),
            ),
            Rule(
                f'{LAYER}.mlp.Wi.bias',
                f'{OURS}/mlp/{{part}}/bias',
                '(part F) -> part F',
                parts=('in_0', 'in_1'),
                when=lambda model: model.mlp_bias,
            ),
            *biased(linear(f'{LAYER}.mlp.Wo', f'{OURS}/mlp/out'), 'mlp_bias'),
            *layer_norm('model.final_norm', 'encoder/stack/norm'),
            *biased(linear('head.dense', 'head/transform_0', head='transform'), 'transform_bias'),
            *layer_norm('head.norm', 'head/LayerNorm_0', head='transform'),
            tensor('decoder.weight', 'head/logits/kernel', head='masked_lm', when=untied),
            tensor('decoder.bias', 'head/bias', head='masked_lm', when=lambda model: model.output_bias),
            *task_heads('classifier', 'classifier', 'classifier', choices=True),
        ),
        prefix='model.',
        copies={'decoder.weight': 'model.embeddings.tok_embeddings.weight'},
        defaults=DEFAULTS,
        fixed={'rope_scaling': None},  # the hub's library stretches the sliding layers by it, too
        neutral=(
            *(
                'global_attn_every_n_layers',
                'layer_norm_eps',
                'position_embedding_type',
                'initializer_cutoff_factor',
                'deterministic_flash_attn',
            ),
            *('reference_compile', 'repad_logits_with_grad', 'sparse_prediction', 'sparse_pred_ignore_index'),
        ),
    ),
}
