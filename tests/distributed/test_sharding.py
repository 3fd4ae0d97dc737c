"""What a mesh splits, by counting."""

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from jax.sharding import PartitionSpec as P

from tformer.config import Mesh
from tformer.distributed import meshes, sharding


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
    made = meshes.make_mesh(mesh)
    assert meshes.batch_ways(made) == ways
    assert meshes.row_multiple(made, mesh) == rows
    with sharding.placed(made, mesh):
        assert sharding.schedule() == (sharding.Schedule(parts, 1) if mesh.pipeline > 1 else None)


@pytest.mark.parametrize(
    ('rows', 'parts'),
    [(32, 16), (64, 16), (8, 4), (24, 12), (20, 4)],  # of two groups of devices: 16, 32, 4, 12, 10 rows each
)
def test_a_pipeline_has_up_to_four_parts_a_stage_that_divide_the_rows(rows, parts):
    mesh = meshes.make_mesh(Mesh(pipeline=4, data=2))
    assert sharding.Schedule(None, 1).parts_of(rows, mesh) == parts
    assert sharding.Schedule(2, 1).parts_of(rows, mesh) == 2


def test_a_parameter_is_split_by_its_names_where_its_sizes_divide():
    """FSDP splits `embed`, tensor parallelism the other axis of a kernel; ten columns are not split four ways."""
    config = Mesh(fsdp=2, tensor=4, rules='fsdp_tp')
    mesh = meshes.make_mesh(config)
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


def test_all_devices_that_have_tokens_of_their_own_split_parameters():
    """Of the axis `expert` those of other layers than experts."""
    config = Mesh(data=1, expert=2, context=4)
    mesh, rules = meshes.make_mesh(config), sharding.make_rules(config)
    shapes = {
        'attention': ((16, 8, 2), ('embed', 'heads', 'head_dim'), P(('expert', 'context'), None, None)),
        'experts': ((4, 16, 32), ('experts', 'embed', 'mlp'), P('expert', 'context', None)),
    }
    for name, (shape, names, spec) in shapes.items():
        box = nn.Partitioned(jax.ShapeDtypeStruct(shape, jnp.float32), names)
        assert sharding.tree_shardings(box, mesh, rules).spec == spec, name


def test_stages_split_what_is_not_of_their_layers():
    """An axis of the mesh splits one axis of a parameter; four columns are not split eight ways."""
    config = Mesh(fsdp=4, pipeline=2)
    mesh, rules = meshes.make_mesh(config), sharding.make_rules(config)
    shapes = {
        'table': ((100, 16), ('vocab', 'embed'), P(None, ('fsdp', 'pipeline'))),
        'narrow': ((100, 4), ('vocab', 'embed'), P(None, 'fsdp')),
        'layered': ((6, 16, 32), ('layers', 'embed', 'mlp'), P('pipeline', 'fsdp', None)),
    }
    for name, (shape, names, spec) in shapes.items():
        box = nn.Partitioned(jax.ShapeDtypeStruct(shape, jnp.float32), names)
        assert sharding.tree_shardings(box, mesh, rules).spec == spec, name
