"""A mixture of feed-forwards: each token goes through its most likely few of E experts (Shazeer et al. 2017).

Shape letters beside model.py's: R = B T tokens (the router takes either), J experts per token, P slots that the experts
compute, C slots of each expert (its capacity), M blocks of slots.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

from tformer.distributed.sharding import platform
from tformer.errors import choose
from tformer.layers import grouped_products
from tformer.layers.dropout import MaybeScalar, dropout
from tformer.layers.grouped_blocks import Blocks, Options
from tformer.layers.initializers import Initializer, make_initializer
from tformer.layers.linear import Kernel
from tformer.layers.mlp import ACTIVATIONS, Activation
from tformer.layers.parallel import expert_exchange
from tformer.layers.parallel.expert_exchange import EXPERT, Dispatch, DispatchFn, DropoutDraw, Exchange, Kernels, Tokens
from tformer.layers.parametrization import width_factor
from tformer.layers.resolved import ResolvedModel


# ------------------------------------------------------------------------------------------------ the router
def route(logits_RE: jax.Array, choices: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns probs_RE, and the weight_RJ and number expert_RJ of each token's most likely experts, best first.

    Several weights are scaled to sum to 1 (Jiang et al. 2024, 2.1), so that identical experts equal one feed-forward. A
    single weight stays the probability, through which the router learns (Fedus et al. 2022, eq. 2).
    """
    probs_RE = jax.nn.softmax(logits_RE, axis=-1)
    weight_RJ, expert_RJ = largest(probs_RE, choices)
    if choices > 1:
        weight_RJ /= weight_RJ.sum(-1, keepdims=True)
    return probs_RE, weight_RJ, expert_RJ


def largest(probs_RE: jax.Array, choices: int) -> tuple[jax.Array, jax.Array]:
    """Returns the largest probabilities and their indices, as `jax.lax.top_k`, for which XLA gathers the batch."""
    left_RE, found = probs_RE, []
    for _ in range(choices):
        expert_R = jnp.argmax(left_RE, axis=-1)
        chosen_RE = jax.nn.one_hot(expert_R, probs_RE.shape[-1], dtype=bool)
        left_RE = jnp.where(chosen_RE, -1, left_RE)
        found.append((jnp.where(chosen_RE, probs_RE, 0).sum(-1), expert_R))
    weights, experts = zip(*found, strict=True)
    return jnp.stack(weights, -1), jnp.stack(experts, -1)


def mean(x_R: jax.Array, real_R: jax.Array) -> jax.Array:
    """Returns the mean over real tokens along their axes, the leading ones; 0 where there are none."""
    counted = real_R.reshape(*real_R.shape, *[1] * (x_R.ndim - real_R.ndim))
    return jnp.where(counted, x_R, 0).sum(range(real_R.ndim)) / jnp.maximum(real_R.sum(), 1)


def balance_loss(probs_RE: jax.Array, expert_RJ: jax.Array, real_R: jax.Array) -> jax.Array:
    """Returns E sum_e f_e P_e, f the experts' shares of the choices, P their mean probabilities (Fedus et al. 2022, 4).

    It is 1 where the load is even and E / J where the same J experts take every token. It is a loss of one layer, and
    the layers' losses are added. (The hub's Mixtral takes f and P over the tokens of all layers at once.) It is also a
    loss of the whole batch: the mean over microbatches differs.
    """
    E = probs_RE.shape[-1]
    share_RE = jax.nn.one_hot(expert_RJ, E).mean(axis=-2)
    return E * (mean(share_RE, real_R) * mean(probs_RE, real_R)).sum()


def router_z_loss(logits_RE: jax.Array, real_R: jax.Array) -> jax.Array:
    """Returns the mean of the squared log-sum-exp, which keeps the logits small (Zoph et al. 2022, eq. 5)."""
    return mean(jax.nn.logsumexp(logits_RE, axis=-1) ** 2, real_R)


