"""What a step is expected to take on a mesh, by formulas, so that `plan` compiles the most promising ones first."""

import math

from jax.sharding import AbstractMesh

from tformer.config import Config
from tformer.distributed.devices import Target
from tformer.distributed.sharding import Schedule

# Bytes that a layer's norms and residuals move for each number of the stream, which `tensor` does not split.
UNSPLIT = 100
# The time of a parameter's update is that of moving so many bytes: a float32 parameter with its gradient and moments,
# read and written, and by the compilers of TPUs four times as long.
UPDATED = {'tpu': 110, 'cuda': 28}
# Bytes that a layer moves for each number of a slot's hidden vector, whether or not the slot holds a token; by the
# compilers.
SLOT = {'tpu': 240, 'cuda': 90}
LAYER = 1.4e-4  # seconds of a layer, forward and back, of however few tokens
NUMBERS = {'bfloat16': 2, 'float32': 4}  # bytes of a number


def expected(config: Config, target: Target, mesh: dict[str, int]) -> float:
    """Returns a mesh's expected seconds: products, what it sends, its idle stages, what it reads of weights and stream,
    what its layers take at least, the update, and what of its state would not fit.

    Bytes are those of a ring, by the parameters and activations that an axis splits (Rajbhandari et al. 2020, section
    7; Shoeybi et al. 2019, section 3; Narayanan et al. 2021, 2.2; Liu et al. 2023).
    """
    model, device, width = config.model, target.device, config.model.emb_dim
    size = NUMBERS[model.dtype]
    attention, experts = 4 * width * width, 3 * width * model.mlp_dim
    weights = sum(depths(config)) * (attention + experts * (model.num_experts or 1))
    used = sum(depths(config)) * (attention + experts * _computed(config))
    own = weights / (mesh['tensor'] * mesh['pipeline'] * mesh['expert'])
    held = own + (model.vocab_size or 0) * width / mesh['tensor']
    rows = num_rows(config) / (mesh['data'] * mesh['fsdp'] * mesh['expert'])
    stream = rows * _numbers_of_a_row(config) / mesh['context'] / mesh['pipeline']
    keys = stream * mesh['context'] / mesh['tensor'] * (model.num_kv_heads or model.num_heads) / model.num_heads
    stages, parts = mesh['pipeline'], _parts(config, mesh)
    shards = mesh['fsdp'] * mesh['context']  # that parameters are split over
    ticks, gradient = parts + stages - 1, 2 * size * own / shards
    costs = {  # from the axis whose devices are nearest; bytes that a device sends in a step, times n / (n - 1)
        'tensor': 8 * size * stream,
        # keys and values thrice, and their gradients in float32, which go home rounded
        'context': (6 * size + 8 + 2 * size / max(mesh['context'] - 1, 1)) * keys,
        'expert': 4 * size * stream * model.experts_per_token,
        'fsdp': 3 * size * own * ticks,
        'data': gradient,
        'pipeline': 2 * size * rows * config.data.length / mesh['context'] * width,
    }
    near, sent = 1, {}
    for axis, amount in costs.items():
        near *= mesh[axis]
        far = near > device.near or (target.slices > 1 and axis == config.mesh.dcn_axis)
        speed = device.far_bytes if far else device.near_bytes
        sent[axis] = amount * (1 - 1 / (shards if axis == 'fsdp' else mesh[axis])) / speed
    each = num_rows(config) / target.count / device.flops['bfloat16']
    products = 6 * used * config.data.length * each
    if device.platform == 'cuda':  # a GPU gathers while it multiplies
        sent['fsdp'] = max(sent['fsdp'] - products, 0)
    causal = depths(config)[1] * width * config.data.length**2  # what a ring computes of it in vain, behind the mask
    unseen = 9 * causal * each if mesh['context'] > 1 else 0
    read, updated = 3 * 4 * own * ticks, UPDATED[device.platform] * held / shards
    empty = stream / width * model.mlp_dim / mesh['tensor'] * (_slots(config, mesh) - _computed(config))
    moved = (read + updated + UNSPLIT * stream + SLOT[device.platform] * empty) / device.bandwidth
    layers = sum(depths(config)) / stages * parts  # that a device computes, one part of its rows at a time
    waits = max(LAYER * layers - products - UNSPLIT * stream / device.bandwidth, 0)
    idle = (products + unseen) * (stages - 1) / parts + waits * ticks / parts
    state = 16 * held / shards
    return products + sum(sent.values()) + moved + unseen + idle + max(state / device.memory - 0.8, 0) * 1e6


def _computed(config: Config) -> float:
    """Returns how many experts are computed for a token."""
    model = config.model
    if model.num_experts is None:
        return 1
    return model.experts_per_token * (model.expert_capacity if model.expert_dispatch == 'capacity' else 1)


def _slots(config: Config, mesh: dict[str, int]) -> float:
    """Returns how many slots a device has for a token of its own: without drops those of the worst case, and with a
    capacity and no devices that share experts those of all tokens."""
    model, ways = config.model, mesh['expert']
    if model.num_experts is None:
        return _computed(config)
    if model.expert_dispatch == 'capacity':
        return _computed(config) * (mesh['data'] * mesh['fsdp'] * mesh['context'] if ways == 1 else 1)
    return ways * min(model.experts_per_token, model.num_experts / ways)


def _parts(config: Config, mesh: dict[str, int]) -> int:
    """Returns how many parts of a batch pass through the stages one after another."""
    if mesh['pipeline'] == 1:
        return 1
    schedule = Schedule(config.mesh.microbatches, config.mesh.pipeline_repeats)
    return schedule.parts_of(num_rows(config), AbstractMesh(tuple(mesh.values()), tuple(mesh)))


def num_rows(config: Config) -> int:
    """Returns the rows of a batch; with data.batch_tokens of its longest, as `inspect` has them."""
    tokens = config.data.batch_tokens
    return config.train.batch_size if tokens is None else max(tokens // config.data.length, 1)


def depths(config: Config) -> tuple[int, int]:
    """Returns the layers of the encoder and of the decoder that a model has."""
    model = config.model
    return model.num_encoder_layers * (model.family != 'decoder'), model.num_decoder_layers * (
        model.family != 'encoder'
    )


def _numbers_of_a_row(config: Config) -> float:
    """Returns the size of a row's residual stream, that of all layers together."""
    encoder, decoder = depths(config)
    lengths = encoder * (config.data.encoder_length or config.data.length), decoder * config.data.length
    return sum(lengths) * config.model.emb_dim


def kept_bytes(config: Config, mesh: dict[str, int]) -> float:
    """Returns about what a device keeps for the backward pass if nothing is computed again, besides attention's scores:
    17 numbers of the stream's width for each token and layer (Korthikanti et al. 2023, eq. 1 and section 5)."""
    size = NUMBERS[config.model.dtype]
    rows = num_rows(config) / config.train.microbatches
    return 17 * size * rows * _numbers_of_a_row(config) / math.prod(mesh.values())
