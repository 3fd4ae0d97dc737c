"""What fits a mesh: sizes of its axes, and what they divide."""

from tformer.config.run import Config
from tformer.errors import UserError

AXES = ('pipeline', 'data', 'fsdp', 'expert', 'context', 'tensor')  # the more is sent, the nearer the devices


def check_mesh(config: Config) -> None:
    """Raises a `UserError` of one line where the mesh, or what it divides, does not fit."""
    sizes = {axis: getattr(config.mesh, axis) for axis in AXES}
    if sum(size == -1 for size in sizes.values()) > 1 or not all(size == -1 or size > 0 for size in sizes.values()):
        raise UserError(f'mesh: sizes must be positive, and one at most -1 (all devices left): {sizes}')
    _check_expert(config)


def _check_expert(config: Config) -> None:
    ways, experts = config.mesh.expert, config.model.num_experts
    if ways != 1 and experts is None:
        raise UserError(f'mesh.expert={ways} splits experts, but model.num_experts=None; valid here: 1')
    if ways > 1 and experts is not None and experts % ways:
        nearest = min((n for n in range(1, experts + 1) if experts % n == 0), key=lambda n: abs(n - ways))
        raise UserError(f'mesh.expert={ways} does not divide model.num_experts={experts}; nearest that does: {nearest}')
