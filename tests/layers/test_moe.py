"""The mixture of experts against one that computes every expert for every token."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax.sharding import PartitionSpec

from tformer import config
from tformer.config import Model
from tformer.distributed import meshes, sharding
from tformer.errors import UserError
from tformer.layers import moe
from tformer.layers.mlp import ACTIVATIONS, Mlp
from tformer.layers.moe import DISPATCHES, Moe
from tformer.layers.resolved import resolve_model

B, T, D, F, E = 3, 7, 8, 12, 5
CFG = resolve_model(Model(emb_dim=D, mlp_dim=F, num_experts=E))
REAL_BT = jnp.asarray(np.arange(T) < np.array([T, T - 3, T - 1])[:, None])


def inputs(dtype=jnp.float32):
    return jax.random.normal(jax.random.key(0), (B, T, D), dtype)


def initial(module, *args):
    """Returns the module's initial parameters, out of their boxes."""
    return jax.jit(lambda: sharding.unboxed(module.init(jax.random.key(1), *args)['params']))()


def parameters(cfg):
    """Returns the layer's parameters, their biases drawn too."""
    params = jax.eval_shape(lambda: initial(Moe(cfg, 'decoder', cfg.num_experts), inputs(), REAL_BT))
    leaves, tree = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(2), len(leaves))
    return tree.unflatten([0.5 * jax.random.normal(key, leaf.shape) for key, leaf in zip(keys, leaves, strict=True)])


def layer(cfg):
    return jax.jit(lambda params, x_BTD: Moe(cfg, 'decoder', cfg.num_experts).apply({'params': params}, x_BTD, REAL_BT))


def every_expert(cfg, keep_BTE=REAL_BT[..., None]):
    """The definition: every expert for every token, and weights of which most are zero."""
    count, activation = ACTIVATIONS[cfg.activation]

    def project(x, weights, equation):
        y = jnp.einsum(equation, x, weights['kernel'])
        return y + weights['bias'][None, None] if cfg.mlp_bias else y

    def apply(params, x_BTD):
        probs_BTE = jax.nn.softmax(x_BTD @ params['router']['kernel'])
        least_BT1 = jnp.sort(probs_BTE)[..., [-cfg.experts_per_token]]
        weights_BTE = jnp.where(probs_BTE >= least_BT1, probs_BTE, 0)
        if cfg.experts_per_token > 1:
            weights_BTE /= weights_BTE.sum(-1, keepdims=True)
        projected = [project(x_BTD[..., None, :], params[f'in_{i}'], 'BTXD,EDF->BTEF') for i in range(count)]
        y_BTED = project(activation(*projected), params['out'], 'BTEF,EFD->BTED')
        return jnp.einsum('BTED,BTE->BTD', y_BTED, weights_BTE * keep_BTE)

    return apply


def everything(function, params, x_BTD):
    """Returns the output and the gradients of a fixed random weighting of it."""

    @jax.jit
    def program(params, x_BTD):
        def loss(params, x_BTD):
            out = function(params, x_BTD)
            return (out.astype(jnp.float32) * np.random.default_rng(1).standard_normal(out.shape)).sum(), out

        grads, out = jax.grad(loss, (0, 1), has_aux=True)(params, x_BTD)
        return {'out': out, 'params': grads[0], 'x': grads[1]}

    return program(params, x_BTD)


def assert_same(actual, expected, tolerance=1e-5):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=tolerance, rtol=tolerance), actual, expected)


# ------------------------------------------------------------------------------------------------ the function
BIASED = dataclasses.replace(CFG, mlp_bias=True)
VARIANTS = {
    'two relu': dataclasses.replace(CFG, mlp_bias=False),
    'two, biases': BIASED,
    'one': dataclasses.replace(BIASED, experts_per_token=1),
    'three swiglu': dataclasses.replace(BIASED, experts_per_token=3, activation='swiglu'),
    'all': dataclasses.replace(BIASED, experts_per_token=E),
}


@pytest.mark.slow
@pytest.mark.parametrize('variant', VARIANTS)
@pytest.mark.parametrize('dispatch', DISPATCHES)
def test_output_and_gradients_equal_the_definition(dispatch, variant):
    cfg = VARIANTS[variant]
    roomy = E / cfg.experts_per_token  # a place for every token at every expert: capacity drops nothing
    cfg = dataclasses.replace(cfg, expert_dispatch=dispatch, expert_capacity=roomy)
    params = parameters(cfg)
    actual = everything(layer(cfg), params, inputs())
    assert_same(actual, everything(every_expert(cfg), params, inputs()))
    assert all(np.any(grad) for grad in jax.tree.leaves(actual))


