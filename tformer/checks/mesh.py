"""The rules of a mesh: the sizes of its axes, and the numbers that they divide."""

import math

from tformer.checks.conditions import require, require_divisor, require_multiple
from tformer.checks.model import whole_batch
from tformer.config import AXES, Config


def check_mesh(config: Config) -> None:
    """Raises a `UserError` of one line where the mesh, or what it divides, does not fit."""
    model, mesh = config.model, config.mesh
    sizes = {axis: getattr(mesh, axis) for axis in AXES}
    require(
        list(sizes.values()).count(-1) <= 1 and all(size == -1 or size > 0 for size in sizes.values()),
        f'mesh: sizes must be positive, and one at most -1 (all devices left): {sizes}',
    )
    for axis in ('context', 'pipeline'):
        require(
            model.recurrence is None or sizes[axis] == 1,
            f'model.recurrence={model.recurrence} reads one token after another: mesh.{axis}={sizes[axis]} has nothing '
            'to split; use 1',
        )
    require(
        mesh.expert == 1 or model.num_experts is not None,
        f'mesh.expert={mesh.expert} splits experts, but model.num_experts=None; valid here: 1',
    )
    if mesh.expert > 1:
        require_divisor('mesh.expert', mesh.expert, 'model.num_experts', model.num_experts or 1)
    _check_pipeline(config)


def _check_pipeline(config: Config) -> None:
    model, mesh, stages = config.model, config.mesh, config.mesh.pipeline
    if stages == 1:
        return
    words = whole_batch(model)
    if model.layer_sharing is not None:
        words = f'model.layer_sharing={model.layer_sharing} has one layer'
    require(words is None, f'{words}: mesh.pipeline={stages} has nothing to split exactly; use 1')
    require(
        model.remat != 'offload',
        f'model.remat=offload: XLA compiles no pipeline (mesh.pipeline={stages}) that keeps products on the host; use '
        'dots or full',
    )
    if stages == -1:  # the rest is known with the devices
        return
    depths = {'encoder': model.num_encoder_layers, 'decoder': model.num_decoder_layers}
    for stack, layers in depths.items():
        if stack in model.family:
            asked = f'mesh.pipeline={stages} stages x mesh.pipeline_repeats={mesh.pipeline_repeats}'
            require_multiple(f'model.num_{stack}_layers', layers, stages * mesh.pipeline_repeats, asked)
    parts = mesh.microbatches or stages
    if mesh.pipeline_repeats > 1:
        require_multiple(
            'mesh.microbatches', parts, stages, f'mesh.pipeline={stages} stages, for mesh.pipeline_repeats > 1'
        )
    if config.data.batch_tokens is None:
        ways = math.prod(size for size in (mesh.data, mesh.fsdp, mesh.expert) if size != -1)
        needed = config.train.microbatches * math.lcm(parts, stages) * ways
        asked = f'train.microbatches={config.train.microbatches} x mesh.microbatches={parts} x {ways} ways of the rows'
        require_multiple('train.batch_size', config.train.batch_size, needed, asked)
