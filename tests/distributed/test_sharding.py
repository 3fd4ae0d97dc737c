"""Meshes and what they split, by counting."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax.sharding import PartitionSpec as P

from tformer.config import Mesh
from tformer.distributed import sharding
from tformer.errors import UserError


@pytest.mark.parametrize(
    ('mesh', 'ways', 'rows', 'parts'),
    [
        (Mesh(data=2, fsdp=2, tensor=2), 4, 4, None),
        (Mesh(expert=2, context=4), 2, 2, None),
        (Mesh(pipeline=2, data=4), 8, 8, None),  # parts that divide what there is; stages split the rows outside
        (Mesh(pipeline=2, data=2, microbatches=3), 4, 12, 3),  # 3 parts and 2 stages
        (Mesh(pipeline=2, data=2, microbatches=6), 4, 12, 6),
        (Mesh(data=2, microbatches=6), 2, 2, None),  # no pipeline, so no parts of it
    ],
)
def test_rows_are_split_by_data_fsdp_expert_and_stages_and_into_the_parts_of_a_pipeline(mesh, ways, rows, parts):
    made = sharding.make_mesh(mesh)
    assert sharding.batch_ways(made) == ways
    assert sharding.row_multiple(made, mesh) == rows
    with sharding.placed(made, mesh):
        assert sharding.schedule() == (sharding.Schedule(parts, 1) if mesh.pipeline > 1 else None)


@pytest.mark.parametrize(
    ('rows', 'parts'),
    [(32, 16), (64, 16), (8, 4), (24, 12), (20, 4)],  # of two groups of devices: 16, 32, 4, 12, 10 rows each
)
def test_a_pipeline_has_up_to_four_parts_a_stage_that_divide_the_rows(rows, parts):
    mesh = sharding.make_mesh(Mesh(pipeline=4, data=2))
    assert sharding.Schedule(None, 1).parts_of(rows, mesh) == parts
    assert sharding.Schedule(2, 1).parts_of(rows, mesh) == 2


def test_a_minus_one_takes_what_the_others_leave():
    assert sharding.make_mesh(Mesh(data=-1, tensor=2)).shape['data'] == len(jax.devices()) // 2
    assert sharding.make_mesh(Mesh(data=2)).size == 2
    with pytest.raises(UserError, match=r'^mesh\.data=-1, mesh\.tensor=3 do not fit the 8 devices there are$'):
        sharding.make_mesh(Mesh(data=-1, tensor=3))


def test_the_mesh_of_arrays_is_that_which_they_are_on_or_their_device():
    mesh, fourth = sharding.make_mesh(Mesh(data=2, tensor=2)), jax.devices()[3]
    assert sharding.mesh_of([np.zeros(4), jax.device_put(np.zeros(4), sharding.batch_sharding(mesh))]) == mesh
    for arrays, device in ((jax.device_put(np.zeros(4), fourth), fourth), (np.zeros(4), jax.devices()[0])):
        assert sharding.mesh_of(arrays).devices.flatten().tolist() == [device]


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


def test_stages_split_what_is_not_of_their_layers():
    """An axis of the mesh splits one axis of a parameter; four columns are not split eight ways."""
    config = Mesh(fsdp=4, pipeline=2)
    mesh, rules = sharding.make_mesh(config), sharding.make_rules(config)
    shapes = {
        'table': ((100, 16), ('vocab', 'embed'), P(None, ('fsdp', 'pipeline'))),
        'narrow': ((100, 4), ('vocab', 'embed'), P(None, 'fsdp')),
        'layered': ((6, 16, 32), ('layers', 'embed', 'mlp'), P('pipeline', 'fsdp', None)),
    }
    for name, (shape, names, spec) in shapes.items():
        box = nn.Partitioned(jax.ShapeDtypeStruct(shape, jnp.float32), names)
        assert sharding.tree_shardings(box, mesh, rules).spec == spec, name


def test_devices_without_such_a_layout_are_refused_in_a_line(monkeypatch):
    def arrange(sizes, devices, axis):
        raise NotImplementedError('no axes of a 2x2 torus have 4 devices\nof 8')

    monkeypatch.setattr(sharding, 'arrange', arrange)
    with pytest.raises(UserError, match=r'^mesh\.data=2, mesh\.tensor=4: no axes of a 2x2 torus have 4 devices$'):
        sharding.make_mesh(Mesh(data=2, tensor=4))