# ------------------------------------------------------------------------------------------------ dispatch
def position_in_expert(expert_RJ: jax.Array, real_R: jax.Array, num_experts: int) -> tuple[jax.Array, jax.Array]:
    """Returns the position of each choice among those of its expert, position_RJ, and their number, size_E.

    First choices come before second ones, then earlier tokens before later ones. Padding, and tokens routed to experts
    on other devices, take no position.
    """
    R, J = expert_RJ.shape
    chosen_JRE = jax.nn.one_hot(expert_RJ.T, num_experts, dtype=jnp.int32) * real_R[None, :, None]
    chosen_QE = chosen_JRE.reshape(J * R, num_experts)
    position_Q = ((jnp.cumsum(chosen_QE, axis=0) - 1) * chosen_QE).sum(-1)
    return position_Q.reshape(J, R).T, chosen_QE.sum(0)


def reference(expert_RJ: jax.Array, real_R: jax.Array, num_experts: int, factor: float, ways: int = 1) -> Dispatch:
    """The definition, written down: every expert has a slot for every token, and computes them all."""
    R, num_slots = len(real_R), num_experts * len(real_R)

    def product(x_PD: jax.Array, kernel_EDF: jax.Array) -> jax.Array:
        x_ERD = x_PD.reshape(num_experts, R, -1)
        return jnp.einsum('ERD,EDF->ERF', x_ERD, kernel_EDF).reshape(num_slots, -1)

    here_RJ = real_R[:, None] & (expert_RJ < num_experts)
    slot_RJ = jnp.where(here_RJ, expert_RJ * R + jnp.arange(R)[:, None], num_slots)
    return Dispatch(slot_RJ, num_slots, jnp.repeat(jnp.arange(num_experts), R), product)


def capacity(expert_RJ: jax.Array, real_R: jax.Array, num_experts: int, factor: float) -> Dispatch:
    """Every expert has C slots; choices beyond them are dropped (Lepikhin et al. 2021, algorithm 1).

    C is factor R J / E, rounded up, and at most R. R counts padding too, which takes no slot.
    Which choices are dropped depends on all tokens of the call, including other rows and later tokens. Such a model is
    not causal where slots are short, and generates with other slots than it was trained with. Where devices share the
    experts (mesh.expert), each device drops among its own tokens, so that the result differs from that on one device.
    """
    R, J = expert_RJ.shape
    C = min(R, math.ceil(factor * R * J / num_experts))
    num_slots = num_experts * C
    position_RJ, _ = position_in_expert(expert_RJ, real_R, num_experts)
    inside_RJ = real_R[:, None] & (position_RJ < C)

    def product(x_PD: jax.Array, kernel_EDF: jax.Array) -> jax.Array:
        x_ECD = x_PD.reshape(kernel_EDF.shape[0], -1, x_PD.shape[1])
        return jnp.einsum('ECD,EDF->ECF', x_ECD, kernel_EDF).reshape(num_slots, -1)

    expert_P = jnp.repeat(jnp.arange(num_experts), C)
    return Dispatch(jnp.where(inside_RJ, expert_RJ * C + position_RJ, num_slots), num_slots, expert_P, product)


