"""Rules between the fields of a model."""

from tformer.checks.conditions import require, require_divisor
from tformer.config import Model
from tformer.layers.attention import has_window
from tformer.layers.block import LAYER_SHARING
from tformer.layers.moe import DISPATCHES
from tformer.layers.norms import NORMS
from tformer.layers.parametrization import parametrization
from tformer.layers.positions import POSITIONS
from tformer.layers.rope_scalings import LISTS, ROPE_SCALINGS


def check_model(model: Model) -> None:
    """Raises a `UserError` of one line where fields of a model do not fit together."""
    if model.recurrence is None:
        _check_block(model)
    else:
        _check_recurrence(model)
    if model.family == 'encoder_decoder':
        same = model.encoder_vocab_size in (None, model.vocab_size) or model.vocab_size is None
        require(
            same or model.tied_embeddings not in ('all', 'inputs'),
            f'model.tied_embeddings={model.tied_embeddings} shares one table between encoder and decoder, but their '
            f'vocabularies differ ({model.encoder_vocab_size} and {model.vocab_size}); valid here: output, None',
        )
    else:
        require(
            model.tied_embeddings != 'inputs',
            f'model.tied_embeddings=inputs ties encoder and decoder; the family {model.family} has one stack: '
            'valid here: all, output, None',
        )


def whole_batch(model: Model) -> str | None:
    """Returns which choice of a model depends on the whole batch, so that parts of a batch are not exact; or None."""
    choices = {
        f'model.norm={model.norm}': NORMS[model.norm].whole_batch,
        f'model.rope_scaling={model.rope_scaling}': ROPE_SCALINGS[model.rope_scaling].by_length,
    }
    if model.num_experts:
        weights = bool(model.balance_weight or model.router_z_weight)
        choices[f'model.expert_dispatch={model.expert_dispatch}'] = DISPATCHES[model.expert_dispatch].whole_batch
        choices['model.num_experts with a balance_weight or router_z_weight'] = weights
    return next((f'{name} depends on the whole batch' for name, holds in choices.items() if holds), None)


def _check_recurrence(model: Model) -> None:
    layers = model.num_encoder_layers, model.num_decoder_layers
    require(
        model.family != 'encoder_decoder' or layers[0] == layers[1],
        f'model.recurrence={model.recurrence}: each layer of the decoder starts where that of the encoder ended: '
        f'model.num_decoder_layers={layers[1]} must be model.num_encoder_layers={layers[0]}',
    )
    require(
        not model.bidirectional or model.emb_dim % 2 == 0,
        f'model.bidirectional=True halves model.emb_dim={model.emb_dim}: it must be even',
    )


def _check_block(model: Model) -> None:
    if model.head_dim is None or not model.attention_projections:
        heads = 'model.num_heads', model.num_heads
        require_divisor(*heads, 'model.emb_dim', model.emb_dim, ' (or set model.head_dim)')
    kv_heads = model.num_kv_heads or model.num_heads
    require_divisor('model.num_kv_heads', kv_heads, 'model.num_heads', model.num_heads)
    head_dim = model.head_dim or model.emb_dim // model.num_heads
    _check_latents(model, head_dim)
    _check_positions(model, head_dim)
    _check_layers(model)
    _check_adapters(model)


def _check_latents(model: Model, head_dim: int) -> None:
    if model.kv_latent_dim is None:
        return
    line, rotary_dim = f'model.kv_latent_dim={model.kv_latent_dim} needs ', model.rotary_dim or head_dim // 2
    require(rotary_dim > 0 and rotary_dim % 2 == 0, f'{line}an even model.rotary_dim, not {rotary_dim}')
    needed = {
        'position': 'rope',
        'rope_fraction': 1.0,
        'cross_position': False,
        'attention_projections': True,
        'attention_bias': (),
        'qk_norm': None,
        'parametrization': None,
    }
    for name, value in needed.items():
        found = getattr(model, name)
        require(found == value, f'{line}model.{name}={value}, not {found}')
    heads = model.num_kv_heads
    require(heads in (None, model.num_heads), f'{line}model.num_kv_heads=None: all heads share a latent, not {heads}')
    adapted = sorted({'key', 'value'} & set(model.lora_targets)) if model.lora_rank is not None else []
    require(
        not adapted, f'{line}model.lora_targets without {adapted}: a latent has no adapters; valid: query, out, mlp'
    )