@pytest.mark.parametrize('dispatch', DISPATCHES)
def test_experts_all_alike_are_one_feed_forward(dispatch):
    cfg = dataclasses.replace(CFG, activation='swiglu', expert_dispatch=dispatch, expert_capacity=E / 2)
    alone = initial(Mlp(cfg, 'decoder'), inputs())
    params = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (E, *leaf.shape)), alone)
    params['router'] = parameters(cfg)['router']
    expected = Mlp(cfg, 'decoder').apply({'params': alone}, inputs()) * REAL_BT[..., None]
    np.testing.assert_allclose(layer(cfg)(params, inputs()), expected, atol=1e-5)


EXPERTS_RJ = np.array([(0, 1), (1, 0), (0, 2), (0, 1), (0, 1), (1, 0)])
REAL_R = np.array([True, True, True, False, True, True])
KEPT_RJ = np.array([(1, 1), (1, 0), (1, 1), (0, 0), (1, 0), (1, 0)], bool)  # 3 places an expert, first choices first


def test_a_router_takes_the_likeliest_experts_and_scales_several_weights_to_one():
    """Odds 4 : 3 : 2 : 1: of two experts 4/7 and 3/7 (Jiang et al. 2024); of one 4/10 (Fedus et al. 2022, eq. 2)."""
    logits = jnp.log(jnp.asarray([[1.0, 4.0, 3.0, 2.0], [2.0, 1.0, 3.0, 4.0]]))
    probs, weights, experts = moe.route(logits, 2)
    np.testing.assert_allclose(probs, [[0.1, 0.4, 0.3, 0.2], [0.2, 0.1, 0.3, 0.4]], rtol=1e-5)
    np.testing.assert_array_equal(experts, [[1, 2], [3, 2]])
    np.testing.assert_allclose(weights, [[4 / 7, 3 / 7]] * 2, rtol=1e-5)
    _, weights, experts = moe.route(logits, 1)
    np.testing.assert_array_equal(experts, [[1], [3]])
    np.testing.assert_allclose(weights, [[0.4]] * 2, rtol=1e-5)


def test_capacity_prefers_first_choices_then_earlier_tokens():
    dispatch = moe.capacity(jnp.asarray(EXPERTS_RJ), jnp.asarray(REAL_R), 3, 0.75)
    slot_RJ = np.asarray(dispatch.slot_RJ)
    np.testing.assert_array_equal(slot_RJ < dispatch.num_slots, KEPT_RJ)
    assert dispatch.num_slots == 9 and len(set(slot_RJ[KEPT_RJ])) == KEPT_RJ.sum()
    np.testing.assert_array_equal(dispatch.expert_P[slot_RJ[KEPT_RJ]], EXPERTS_RJ[KEPT_RJ])


def queued(expert_RJ, real_R, places):
    """Which choices find a place: a plain queue before each expert, of all first choices, then of all second ones."""
    queues, kept = {}, np.zeros(expert_RJ.shape, bool)
    for j in range(expert_RJ.shape[1]):
        for r in np.flatnonzero(real_R):
            queue = queues.setdefault(expert_RJ[r, j], [])
            kept[r, j] = len(queue) < places
            queue.append(r)
    return kept


# of R tokens with J choices among E experts, the factor, and places by hand: factor R J / E rounded up, at most R
@pytest.mark.slow
@pytest.mark.parametrize(
    ('tokens', 'choices', 'experts', 'factor', 'places'),
    [
        (7, 2, 3, 0.9, 5),  # 4.2
        (7, 2, 3, 1.0, 5),  # 4.67
        (6, 2, 3, 0.5, 2),  # 2
        (9, 1, 4, 1.0, 3),  # 2.25
        (9, 1, 4, 0.1, 1),  # 0.225
        (7, 3, 4, 1.0, 6),  # 5.25
        (7, 3, 4, 1.25, 7),  # 6.56
        (7, 4, 4, 2.0, 7),  # 14
        (8, 4, 5, 0.51, 4),  # 3.26
    ],
)
def test_capacity_is_rounded_up_and_whoever_finds_the_queue_full_is_dropped(tokens, choices, experts, factor, places):
    short = False
    for seed in range(5):
        rng = np.random.default_rng(seed)
        odds = rng.random((tokens, experts)) + np.arange(experts) / 3  # the last experts are liked best
        expert_RJ, real_R = np.argsort(-odds, axis=1)[:, :choices], rng.random(tokens) < 0.9
        dispatch = moe.capacity(jnp.asarray(expert_RJ), jnp.asarray(real_R), experts, factor)
        assert dispatch.num_slots == experts * places == len(dispatch.expert_P)
        slot_RJ, kept_RJ = np.asarray(dispatch.slot_RJ), queued(expert_RJ, real_R, places)
        np.testing.assert_array_equal(slot_RJ < dispatch.num_slots, kept_RJ)
        assert len(set(slot_RJ[kept_RJ])) == kept_RJ.sum()
        np.testing.assert_array_equal(dispatch.expert_P[slot_RJ[kept_RJ]], expert_RJ[kept_RJ])
        short |= bool((~kept_RJ[real_R]).any())
    assert short == (places < tokens)


