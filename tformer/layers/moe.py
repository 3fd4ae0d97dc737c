"""A mixture of feed-forwards: each token goes through its most likely few of E experts (Shazeer et al. 2017).

Shape letters beside the legend's: R token slots of the batch (B T), J experts per token, P places that the experts
compute, C places of each expert.
"""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

from tformer.config import Model
from tformer.errors import choose
from tformer.layers.dropout import Rate, dropout
from tformer.layers.initializers import Initializer, make_initializer, width_factor
from tformer.layers.mlp import ACTIVATIONS
from tformer.sharding import partitioned

Product = Callable[[jax.Array, jax.Array], jax.Array]


# ------------------------------------------------------------------------------------------------ the router
def route(logits_RE: jax.Array, choices: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns probs_RE, and of each token's most likely experts, best first, weight_RJ and number expert_RJ.

    Several weights are scaled to sum to 1 (Jiang et al. 2024, 2.1), so that experts all alike are one feed-forward;
    a single one stays the probability, through which the router learns (Fedus et al. 2022, eq. 2).
    """
    probs_RE = jax.nn.softmax(logits_RE, axis=-1)
    weight_RJ, expert_RJ = jax.lax.top_k(probs_RE, choices)
    if choices > 1:
        weight_RJ /= weight_RJ.sum(-1, keepdims=True)
    return probs_RE, weight_RJ, expert_RJ


def mean(x_R: jax.Array, real_R: jax.Array) -> jax.Array:
    """Returns the mean over real tokens along the first axis, 0 where there are none."""
    counted = real_R.reshape(-1, *[1] * (x_R.ndim - 1))
    return jnp.where(counted, x_R, 0).sum(0) / jnp.maximum(real_R.sum(), 1)


def balance_loss(probs_RE: jax.Array, expert_RJ: jax.Array, real_R: jax.Array) -> jax.Array:
    """Returns E sum_e f_e P_e, f the experts' shares of the choices, P their mean probabilities (Fedus et al. 2022, 4).

    1 where the load is even, E / J where the same J experts take everything. Of one batch, not of its parts: the
    loss over microbatches is not the mean of theirs.
    """
    E = probs_RE.shape[1]
    share_RE = jax.nn.one_hot(expert_RJ, E).mean(axis=1)
    return E * (mean(share_RE, real_R) * mean(probs_RE, real_R)).sum()


def router_z_loss(logits_RE: jax.Array, real_R: jax.Array) -> jax.Array:
    """Returns the mean of the squared log-sum-exp, which keeps logits small (Zoph et al. 2022, eq. 5)."""
    return mean(jax.nn.logsumexp(logits_RE, axis=-1) ** 2, real_R)


# ------------------------------------------------------------------------------------------------ dispatch
class Plan(NamedTuple):
    """Where each choice is computed, and how the experts' kernels apply to the places."""

    place_RJ: jax.Array  # `places` or more: nowhere
    places: int
    expert_P: jax.Array  # whose each place is
    product: Product  # (x_PD, kernel_EDF) -> y_PF, each place by its expert


def queue(expert_RJ: jax.Array, real_R: jax.Array, num_experts: int) -> tuple[jax.Array, jax.Array]:
    """Returns each choice's number in its expert's queue, turn_RJ, and the queues' lengths, size_E.

    First choices stand before second ones, then earlier tokens before later ones; padding does not stand in line.
    """
    R, J = expert_RJ.shape
    chosen_JRE = jax.nn.one_hot(expert_RJ.T, num_experts, dtype=jnp.int32) * real_R[None, :, None]
    chosen_QE = chosen_JRE.reshape(J * R, num_experts)
    turn_Q = ((jnp.cumsum(chosen_QE, axis=0) - 1) * chosen_QE).sum(-1)
    return turn_Q.reshape(J, R).T, chosen_QE.sum(0)


def capacity(expert_RJ: jax.Array, real_R: jax.Array, num_experts: int, factor: float) -> Plan:
    """Every expert has C = factor R J / E places; who finds none is left out (Lepikhin et al. 2021, algorithm 1).

    Who is left out depends on all tokens of the call, other rows and later tokens among them: such a model is not
    causal where places are short, and generates with other places than it was trained with.
    """
    R, J = expert_RJ.shape
    C = min(R, math.ceil(factor * R * J / num_experts))
    places = num_experts * C
    turn_RJ, _ = queue(expert_RJ, real_R, num_experts)
    inside_RJ = real_R[:, None] & (turn_RJ < C)

    def product(x_PD: jax.Array, kernel_EDF: jax.Array) -> jax.Array:
        x_ECD = x_PD.reshape(num_experts, C, -1)
        return jnp.einsum('ECD,EDF->ECF', x_ECD, kernel_EDF).reshape(places, -1)

    expert_P = jnp.repeat(jnp.arange(num_experts), C)
    return Plan(jnp.where(inside_RJ, expert_RJ * C + turn_RJ, places), places, expert_P, product)


def dropless(expert_RJ: jax.Array, real_R: jax.Array, num_experts: int, factor: float) -> Plan:
    """Every choice is computed: the places are sorted by expert (Gale et al. 2023). The capacity factor has no part.

    Each expert's places are rounded up to whole blocks, so that a block has one expert. The best size of a block on
    CPU weighs the rounding, computed in vain, against one copy of a kernel a block, which costs as much as 128 places.
    """
    R, J = expert_RJ.shape
    block = max(1, min(R * J, math.isqrt(128 * R * J // num_experts)))
    used = min(num_experts, R * J)
    blocks = used + (R * J - used) // block  # more cannot be needed
    places = blocks * block
    turn_RJ, size_E = queue(expert_RJ, real_R, num_experts)
    blocks_E = -(-size_E // block)
    blocks_E = blocks_E.at[-1].add(blocks - blocks_E.sum())  # the rest are zeros
    start_E = (jnp.cumsum(blocks_E) - blocks_E) * block
    expert_M = jnp.repeat(jnp.arange(num_experts), blocks_E, total_repeat_length=blocks)

    def product(x_PD: jax.Array, kernel_EDF: jax.Array) -> jax.Array:
        ragged = functools.partial(ragged_product, block=block)
        return jax.lax.platform_dependent(x_PD, kernel_EDF, blocks_E, expert_M, cpu=blocked_product, default=ragged)

    place_RJ = jnp.where(real_R[:, None], start_E[expert_RJ] + turn_RJ, places)
    return Plan(place_RJ, places, jnp.repeat(expert_M, block), product)


def ragged_product(
    x_PD: jax.Array, kernel_EDF: jax.Array, blocks_E: jax.Array, expert_M: jax.Array, *, block: int
) -> jax.Array:
    """Returns y_PF by the accelerator's own grouped product. On CPU that computes every place by every expert."""
    return jax.lax.ragged_dot(x_PD, kernel_EDF, blocks_E * block, preferred_element_type=x_PD.dtype)


@jax.checkpoint  # the backward pass copies the kernels again
def blocked_product(x_PD: jax.Array, kernel_EDF: jax.Array, blocks_E: jax.Array, expert_M: jax.Array) -> jax.Array:
    """Returns y_PF as one batched product of the M blocks, each with a copy of its expert's kernel."""
    x_MRD = x_PD.reshape(expert_M.size, -1, x_PD.shape[1])
    return jnp.einsum('MRD,MDF->MRF', x_MRD, kernel_EDF[expert_M]).reshape(x_PD.shape[0], -1)


# ------------------------------------------------------------------------------------------------ the layer
def _each(init: Initializer) -> Initializer:
    """Returns the initializer of [D, F] kernels for [E, D, F] ones too: each expert's is drawn as if it were alone."""

    def draw(key: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
        if len(shape) == 2:
            return init(key, shape, dtype)
        return jax.vmap(lambda key: init(key, shape[1:], dtype))(jax.random.split(key, shape[0]))

    return draw


class Weights(nn.Module):
    """Owns a kernel [..., in, out] and its bias [..., out]."""

    cfg: Model
    shape: tuple[int, ...]
    names: tuple[str, ...]
    bias: bool = False
    role: str = 'dense'  # of layers.initializers.Parameter
    stack: str = ''

    @nn.compact
    def __call__(self) -> tuple[jax.Array, jax.Array | None]:
        dtype = jnp.dtype(self.cfg.param_dtype)
        fan_in, fan_out = self.shape[-2:]
        init = _each(make_initializer(self.cfg, self.role, fan_in, fan_out, self.stack))
        kernel = self.param('kernel', partitioned(init, *self.names), self.shape, dtype)
        if not self.bias:
            return kernel, None
        zeros = partitioned(nn.initializers.zeros, *self.names[:-2], self.names[-1])
        return kernel, self.param('bias', zeros, (*self.shape[:-2], self.shape[-1]), dtype)


class Moe(nn.Module):
    """The experts, each as `Mlp`, and their router, in float32. Stands where `Mlp` stands.

    Sows its weighted losses into the collection 'losses': `balance` and `router_z`. Over microbatches neither the
    balance loss nor the dispatch by capacity is what it is over the whole batch.
    """

    cfg: Model
    stack: str

    @nn.compact
    def __call__(self, x_BTD: jax.Array, real_BT: jax.Array, dropout_rate: Rate = None) -> jax.Array:
        """Returns the experts' weighted sums, [B, T, D]; 0 at padding, where real_BT is False."""
        cfg = self.cfg
        assert cfg.num_experts
        x_RD, real_R = x_BTD.reshape(-1, cfg.emb_dim), real_BT.reshape(-1)
        shape, names = (cfg.emb_dim, cfg.num_experts), ('embed', 'experts')
        router_DE, _ = Weights(cfg, shape, names, role='output', name='router')()
        x32_RD, router_DE = x_RD.astype(jnp.float32) / width_factor(cfg), router_DE.astype(jnp.float32)
        logits_RE = jnp.matmul(x32_RD, router_DE, precision=jax.lax.Precision.HIGHEST)
        probs_RE, weight_RJ, expert_RJ = route(logits_RE, cfg.experts_per_token)
        if cfg.balance_weight:
            self.sow('losses', 'balance', cfg.balance_weight * balance_loss(probs_RE, expert_RJ, real_R))
        if cfg.router_z_weight:
            self.sow('losses', 'router_z', cfg.router_z_weight * router_z_loss(logits_RE, real_R))

        dispatch = choose(DISPATCHES, cfg.expert_dispatch, 'model.expert_dispatch')
        plan = dispatch(expert_RJ, real_R, cfg.num_experts, cfg.expert_capacity)
        x_RJD = jnp.broadcast_to(x_RD[:, None], (*expert_RJ.shape, cfg.emb_dim)).astype(cfg.dtype)
        x_PD = jnp.zeros((plan.places, cfg.emb_dim), cfg.dtype).at[plan.place_RJ].add(x_RJD, mode='drop')
        y_PD = self.feed_forward(x_PD, plan, dropout_rate)
        y_RJD = y_PD.at[plan.place_RJ].get(mode='fill', fill_value=0)
        y_RD = (y_RJD.astype(jnp.float32) * weight_RJ[..., None]).sum(1)
        return y_RD.astype(cfg.dtype).reshape(x_BTD.shape)

    def feed_forward(self, x_PD: jax.Array, plan: Plan, dropout_rate: Rate) -> jax.Array:
        """Returns y_PD: each place through its expert."""
        cfg = self.cfg
        assert cfg.num_experts
        inputs, activation = choose(ACTIVATIONS, cfg.activation, 'model.activation')
        E, D, F = cfg.num_experts, cfg.emb_dim, cfg.mlp_dim

        def project(x: jax.Array, name: str, role: str, shape: tuple[int, ...], names: tuple[str, ...]) -> jax.Array:
            axes = ('experts', *names)
            kernel, bias = Weights(cfg, (E, *shape), axes, cfg.mlp_bias, role, self.stack, name=name)()
            y = plan.product(x, kernel.astype(cfg.dtype))
            return y if bias is None else y + bias.astype(cfg.dtype)[plan.expert_P]

        h_PF = activation(*[project(x_PD, f'in_{i}', 'mlp_in', (D, F), ('embed', 'mlp')) for i in range(inputs)])
        if self.has_rng('dropout') and dropout_rate is not None:
            h_PF = dropout(h_PF, dropout_rate, self.make_rng('dropout'))
        return project(h_PF, 'out', 'mlp_out', (F, D), ('mlp', 'embed'))


DISPATCHES: dict[str, Callable[[jax.Array, jax.Array, int, float], Plan]] = {
    'dropless': dropless,
    'capacity': capacity,
}