def _check_positions(model: Model, head_dim: int) -> None:
    position, rotary = POSITIONS[model.position], round(head_dim * model.rope_fraction)
    if model.kv_latent_dim is not None:
        rotary = model.rotary_dim or head_dim // 2
    require(
        'rope_fraction' not in position.fields or (rotary > 0 and rotary % 2 == 0 and model.rope_fraction <= 1),
        f'model.position={model.position} rotates pairs: model.rope_fraction={model.rope_fraction} of the head size '
        f'{head_dim} (model.head_dim) must be even',
    )
    coordinates = LAYER_SHARING[model.layer_sharing].coordinates
    widths = {model.embedding_factor_dim or model.emb_dim, *([model.emb_dim] if coordinates else [])}
    odd = sorted(width for width in widths if width % 2)
    require(
        not odd or not (position.sinusoids or coordinates),
        f'model.position={model.position} (model.layer_sharing=universal too) needs an even model.emb_dim '
        f'(or model.embedding_factor_dim), not {odd}',
    )
    require(
        'rope_factor' not in ROPE_SCALINGS[model.rope_scaling].fields or model.rope_factor > 1,
        f'model.rope_scaling={model.rope_scaling} needs a model.rope_factor above 1, not {model.rope_factor}',
    )
    require(
        LISTS[0] not in ROPE_SCALINGS[model.rope_scaling].fields or model.rope_trained_len > 1,
        f'model.rope_scaling={model.rope_scaling} needs a model.rope_trained_len above 1, not {model.rope_trained_len}',
    )
    for name in LISTS if LISTS[0] in ROPE_SCALINGS[model.rope_scaling].fields else ():
        factors = getattr(model, name)
        require(
            len(factors) == rotary // 2 and all(factor > 0 for factor in factors),
            f'model.{name} needs {rotary // 2} positive numbers, one for each pair that rotates, not {list(factors)}',
        )
    require(
        'rope_fast_turns' not in ROPE_SCALINGS[model.rope_scaling].fields
        or model.rope_fast_turns > model.rope_slow_turns,
        f'model.rope_fast_turns={model.rope_fast_turns} must be above model.rope_slow_turns={model.rope_slow_turns}',
    )
    buckets = model.relative_buckets
    require(
        'relative_buckets' not in position.fields
        or (buckets % 2 == 0 and buckets >= 4 and model.relative_max_distance > buckets),
        f'model.relative_buckets={buckets} must be even, 4 or more, and less than '
        f'model.relative_max_distance={model.relative_max_distance}',
    )


def _check_layers(model: Model) -> None:
    require(bool(model.attention_pattern), 'model.attention_pattern is empty; valid: global, local, repeated')
    depths = {'encoder': model.num_encoder_layers, 'decoder': model.num_decoder_layers}
    deepest = max(layers for stack, layers in depths.items() if stack in model.family)
    require(
        len(model.attention_pattern) <= deepest,
        f'model.attention_pattern has {len(model.attention_pattern)} layers, the model {deepest}',
    )
    require(
        model.window is not None or not has_window(model),
        'model.attention_pattern has a local layer: model.window must say how far it sees',
    )
    require(
        not NORMS[model.norm].whole_batch or not LAYER_SHARING[model.layer_sharing].shared,
        f'model.norm={model.norm} has statistics for each layer, model.layer_sharing={model.layer_sharing} has one '
        'layer; valid here: None',
    )
    require(
        model.num_experts is None or model.experts_per_token <= model.num_experts,
        f'model.experts_per_token={model.experts_per_token} is more than model.num_experts={model.num_experts}',
    )
    require(
        model.embedding_factor_dim is None or not parametrization(model).from_base,
        f'model.parametrization={model.parametrization} has no rule for a smaller token table: '
        'model.embedding_factor_dim must be None',
    )
    require(
        model.base_emb_dim is not None or not parametrization(model).from_base,
        f'model.parametrization={model.parametrization} needs model.base_emb_dim, the width whose learning rate is '
        'known',
    )


def _check_adapters(model: Model) -> None:
    if model.lora_rank is None:
        return
    require(bool(model.lora_targets), 'model.lora_targets is empty: model.lora_rank has no projection to adapt')
    for target in model.lora_targets:
        inside = target.startswith('mlp')
        line = f'model.lora_targets: {target!r} fits no layer: '
        require(inside or model.attention_projections, line + 'model.attention_projections is False')
        require(not inside or model.num_experts is None, line + 'experts (model.num_experts) have no adapters')