@pytest.mark.parametrize('skew', [0.0, 1.0, 100.0])
@pytest.mark.parametrize('tokens', [1, 6, 300])
def test_dropless_gives_every_real_choice_a_place_of_its_own_in_a_block_of_its_expert(tokens, skew):
    logits_RE = np.random.default_rng(tokens).standard_normal((tokens, E)) - skew * np.arange(E)
    expert_RJ, real_R = np.argsort(-logits_RE, axis=1)[:, :2], np.arange(tokens) % 4 != 1
    dispatch = moe.dropless(jnp.asarray(expert_RJ), jnp.asarray(real_R), E, 0.1)
    slot_RJ, real_RJ = np.asarray(dispatch.slot_RJ), np.broadcast_to(real_R[:, None], expert_RJ.shape)
    np.testing.assert_array_equal(slot_RJ < dispatch.num_slots, real_RJ)
    assert len(set(slot_RJ[real_RJ])) == real_RJ.sum() and dispatch.expert_P.shape == (dispatch.num_slots,)
    np.testing.assert_array_equal(dispatch.expert_P[slot_RJ[real_RJ]], expert_RJ[real_RJ])


def test_choices_over_the_capacity_add_nothing():
    cfg = dataclasses.replace(CFG, num_experts=3, emb_dim=3, expert_dispatch='capacity', expert_capacity=0.75)
    x_RD, keep_RE = np.zeros((6, 3), np.float32), np.zeros((6, 3))
    for r, (first, second) in enumerate(EXPERTS_RJ):
        x_RD[r, first], x_RD[r, second] = 2, 1
        keep_RE[r, EXPERTS_RJ[r]] = KEPT_RJ[r]
    shapes = jax.eval_shape(lambda: initial(Moe(cfg, 'decoder', cfg.num_experts), x_RD[None], REAL_R[None]))
    params = jax.tree.map(lambda leaf: jax.random.normal(jax.random.key(leaf.size), leaf.shape), shapes)
    params['router']['kernel'] = jnp.eye(3)
    out_BTD = jax.jit(Moe(cfg, 'decoder', cfg.num_experts).apply)({'params': params}, x_RD[None], REAL_R[None])
    expected_BTD = jax.jit(every_expert(cfg, keep_RE[None].astype(np.float32)))(params, x_RD[None])
    np.testing.assert_allclose(out_BTD, expected_BTD, atol=1e-5)


# ------------------------------------------------------------------------------------------------ padding
@pytest.mark.parametrize('dispatch', DISPATCHES)
def test_padding_takes_no_place_and_changes_nothing(dispatch):
    cfg = dataclasses.replace(CFG, expert_dispatch=dispatch, expert_capacity=0.5)
    params, x_BTD = parameters(cfg), inputs()

    @jax.jit
    def run(x_BTD):
        return Moe(cfg, 'decoder', cfg.num_experts).apply({'params': params}, x_BTD, REAL_BT, mutable=['losses'])

    out_BTD, losses = run(x_BTD)
    assert not np.any(out_BTD[~REAL_BT])
    other = jnp.where(REAL_BT[..., None], x_BTD, 100 * jnp.roll(x_BTD, 1, -1))
    same_BTD, same_losses = run(other)
    np.testing.assert_array_equal(same_BTD, out_BTD)
    assert_same(same_losses, losses, 1e-6)
    grads = everything(layer(cfg), params, x_BTD)
    assert not np.any(grads['x'][~REAL_BT])


