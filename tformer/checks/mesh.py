"""The rules of a mesh: the sizes of its axes, and the numbers that they divide."""

import math

from tformer.checks.conditions import require_divisor, require_multiple
from tformer.config import AXES, Config
from tformer.errors import UserError
from tformer.layers.moe import DISPATCHES
from tformer.layers.norms import NORMS


def check_mesh(config: Config) -> None:
    """Raises a `UserError` of one line where the mesh, or what it divides, does not fit."""
    sizes = {axis: getattr(config.mesh, axis) for axis in AXES}
    if sum(size == -1 for size in sizes.values()) > 1 or not all(size == -1 or size > 0 for size in sizes.values()):
        raise UserError(f'mesh: sizes must be positive, and one at most -1 (all devices left): {sizes}')
    _check_recurrent(config)
    _check_expert(config)
    _check_pipeline(config)


def _check_recurrent(config: Config) -> None:
    for axis in ('context', 'pipeline') if config.model.recurrence is not None else ():
        if (ways := getattr(config.mesh, axis)) != 1:
            raise UserError(
                f'model.recurrence={config.model.recurrence} reads one token after another: mesh.{axis}={ways} has '
                'nothing to split; use 1'
            )


def _check_expert(config: Config) -> None:
    ways, experts = config.mesh.expert, config.model.num_experts
    if ways != 1 and experts is None:
        raise UserError(f'mesh.expert={ways} splits experts, but model.num_experts=None; valid here: 1')
    if ways > 1 and experts is not None:
        require_divisor('mesh.expert', ways, 'model.num_experts', experts)


def _check_pipeline(config: Config) -> None:
    model, mesh, stages = config.model, config.mesh, config.mesh.pipeline
    if stages == 1:
        for name, value in (('microbatches', mesh.microbatches), ('pipeline_repeats', mesh.pipeline_repeats)):
            if value not in (None, 1):
                raise UserError(f'mesh.{name}={value} has no effect here: it applies where mesh.pipeline is above 1')
        return
    whole = {
        f'model.layer_sharing={model.layer_sharing} has one layer': model.layer_sharing is not None,
        f'model.norm={model.norm} depends on the whole batch': NORMS[model.norm].whole_batch,
    }
    if model.num_experts:
        weights = bool(model.balance_weight or model.router_z_weight)
        dispatch = f'model.expert_dispatch={model.expert_dispatch}'
        whole[f'{dispatch} depends on the whole batch'] = DISPATCHES[model.expert_dispatch].whole_batch
        whole['model.num_experts with a balance_weight or router_z_weight depends on the whole batch'] = weights
    for words, holds in whole.items():
        if holds:
            raise UserError(f'{words}: mesh.pipeline={stages} has nothing to split exactly; use 1')
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
        needed = config.train.microbatches * parts * ways
        asked = f'train.microbatches={config.train.microbatches} x mesh.microbatches={parts} x {ways} ways of the rows'
        require_multiple('train.batch_size', config.train.batch_size, needed, asked)
