"""The kernels of experts' products, interpreted: by hand, in a mixture of experts, and on meshes."""

import dataclasses
import functools

import jax
import jax.export
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax.experimental.pallas import tpu

from comparing import errors, relative
from grouped_cases import by_hand, make, run
from tformer.config import Mesh, Model
from tformer.distributed import meshes, sharding
from tformer.layers import grouped_products, moe
from tformer.layers.grouped_blocks import Options
from tformer.layers.grouped_products import block_size, grouped_product
from tformer.layers.moe import Moe
from tformer.layers.resolved import resolve_model
from tformer.model import build

ROUNDOFF = {'float32': 2.0**-20, 'bfloat16': 2.0**-8}  # of sums of up to 384 products, and of the result
CASES = {  # blocks of each expert, slots of a block, widths, blocks behind
    'even': ((2, 2), 16, (128, 256), 0),
    'uneven': ((1, 5, 0, 2), 16, (128, 256), 3),
    'the last ones empty': ((2, 1, 0, 0), 16, (128, 128), 3),
    'one expert': ((0, 0, 3), 32, (256, 128), 1),
    'many': ((3, 0, 9, 1), 16, (384, 128), 0),  # more than a group of tiles
    'large': ((1, 2), 128, (128, 384), 1),
}


def interpreted(platform):
    return functools.partial(grouped_product, Options(platform, 64, interpret=True))


@pytest.mark.slow
@pytest.mark.parametrize('dtype', ROUNDOFF)
@pytest.mark.parametrize('case', CASES)
@pytest.mark.parametrize('platform', grouped_products.PLATFORMS)
def test_a_product_and_its_gradients_are_those_of_float64_and_blocks_behind_are_not_read(platform, case, dtype):
    given = make(*CASES[case], dtype, behind=np.nan)
    found = run(interpreted(platform), *given)
    assert max(errors(found, by_hand(*given)).values()) < ROUNDOFF[dtype]
    assert {name: x.dtype.name for name, x in found.items()} == dict.fromkeys(found, dtype)


@pytest.mark.slow
@pytest.mark.stack
@pytest.mark.parametrize('case', CASES)
def test_a_chip_that_is_simulated_reads_nothing_that_is_not_there(case):
    """Nor anything that was not written, which is NaN."""
    chip = tpu.InterpretParams(out_of_bounds_reads='raise', uninitialized_memory='nan')
    given = make(*CASES[case], behind=np.nan)
    found = run(functools.partial(grouped_product, Options('tpu', 64, interpret=chip)), *given)
    assert max(errors(found, by_hand(*given)).values()) < ROUNDOFF['float32']


@pytest.mark.parametrize('platform', grouped_products.PLATFORMS)
def test_without_a_token_everything_is_zero(platform):
    found = run(interpreted(platform), *make((0, 0), 16, (128, 128), 2, behind=np.nan))
    assert not any(np.any(x) for x in found.values())


@pytest.mark.parametrize('platform', grouped_products.PLATFORMS)
def test_models_side_by_side_have_the_products_of_each_alone(platform):
    """Each with its own choices of experts."""
    cases = [make(counts, 16, (128, 128), empty) for counts, empty in (((1, 2, 1), 0), ((0, 1, 2), 1))]
    x, kernels, _, blocks = jax.tree.map(lambda *each: jnp.stack(each), *cases)
    found = jax.vmap(interpreted(platform))(x, kernels, blocks)
    for y_PF, (x_PD, kernel_EDF, _, blocks) in zip(found, cases, strict=True):
        np.testing.assert_array_equal(y_PF, interpreted(platform)(x_PD, kernel_EDF, blocks))


def test_an_expert_with_its_share_fills_four_blocks_of_a_power_of_two():
    assert [block_size(choices, 8) for choices in (1, 8, 1023, 1024, 2047, 2048, 4096, 10**6)] == [
        16, 16, 16, 32, 32, 64, 128, 128
    ]  # fmt: skip


@pytest.mark.parametrize(
    ('platform', 'widths', 'there'),
    [('gpu', (64, 192), True), ('gpu', (96, 192), False), ('tpu', (128, 384), True), ('tpu', (64, 384), False),
     ('cpu', (128, 128), False)],
)  # fmt: skip
def test_which_widths_have_a_kernel(platform, widths, there):
    x_PD, kernel_EDF, *_ = make((1,), 16, widths)
    assert grouped_products.serves(platform, x_PD, kernel_EDF) is there


def test_there_is_no_kernel_where_xla_splits_arrays_over_devices():
    x_PD, kernel_EDF, *_ = make((1,), 16, (128, 128))
    with jax.set_mesh(meshes.make_mesh(Mesh(data=2), jax.devices()[:2])):
        assert not grouped_products.serves('gpu', x_PD, kernel_EDF)
    with jax.set_mesh(meshes.make_mesh(Mesh(data=1), jax.devices()[:1])):
        assert grouped_products.serves('gpu', x_PD, kernel_EDF)


# ------------------------------------------------------------------------------------------------ in a mixture
E = 4
CFG = resolve_model(Model(emb_dim=128, mlp_dim=256, num_experts=E, activation='swiglu', mlp_bias=True))
MESHES = {
    'data': Mesh(data=8),
    'tensor': Mesh(data=1, tensor=2),
    'fsdp and tensor': Mesh(data=2, fsdp=2, tensor=2),
    'expert': Mesh(data=2, expert=4),
    'expert, fsdp and tensor': Mesh(data=1, expert=2, fsdp=2, tensor=2),
}