@pytest.mark.parametrize('dispatch', DISPATCHES)
def test_nothing_but_padding(dispatch):
    module = Moe(dataclasses.replace(CFG, expert_dispatch=dispatch), 'decoder', E)
    apply = jax.jit(functools.partial(module.apply, mutable=['losses']))
    out, losses = apply({'params': parameters(module.cfg)}, inputs(), jnp.zeros_like(REAL_BT))
    assert not np.any(out) and len(losses['losses']) == 2 and not any(np.any(leaf) for leaf in jax.tree.leaves(losses))


# ------------------------------------------------------------------------------------------------ the losses
def test_balance_loss_is_one_where_even_and_experts_over_choices_at_collapse():
    """Even: f_e = P_e = 1 / E. Collapse on J experts: f_e = 1 / J for J of them, whose P_e sum to 1, so E / J."""
    R, J, experts = 12, 2, 4
    real_R = jnp.ones(R, bool)
    turns_RE = jax.nn.one_hot(jnp.arange(R) % experts, experts) * 5 + jax.nn.one_hot((jnp.arange(R) + 1) % experts, 4)
    probs_RE, _, expert_RJ = moe.route(turns_RE, J)
    assert float(moe.balance_loss(probs_RE, expert_RJ, real_R)) == pytest.approx(1)
    for logits in ([90.0, 60.0, 0.0, 0.0], [90.0, 90.0, 0.0, 0.0]):
        probs_RE, _, expert_RJ = moe.route(jnp.tile(jnp.asarray(logits), (R, 1)), J)
        assert float(moe.balance_loss(probs_RE, expert_RJ, real_R)) == pytest.approx(experts / J)
    probs_RE, _, expert_RJ = moe.route(jnp.tile(jnp.asarray([90.0, 0.0, 0.0, 0.0]), (R, 1)), 1)
    assert float(moe.balance_loss(probs_RE, expert_RJ, real_R)) == pytest.approx(experts)


def test_balance_loss_is_of_one_layer():
    """Two layers that send all tokens to one expert each, with 3/4: 2 * 3/4 each. As one: 2 * (1/2 1/2 + 1/2 1/2)."""
    real_R, probs_RE = jnp.ones(5, bool), jnp.tile(jnp.asarray([0.75, 0.25]), (5, 1))
    layers = [(probs_RE, jnp.zeros((5, 1), int)), (probs_RE[:, ::-1], jnp.ones((5, 1), int))]
    assert [float(moe.balance_loss(*one, real_R)) for one in layers] == [1.5, 1.5]
    probs_RE, expert_RJ = (jnp.concatenate(parts) for parts in zip(*layers, strict=True))
    assert float(moe.balance_loss(probs_RE, expert_RJ, jnp.ones(10, bool))) == 1.0  # the hub's Mixtral


def test_losses_are_means_over_real_tokens():
    logits_RE = jnp.asarray([[1.0, 1.0], [2.0, 2.0], [50.0, 0.0]])
    real_R = jnp.asarray([True, True, False])
    expected = ((1 + math.log(2)) ** 2 + (2 + math.log(2)) ** 2) / 2
    assert float(moe.router_z_loss(logits_RE, real_R)) == pytest.approx(expected)
    probs_RE, _, expert_RJ = moe.route(logits_RE, 1)
    probs_RE = probs_RE.at[0].set(jnp.asarray([0.6, 0.4]))
    expert_RJ = expert_RJ.at[1].set(1)  # f = (1/2, 1/2), P = (0.55, 0.45)
    assert float(moe.balance_loss(probs_RE, expert_RJ, real_R)) == pytest.approx(1)
    expert_RJ = expert_RJ.at[1].set(0)  # f = (1, 0)
    assert float(moe.balance_loss(probs_RE, expert_RJ, real_R)) == pytest.approx(1.1)


def sown(cfg, params):
    module = Moe(cfg, 'decoder', cfg.num_experts)
    apply = jax.jit(lambda params: module.apply({'params': params}, inputs(), REAL_BT, mutable=['losses'])[1])
    return apply(params).get('losses', {})


def test_losses_are_sown_weighted_and_only_where_they_weigh():
    params = parameters(CFG)
    losses = sown(CFG, params)
    heavy = sown(dataclasses.replace(CFG, balance_weight=0.1, router_z_weight=0.1), params)
    assert set(losses) == {'balance', 'router_z'}
    assert float(heavy['balance'][0]) == pytest.approx(10 * float(losses['balance'][0]))
    assert float(heavy['router_z'][0]) == pytest.approx(100 * float(losses['router_z'][0]))
    assert set(sown(dataclasses.replace(CFG, balance_weight=0.0), params)) == {'router_z'}
    assert sown(dataclasses.replace(CFG, balance_weight=0.0, router_z_weight=0.0), params) == {}


