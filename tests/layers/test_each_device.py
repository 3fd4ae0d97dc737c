"""What devices share out among themselves."""

import jax
import jax.numpy as jnp
import pytest

from tformer.config import Mesh
from tformer.distributed import meshes, sharding
from tformer.layers.parallel import each_device


@pytest.mark.parametrize(
    ('mesh', 'rows', 'each'),
    [
        (Mesh(data=2, context=4), 8, 1),  # all devices
        (Mesh(data=2, context=4), 4, 2),  # those of `data` alone, as four rows are not parts of eight devices
        (Mesh(data=2, context=2, tensor=2), 4, 1),  # those that split the vocabulary
        (Mesh(data=2, context=4), 3, 3),
    ],
)
def test_devices_that_have_the_same_rows_share_them_out(mesh, rows, each) -> None:
    with sharding.placed(made := meshes.make_mesh(mesh), mesh):
        x_BV = jax.jit(lambda x_BV: each_device.whole_rows(x_BV, 'act_vocab'))(jnp.ones((rows, 16)))
        place = x_BV.sharding
    assert made.size == 8 and place.shard_shape((rows, 16)) == (each, 16)