def tokens():
    """Rows of unequal length; the last one is empty."""
    x_BTD = jax.random.normal(jax.random.key(0), (8, 6, 128))
    return x_BTD, jnp.asarray(np.arange(6) < np.array([6, 5, 4, 3, 6, 6, 2, 0])[:, None])


@functools.cache
def boxed():
    """The layer's parameters, their biases drawn too, with their logical names."""
    tree = jax.jit(Moe(CFG, 'decoder', E).init)(jax.random.key(1), *tokens())['params']
    return jax.tree.map(lambda x: x + 0.1 * jax.random.normal(jax.random.key(x.size), x.shape), tree)


def everything(cfg, params):
    """The output of the layer, and the gradients of a fixed random weighting of it."""
    x_BTD, real_BT = tokens()

    def loss(params, x_BTD):
        out = Moe(cfg, 'decoder', E).apply({'params': params}, x_BTD, real_BT)
        return (out * np.random.default_rng(1).standard_normal(out.shape)).sum(), out

    (_, out), grads = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(params, x_BTD)
    return {'out': out, 'params': grads[0], 'x': grads[1]}


@functools.cache
def expected(choices):
    cfg = dataclasses.replace(CFG, experts_per_token=choices, expert_dispatch='reference')
    return everything(cfg, sharding.unboxed(boxed()))


def plain(options, x_PD, kernel_EDF, blocks):
    """The product in JAX, for devices of a mesh, which cannot interpret kernels within `jax.shard_map`."""
    size, used = len(x_PD) // len(blocks.expert_M), jnp.arange(len(blocks.expert_M)) < blocks.count_E.sum()
    y_MRF = jnp.einsum('MRD,MDF->MRF', x_PD.reshape(-1, size, x_PD.shape[1]), kernel_EDF[blocks.expert_M])
    return jnp.where(used[:, None, None], y_MRF, 0).reshape(len(x_PD), -1)


@pytest.mark.slow
@pytest.mark.parametrize('choices', [1, 2, 3])
@pytest.mark.parametrize('platform', grouped_products.PLATFORMS)
def test_a_mixture_by_the_kernels_is_that_of_the_definition(monkeypatch, platform, choices):
    called, params = [], sharding.unboxed(boxed())
    monkeypatch.setattr(moe, 'platform', lambda: platform)
    monkeypatch.setattr(
        grouped_products,
        'grouped_product',
        lambda options, *given: called.append(options) or grouped_product(options._replace(interpret=True), *given),
    )
    found = everything(dataclasses.replace(CFG, experts_per_token=choices), params)
    assert set(called) == {Options(platform, 8 * 6 * choices)}
    for name, wanted in expected(choices).items():
        assert relative(found[name], wanted) < 1e-6, name


@pytest.mark.slow
@pytest.mark.parametrize('mesh', MESHES)
def test_each_device_multiplies_its_own_tokens_and_experts(monkeypatch, mesh):
    """Counted are the choices that a device's experts get where all get equally many."""
    called, params = [], sharding.unboxed(boxed())
    monkeypatch.setattr(moe, 'platform', lambda: 'gpu')
    monkeypatch.setattr(
        grouped_products,
        'grouped_product',
        lambda options, x_PD, *given: called.append((options.slots, len(x_PD))) or plain(options, x_PD, *given),
    )
    laid_out, rules = meshes.make_mesh(MESHES[mesh]), sharding.make_rules(MESHES[mesh])
    with jax.set_mesh(laid_out), nn.logical_axis_rules(rules):
        placed = jax.device_put(params, sharding.tree_shardings(boxed(), laid_out, rules))
        found = jax.device_get(everything(CFG, placed))
    for name, wanted in expected(2).items():
        assert relative(found[name], wanted) < 1e-6, name
    devices = meshes.batch_ways(laid_out)
    assert {slots for slots, _ in called} == {8 * 6 * 2 // devices}
    assert all(length % 16 == 0 for _, length in called)


@pytest.mark.parametrize(('remat', 'calls'), [(None, 9), ('dots', 9), ('full', 12)])
def test_products_are_computed_again_in_the_backward_pass_where_remat_keeps_none(monkeypatch, remat, calls):
    """Three products of a layer, and the gradients of both operands of each."""
    monkeypatch.setattr(moe, 'platform', lambda: 'gpu')
    sizes = {'vocab_size': 8, 'emb_dim': 64, 'mlp_dim': 64, 'num_heads': 2, 'num_decoder_layers': 1, 'num_experts': 2}
    model = build(Model(family='decoder', activation='swiglu', remat=remat, dropout_rate=0.0, **sizes))
    batch = {'inputs': jnp.ones((1, 8), jnp.int32)}
    params = sharding.unboxed(jax.eval_shape(model.init, jax.random.key(0), batch))
    traced = jax.make_jaxpr(jax.grad(lambda params: model.apply(params, batch).sum()))(params)

    def count(jaxpr):
        inner = (count(each) for e in jaxpr.eqns for each in jax.extend.core.jaxprs_in_params(e.params))
        return sum(e.primitive.name == 'pallas_call' for e in jaxpr.eqns) + sum(inner)

    assert count(traced.jaxpr) == calls