def test_losses_teach_the_router():
    grads = jax.grad(lambda params: sum(jax.tree.leaves(sown(CFG, params))))(parameters(CFG))
    assert np.any(grads.pop('router')['kernel']) and not any(np.any(leaf) for leaf in jax.tree.leaves(grads))


# ------------------------------------------------------------------------------------------------ parameters
@pytest.mark.parametrize(('activation', 'bias'), [('relu', True), ('relu', False), ('swiglu', True)])
def test_parameter_count(activation, bias):
    cfg = dataclasses.replace(CFG, activation=activation, mlp_bias=bias)
    count = sum(leaf.size for leaf in jax.tree.leaves(parameters(cfg)))
    gates = ACTIVATIONS[activation][0]
    assert count == D * E + E * (gates * (D * F + bias * F) + F * D + bias * D)


@pytest.mark.parametrize('initializer', ['xavier', 'lecun'])
def test_each_expert_starts_as_a_layer_of_its_own(initializer):
    """The spread is that of fan-in D or F, whatever the number of experts, and no two experts are alike."""
    cfg = resolve_model(Model(emb_dim=64, mlp_dim=256, num_experts=E, initializer=initializer))
    x_BTD = jnp.zeros((1, 2, 64))
    params = initial(Moe(cfg, 'decoder', cfg.num_experts), x_BTD, jnp.ones((1, 2), bool))
    alone = initial(Mlp(cfg, 'decoder'), x_BTD)
    for name in ('in_0', 'out'):
        for expert in params[name]['kernel']:
            assert float(expert.std()) == pytest.approx(float(alone[name]['kernel'].std()), rel=0.03)
        assert len(np.unique(params[name]['kernel'])) > 0.99 * params[name]['kernel'].size


def test_an_unknown_dispatch_is_refused():
    with pytest.raises(UserError, match=r"model.expert_dispatch='droples' is unknown; did you mean 'dropless'"):
        parameters(dataclasses.replace(CFG, expert_dispatch='droples'))


# ------------------------------------------------------------------------------------------------ execution
def test_the_accelerators_product_equals_the_blocks():
    block, blocks_E = 4, jnp.asarray([1, 3, 0, 2])
    x_PD = jax.random.normal(jax.random.key(0), (6 * block, D))
    kernel_EDF = jax.random.normal(jax.random.key(1), (4, D, F))
    expert_M = jnp.asarray([0, 1, 1, 1, 3, 3])

    def ragged(kernel_EDF, x_PD):
        return moe.ragged_product(x_PD, kernel_EDF, blocks_E, expert_M, block=block)

    def blocked(kernel_EDF, x_PD):
        return moe.blocked_product(x_PD, kernel_EDF, blocks_E, expert_M)

    assert_same(everything(ragged, kernel_EDF, x_PD), everything(blocked, kernel_EDF, x_PD))


def test_dropless_through_the_accelerators_product(monkeypatch):
    monkeypatch.setattr(jax.lax, 'platform_dependent', lambda *args, cpu, default: default(*args))
    params = parameters(BIASED)
    expected = everything(every_expert(BIASED), params, inputs())
    assert_same(everything(layer(BIASED), params, inputs()), expected)


@pytest.mark.parametrize('dispatch', DISPATCHES)
def test_bfloat16_is_finite_and_near_float32(dispatch):
    cfg = dataclasses.replace(CFG, dtype='bfloat16', expert_dispatch=dispatch, expert_capacity=E / 2)
    params = parameters(cfg)
    x_BTD = inputs(jnp.bfloat16)
    actual = everything(layer(cfg), params, x_BTD)
    exact = layer(dataclasses.replace(cfg, dtype='float32'))(params, x_BTD.astype(jnp.float32))
    assert actual['out'].dtype == jnp.bfloat16
    assert all(np.isfinite(leaf.astype(np.float32)).all() for leaf in jax.tree.leaves(actual))
    scale = float(jnp.abs(exact).max())
    np.testing.assert_allclose(actual['out'].astype(np.float32), exact, atol=scale * 2**-6)


