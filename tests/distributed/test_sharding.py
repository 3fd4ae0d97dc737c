"""Meshes and what they split, by counting."""

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from jax.sharding import PartitionSpec as P

from tformer.config import Mesh
from tformer.distributed import sharding
from tformer.distributed.hlo import Collective
from tformer.distributed.roofline import Device, times


@pytest.mark.parametrize(
    ('mesh', 'ways', 'rows'),
    [
        (Mesh(data=2, fsdp=2, tensor=2), 4, 4),
        (Mesh(expert=2, context=4), 2, 2),
        (Mesh(pipeline=2, data=4), 4, 8),  # as many parts as stages
        (Mesh(pipeline=2, data=2, microbatches=6), 2, 12),
        (Mesh(data=2, microbatches=6), 2, 2),  # no pipeline, so no parts of it
    ],
)
def test_rows_are_split_by_data_fsdp_and_expert_and_into_the_parts_of_a_pipeline(mesh, ways, rows):
    made = sharding.make_mesh(mesh)
    assert sharding.batch_ways(made) == ways
    assert sharding.row_multiple(made, mesh) == rows


def test_a_minus_one_takes_what_the_others_leave():
    assert sharding.make_mesh(Mesh(data=-1, tensor=2)).shape['data'] == len(jax.devices()) // 2
    assert sharding.make_mesh(Mesh(data=2)).size == 2


def test_a_parameter_is_split_by_its_names_where_its_sizes_divide():
    """FSDP splits `embed`, tensor parallelism the other axis of a kernel; ten columns are not split four ways."""
    config = Mesh(fsdp=2, tensor=4, rules='fsdp_tp')
    mesh = sharding.make_mesh(config)
    shapes = {'kernel': ((8, 12), ('embed', 'mlp')), 'odd': ((8, 10), ('embed', 'mlp')), 'scale': ((8,), ('norm',))}
    boxes = {
        name: nn.Partitioned(jax.ShapeDtypeStruct(shape, jnp.float32), names) for name, (shape, names) in shapes.items()
    }
    found = sharding.tree_shardings(boxes, mesh, sharding.make_rules(config))
    assert {name: each.spec for name, each in found.items()} == {
        'kernel': P('fsdp', 'tensor'),
        'odd': P('fsdp', None),
        'scale': P(None),
    }


def test_devices_that_a_fast_network_just_joins_are_near():
    device = Device(1.0, {'bfloat16': 1.0}, 1.0, near=4, near_bytes=10.0, far_bytes=1.0)
    mesh = {'data': 2, 'tensor': 4}
    near, far = (Collective('all-reduce', (axis,), 1, 20.0) for axis in ('tensor', 'data'))
    assert times(device, 'bfloat16', 0.0, 0.0, [near], mesh).network == 2
    assert times(device, 'bfloat16', 0.0, 0.0, [far], mesh).network == 20
