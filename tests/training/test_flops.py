"""Bytes and operations by hand."""

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tformer.config import Mesh
from tformer.distributed import sharding
from tformer.training import flops


def test_a_device_holds_its_part_of_what_is_split_and_all_of_the_rest():
    mesh = sharding.make_mesh(Mesh(data=4, tensor=2))

    def array(shape, dtype, *axes):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*axes)))

    assert flops.device_bytes([array((8, 6), jnp.float32, 'data')]) == 2 * 6 * 4
    assert flops.device_bytes([array((8, 6), jnp.bfloat16, 'data', 'tensor')]) == 2 * 3 * 2
    assert flops.device_bytes({'a': array((8, 6), jnp.float32), 'b': array((), jnp.int32)}) == 8 * 6 * 4 + 4


def test_the_costs_of_layers_by_the_length_of_a_row():
    """Vaswani et al. 2017, table 1, for n = 100, d = 8 and a window r = 30."""
    assert flops.LAYER_COSTS['global'](100, 8, 30) == (80_000, 1, 1)
    assert flops.LAYER_COSTS['local'](100, 8, 30) == (24_000, 1, 4)
    assert flops.LAYER_COSTS['recurrent'](100, 8, 30) == (6_400, 100, 100)
