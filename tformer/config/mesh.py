"""What fits a mesh: sizes of its axes, and what they divide."""

from tformer.config.run import Config
from tformer.errors import UserError

AXES = ('pipeline', 'data', 'fsdp', 'expert', 'context', 'tensor')  # the more is sent, the nearer the devices


def check_mesh(config: Config) -> None:
    """Raises a `UserError` of one line where the mesh, or what it divides, does not fit."""
    sizes = {axis: getattr(config.mesh, axis) for axis in AXES}
    if sum(size == -1 for size in sizes.values()) > 1 or not all(size == -1 or size > 0 for size in sizes.values()):
        raise UserError(f'mesh: sizes must be positive, and one at most -1 (all devices left): {sizes}')
