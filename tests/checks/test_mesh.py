"""What the axes of a mesh must divide."""

import jax
import pytest

from tformer import checks
from tformer.config import Config, Mesh, Model, Train, override
from tformer.distributed import meshes
from tformer.errors import UserError
from tformer.training import dummy_batch
from tformer.training.program import make_program


def test_an_axis_that_splits_no_parameter_is_told_with_the_nearest_that_does():
    """Also where its size is known with the devices. Other rules do not split parameters by it."""
    config = Config(model=Model(emb_dim=96, num_heads=4), mesh=Mesh(data=1, fsdp=5), train=Train(num_steps=1))
    said = (
        r'^mesh\.fsdp=5 does not divide model\.emb_dim=96; nearest that does: 4; else each device holds all parameters$'
    )
    with pytest.raises(UserError, match=said):
        checks.check(config)
    checks.check(override(config, {'mesh.rules': 'tp'}))
    checks.check(override(config, {'mesh.overrides': ('embed=none',)}))
    rest = dummy_batch.assumed(override(config, {'mesh.fsdp': -1}))
    mesh = meshes.make_mesh(rest.mesh, jax.devices()[:5])
    with pytest.raises(UserError, match=said):
        make_program(rest, dummy_batch.one_row(rest), mesh)