def test_dropout_acts_inside_the_experts():
    params, x_BTD = parameters(CFG), inputs()

    @jax.jit
    def run(rate):
        rngs = {'dropout': jax.random.key(5)}
        return Moe(CFG, 'decoder', E).apply({'params': params}, x_BTD, REAL_BT, rate, rngs=rngs)

    np.testing.assert_allclose(run(0.0), layer(CFG)(params, x_BTD), atol=1e-5)
    assert np.any(run(0.5) != run(0.0)) and not np.any(run(0.5)[~REAL_BT])


class Step(nn.Module):
    cfg: Model

    @nn.compact
    def __call__(self, x_BTD, real_BT):
        return x_BTD + Moe(self.cfg, 'decoder', E, name='moe')(x_BTD, real_BT), None


@pytest.mark.slow
@pytest.mark.parametrize('dispatch', DISPATCHES)
def test_layers_scanned_and_rematerialised_equal_layers_in_a_row(dispatch):
    cfg, depth = dataclasses.replace(CFG, expert_dispatch=dispatch), 3
    scanned = nn.scan(
        nn.remat(Step, prevent_cse=False),
        variable_axes={'params': 0, 'losses': 0},
        split_rngs={'params': True},
        metadata_params={nn.PARTITION_NAME: 'layers'},
        in_axes=nn.broadcast,
        length=depth,
    )(cfg)
    params = initial(scanned, inputs(), REAL_BT)

    def scan(params):
        (x_BTD, _), sown = scanned.apply({'params': params}, inputs(), REAL_BT, mutable=['losses'])
        losses = sown['losses']['moe']
        return x_BTD, {name: losses[name][0] for name in losses}

    def loop(params):
        x_BTD, losses = inputs(), []
        for i in range(depth):
            variables = {'params': jax.tree.map(lambda leaf: leaf[i], params)}  # noqa: B023
            (x_BTD, _), sown = Step(cfg).apply(variables, x_BTD, REAL_BT, mutable=['losses'])
            losses.append({name: loss for name, (loss,) in sown['losses']['moe'].items()})
        return x_BTD, jax.tree.map(lambda *leaves: jnp.stack(leaves), *losses)

    def total(run):
        def loss(params):
            x_BTD, losses = run(params)
            return (x_BTD**2).mean() + sum(loss.sum() for loss in losses.values()), (x_BTD, losses)

        return jax.jit(jax.grad(loss, has_aux=True))(params)

    actual = total(scan)
    assert_same(actual, total(loop))
    assert actual[1][1]['balance'].shape == (depth,)


@pytest.mark.slow
@pytest.mark.parametrize('dispatch', DISPATCHES)
@pytest.mark.parametrize('experts_over', [None, 'tensor'])
def test_eight_devices_equal_one(dispatch, experts_over):
    cfg = dataclasses.replace(CFG, num_experts=4, expert_dispatch=dispatch, expert_capacity=0.75)
    mesh = meshes.make_mesh(config.Mesh(data=2, fsdp=2, tensor=2))
    rules = [('experts', experts_over), *sharding.RULES['fsdp_tp']]  # earlier rules take an axis first
    x_BTD = jax.random.normal(jax.random.key(0), (8, T, D))
    real_BT = jnp.asarray(np.arange(T) < np.array([7, 3, 5, 0, 7, 1, 6, 2])[:, None])
    boxed = jax.jit(Moe(cfg, 'decoder', cfg.num_experts).init)(jax.random.key(1), x_BTD, real_BT)['params']

    def loss(params, x_BTD, real_BT):
        out, sown = Moe(cfg, 'decoder', cfg.num_experts).apply({'params': params}, x_BTD, real_BT, mutable=['losses'])
        return (out**2).sum() + sum(jax.tree.leaves(sown)), (out, sown)

    step = jax.grad(loss, has_aux=True)
    expected = jax.jit(step)(sharding.unboxed(boxed), x_BTD, real_BT)
    with jax.set_mesh(mesh), nn.logical_axis_rules(rules):
        params = jax.device_put(sharding.unboxed(boxed), sharding.tree_shardings(boxed, mesh, rules))
        x_BTD, real_BT = jax.device_put((x_BTD, real_BT), meshes.batch_sharding(mesh))
        actual = jax.jit(step)(params, x_BTD, real_BT)
    spec = params['in_0']['kernel'].sharding.spec
    assert spec == PartitionSpec(experts_over, 'fsdp', None if experts_over else 'tensor')
    assert_same(actual, expected)