def dropless(expert_RJ: jax.Array, real_R: jax.Array, num_experts: int, factor: float, ways: int = 1) -> Dispatch:
    """Every choice is computed: the slots are sorted by expert (Gale et al. 2023). The capacity factor is not used.

    Each expert's slots are rounded up to whole blocks, so that a block has one expert. On CPU the size of a block
    balances the slots wasted by rounding against one copy of a kernel per block, which costs as much as 128 slots.
    """
    R, J = expert_RJ.shape
    if platform() == 'cpu':
        block = max(1, min(R * J, math.isqrt(128 * R * J // num_experts)))
    else:
        block = grouped_products.block_size(R * J // ways, num_experts)
    most = R * min(J, num_experts)  # choices of these experts
    used = min(num_experts, most)
    blocks = used + (most - used) // block  # more cannot be needed
    num_slots = blocks * block
    position_RJ, size_E = position_in_expert(expert_RJ, real_R, num_experts)
    needed_E = -(-size_E // block)
    blocks_E = needed_E.at[-1].add(blocks - needed_E.sum())  # the rest are zeros
    end_E = jnp.cumsum(blocks_E)
    start_E = (end_E - blocks_E) * block
    expert_M = (jnp.arange(blocks)[:, None] >= end_E[None]).sum(-1)

    def product(x_PD: jax.Array, kernel_EDF: jax.Array) -> jax.Array:
        if grouped_products.serves(platform(), x_PD, kernel_EDF):
            options = Options(platform(), R * J // ways)
            return grouped_products.grouped_product(options, x_PD, kernel_EDF, Blocks(expert_M, needed_E))
        ragged = functools.partial(ragged_product, block=block)
        return jax.lax.platform_dependent(x_PD, kernel_EDF, blocks_E, expert_M, cpu=blocked_product, default=ragged)

    here_RJ = real_R[:, None] & (expert_RJ < num_experts)
    slot_RJ = jnp.where(here_RJ, start_E[expert_RJ] + position_RJ, num_slots)
    return Dispatch(slot_RJ, num_slots, jnp.repeat(expert_M, block), product)


def ragged_product(
    x_PD: jax.Array, kernel_EDF: jax.Array, blocks_E: jax.Array, expert_M: jax.Array, *, block: int
) -> jax.Array:
    """Returns y_PF by the accelerator's grouped matrix product, which on CPU computes every slot by every expert."""
    return jax.lax.ragged_dot(x_PD, kernel_EDF, blocks_E * block, preferred_element_type=x_PD.dtype)


@jax.checkpoint  # the backward pass copies the kernels again
def blocked_product(x_PD: jax.Array, kernel_EDF: jax.Array, blocks_E: jax.Array, expert_M: jax.Array) -> jax.Array:
    """Returns y_PF as one batched product of M blocks, each with a copy of its expert's kernel."""
    x_MRD = x_PD.reshape(expert_M.size, -1, x_PD.shape[1])
    return jnp.einsum('MRD,MDF->MRF', x_MRD, kernel_EDF[expert_M]).reshape(x_PD.shape[0], -1)


# ------------------------------------------------------------------------------------------------ the layer
def _each(init: Initializer) -> Initializer:
    """Returns an initializer of [E, D, F] kernels that draws each expert's kernel on its own."""

    def draw(key: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
        return jax.vmap(lambda key: init(key, shape[1:], dtype))(jax.random.split(key, shape[0]))

    return draw


def feed_forward(
    x_PD: jax.Array,
    dispatch: Dispatch,
    *,
    kernels: Kernels,
    activation: Activation,
    dropout_draw: DropoutDraw,
    columns: tuple[str, ...],
    inner: tuple[str, ...],
) -> jax.Array:
    """Returns y_PD: each token x_PD in its slot through the slot's expert.

    `columns` and `inner` are the mesh axes that split F and D, where the kernels are a device's own part of the
    experts.
    """

    def project(x: jax.Array, name: str) -> jax.Array:
        kernel, bias = kernels[name]
        y = dispatch.product(x, kernel)
        if name != 'out' and inner:
            y = jax.lax.psum(y, inner)
        if bias is None:
            return y
        if name == 'out' and columns:  # whose parts are summed
            bias = jnp.where(jax.lax.axis_index(columns) == 0, bias, 0)
        return y + bias.astype(jnp.float32)[dispatch.expert_P].astype(y.dtype)  # its gradient: a sum in float32

    h_PF = activation(*[project(x_PD, name) for name in kernels if name != 'out'])
    return project(h_PF if dropout_draw is None else dropout(h_PF, *dropout_draw), 'out')


class Moe(nn.Module):
    """The experts, each like `Mlp`, and their router, in float32. Takes the place of `Mlp` in a block.

    Sows its weighted losses into the collection 'losses': `balance` and `router_z`. Over microbatches the balance loss
    and the dispatch by capacity differ from those over the whole batch.
    """

    cfg: ResolvedModel
    stack: str
    num_experts: int

    @nn.compact
    def __call__(self, x_BTD: jax.Array, real_BT: jax.Array, dropout_rate: MaybeScalar = None) -> jax.Array:
        """Returns the weighted sums of the experts' outputs, [B, T, D]; 0 at padding, where real_BT is False."""
        cfg, D, E = self.cfg, self.cfg.emb_dim, self.num_experts
        init = make_initializer(cfg, 'output', D, E)
        router_DE, bias_E = Kernel(cfg, (D, E), ('embed', 'experts'), init, cfg.router_bias, name='router')()
        x32_BTD, router_DE = x_BTD.astype(jnp.float32) / width_factor(cfg), router_DE.astype(jnp.float32)
        logits_BTE = jnp.matmul(x32_BTD, router_DE, precision=jax.lax.Precision.HIGHEST)
        if bias_E is not None:
            logits_BTE += bias_E.astype(jnp.float32)[None, None]
        probs_BTE, weight_BTJ, expert_BTJ = route(logits_BTE, cfg.experts_per_token)
        if cfg.balance_weight:
            self.sow('losses', 'balance', cfg.balance_weight * balance_loss(probs_BTE, expert_BTJ, real_BT))
        if cfg.router_z_weight:
            self.sow('losses', 'router_z', cfg.router_z_weight * router_z_loss(logits_BTE, real_BT))

        method = choose(DISPATCHES, cfg.expert_dispatch, 'model.expert_dispatch')
        dispatch_fn = functools.partial(method.dispatch_fn, factor=cfg.expert_capacity)
        activation = choose(ACTIVATIONS, cfg.activation, 'model.activation')[1]

        def mixture(
            exchange: Exchange,
            kernels: Kernels,
            tokens: Tokens,
            dropout_draw: DropoutDraw,
            columns: tuple[str, ...] = (),
            inner: tuple[str, ...] = (),
        ) -> jax.Array:
            expert_fn = functools.partial(
                feed_forward,
                kernels=kernels,
                activation=activation,
                dropout_draw=dropout_draw,
                columns=columns,
                inner=inner,
            )
            y_RD = exchange(jax.tree.map(expert_exchange.flat, tokens), dispatch_fn, E, expert_fn)
            return y_RD.reshape(tokens.x_RD.shape).astype(cfg.dtype)

        dropout_draw = None
        if self.has_rng('dropout') and dropout_rate is not None:
            dropout_draw = dropout_rate, self.make_rng('dropout')
        arguments = self.kernels(), Tokens(x_BTD.astype(cfg.dtype), weight_BTJ, expert_BTJ, real_BT), dropout_draw
        split, exchange = expert_exchange.split_over('experts', E), None
        if split == (EXPERT,):
            exchange = method.shared
        elif not split and jax.sharding.get_abstract_mesh().size > 1:
            exchange = method.replicated
        if exchange is not None:
            return expert_exchange.over_devices(functools.partial(mixture, exchange), *arguments)
        return mixture(expert_exchange.local, *arguments)

    def kernels(self) -> Kernels:
        """Returns the experts' kernels and biases, in the activations' dtype."""
        cfg, E, D, F = self.cfg, self.num_experts, self.cfg.emb_dim, self.cfg.mlp_dim

        def kernel(name: str, role: str, shape: tuple[int, ...], names: tuple[str, ...]) -> Any:
            init = _each(make_initializer(cfg, role, shape[1], shape[2], self.stack))
            return Kernel(cfg, shape, names, init, cfg.mlp_bias, name=name)()

        count = choose(ACTIVATIONS, cfg.activation, 'model.activation')[0]
        kernels = {f'in_{i}': kernel(f'in_{i}', 'mlp_in', (E, D, F), expert_exchange.NAMES) for i in range(count)}
        kernels['out'] = kernel('out', 'mlp_out', (E, F, D), ('experts', 'mlp', 'embed'))
        return jax.tree.map(lambda x: x.astype(cfg.dtype), kernels)


class DispatchMethod(NamedTuple):
    """How tokens reach their experts."""

    dispatch_fn: DispatchFn  # assigns the slots
    shared: Exchange  # exchanges tokens between devices that share the experts
    # on devices that have all experts, or columns of them, and their own tokens; None: one dispatch, left to XLA
    replicated: Exchange | None
    fields: tuple[str, ...] = ()  # the fields of `Model` that it reads and others do not
    whole_batch: bool = False  # what a token gets depends on the other tokens of the batch


DISPATCHES = {
    'dropless': DispatchMethod(dropless, expert_exchange.gathered, expert_exchange.local),
    'capacity': DispatchMethod(capacity, expert_exchange.grouped, None, ('expert_capacity',), whole_batch=True),
    'reference': DispatchMethod(reference, expert_exchange.gathered, expert_exchange.local),
}
