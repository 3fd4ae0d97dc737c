"""Recurrent cells, and how one reads rows.

The gates of a token are sums of what it says, its input times a kernel, and of what the state says, the hidden vector
times another. The first product is one of all tokens, before the rows are read; so is the gradient of the second
kernel, after they were read backwards. Only the hidden vector's product is left to each token (Appleyard et al. 2016).

Shapes: B batch, T length, D width of the inputs, G gates, U units of the state. A state is an array [B, U], or for an
LSTM a pair of them (cell, hidden).
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

from tformer.distributed import sharding
from tformer.layers.initializers import Initializer
from tformer.layers.linear import Kernel
from tformer.layers.parallel.each_device import free_axes, split, splits, ways
from tformer.layers.parallel.few_tokens import STEP, travel
from tformer.layers.products import einsum
from tformer.layers.resolved import ResolvedModel

State = Any  # an array, or a tuple of them, of which the last is the hidden vector
NAMES = ('embed', None, 'cell')  # of the axes of stacked kernels


class Cell(NamedTuple):
    """A recurrent cell. Parameters of its gates are i{gate} for the input and h{gate} for the hidden vector."""

    update: Callable[[State, jax.Array, jax.Array], State]  # from (state, inputs_BGU, hiddens_BGU)
    gates: tuple[str, ...]
    input_biases: tuple[str, ...] = ()  # gates whose inputs have a bias
    hidden_biases: tuple[str, ...] = ()
    memory: bool = False  # whether a state has a cell besides the hidden vector

    def zeros(self, rows: int, units: int, dtype: Any) -> State:
        """Returns the state before the first token."""
        zeros = jnp.zeros((rows, units), dtype)
        return (zeros, zeros) if self.memory else zeros


class Kernels(NamedTuple):
    """The parameters of a cell, in the activations' dtype."""

    inputs_DGU: jax.Array
    input_bias_GU: jax.Array | None
    hiddens_UGU: jax.Array
    hidden_bias_GU: jax.Array | None


class CellKernels(nn.Module):
    """Owns the parameters of a cell, one kernel for each gate."""

    cfg: ResolvedModel
    cell: Cell
    inputs: int
    units: int
    initializer: Initializer

    @nn.compact
    def __call__(self) -> Kernels:
        inputs = self.stacked('i', self.inputs, self.initializer, self.cell.input_biases)
        return Kernels(*inputs, *self.stacked('h', self.units, orthogonal, self.cell.hidden_biases))

    def stacked(
        self, side: str, width: int, initializer: Initializer, biased: tuple[str, ...]
    ) -> tuple[jax.Array, jax.Array | None]:
        """Returns the kernels of all gates of one side, and their biases, in the activations' dtype."""
        shape, names, dtype = (width, self.units), ('embed', 'cell'), jnp.dtype(self.cfg.dtype)
        kernels, biases = zip(
            *(
                Kernel(self.cfg, shape, names, initializer, gate in biased, name=side + gate)()
                for gate in self.cell.gates
            ),
            strict=True,
        )
        zeros = jnp.zeros(self.units, self.cfg.param_dtype)
        both = jnp.stack([zeros if bias is None else bias for bias in biases]).astype(dtype) if biased else None
        return jnp.stack(kernels, 1).astype(dtype), both


def orthogonal(key: jax.Array, shape: tuple[int, ...], dtype: jax.typing.DTypeLike) -> jax.Array:
    """Flax's orthogonal initializer, computed in float32."""
    return nn.initializers.orthogonal()(key, shape, jnp.float32).astype(dtype)


def read(
    cell: Cell,
    kernels: Kernels,
    state: State,
    x_BTD: jax.Array,
    real_BT: jax.Array,
    segments_BT: jax.Array | None = None,
    *,
    backwards: bool = False,
) -> tuple[State, jax.Array]:
    """Runs a cell over rows. Returns (the state after the last real token, the outputs y_BTU, 0 at padding).

    Args:
      cell: the cell.
      kernels: its parameters.
      state: before the first token.
      x_BTD: inputs.
      real_BT: False at padding, which does not change the state.
      segments_BT: with packing, the example that each token belongs to; a new example starts from a zero state.
      backwards: from the last token to the first.
    """
    begins_TB = None
    if segments_BT is not None:
        changes_BT = segments_BT[:, 1:] != segments_BT[:, :-1]
        begins_TB = jnp.pad(changes_BT, [(0, 0), (0, 1) if backwards else (1, 0)]).T
    few = x_BTD.shape[1] <= STEP
    if not few:  # each device reads rows of its own, as few as the mesh makes them
        x_BTD, state = own_rows(x_BTD), jax.tree.map(own_rows, state)
    inputs_TBGU = times('BTD,DGU->TBGU', x_BTD.astype(kernels.inputs_DGU.dtype), kernels.inputs_DGU, few)
    if kernels.input_bias_GU is not None:
        wide_GU = kernels.input_bias_GU.astype(jnp.float32)  # so that its gradient, a sum, is one in float32
        inputs_TBGU += jnp.broadcast_to(wide_GU, inputs_TBGU.shape).astype(inputs_TBGU.dtype)
    tokens = inputs_TBGU, jnp.asarray(real_BT).T, begins_TB
    parameters = kernels.hiddens_UGU, kernels.hidden_bias_GU
    state, y_TBU = recur(Reading(cell.update, backwards, few), parameters, state, tokens)
    return state, jnp.moveaxis(y_TBU, 0, 1)


class Reading(NamedTuple):
    """How rows are read."""

    update: Callable[[State, jax.Array, jax.Array], State]  # that of the cell
    backwards: bool
    few: bool  # tokens, of a step of decoding, for which no kernel is gathered


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def recur(reading: Reading, parameters: Any, state: State, tokens: Any) -> tuple[State, jax.Array]:
    """Returns (the last state, y_TBU).

    Args:
      reading: how rows are read.
      parameters: the hidden vector's kernel_UGU and bias_GU, which may be None.
      state: before the first token.
      tokens: what inputs add to the gates, inputs_TBGU; real_TB; and begins_TB, True where an example begins, or None.
    """
    return _forward(reading, parameters, state, tokens)[0]


def _forward(reading: Reading, parameters: Any, state: State, tokens: Any) -> tuple[tuple[State, jax.Array], Any]:
    kernel_UGU, bias_GU = parameters
    kernel = kernel_UGU if reading.few else whole(kernel_UGU)

    def step(state: State, token: Any) -> tuple[State, Any]:
        inputs_BGU, real_B, begins_B = token
        if begins_B is not None:
            state = where(begins_B, zeros_like(state), state)
        hiddens_BGU = times('BU,UGV->BGV', hidden(state), kernel, reading.few)
        if bias_GU is not None:
            hiddens_BGU += bias_GU[None]
        new = reading.update(state, inputs_BGU, hiddens_BGU)
        y_BU = where(real_B, hidden(new), jnp.zeros_like(hidden(new)))
        return where(real_B, new, state), (y_BU, state, hiddens_BGU)

    last, (y_TBU, *before) = jax.lax.scan(step, state, tokens, reverse=reading.backwards)
    return (last, y_TBU), (parameters, (*before, *tokens))


def _backward(reading: Reading, kept: Any, given: tuple[State, jax.Array]) -> tuple[Any, ...]:
    (kernel_UGU, bias_GU), tokens = kept
    (dlast, dy_TBU), kernel = given, kernel_UGU if reading.few else whole(kernel_UGU)

    def step(dstate: State, token: Any) -> tuple[State, Any]:
        dy_BU, state, hiddens_BGU, inputs_BGU, real_B, begins_B = token
        dnew = where(real_B, with_hidden(dstate, dy_BU), zeros_like(dstate))
        dold, dinputs_BGU, dhiddens_BGU = jax.vjp(reading.update, state, inputs_BGU, hiddens_BGU)[1](dnew)
        dold = with_hidden(dold, times('BGV,UGV->BU', dhiddens_BGU, kernel, few=False))
        dstate = jax.tree.map(jnp.add, dold, where(real_B, zeros_like(dstate), dstate))
        if begins_B is not None:
            dstate = where(begins_B, zeros_like(dstate), dstate)
        return dstate, (dinputs_BGU, dhiddens_BGU)

    tokens = dy_TBU, *tokens
    dstate, (dinputs_TBGU, dhiddens_TBGU) = jax.lax.scan(step, dlast, tokens, reverse=not reading.backwards)
    dkernel = jnp.einsum('TBU,TBGV->UGV', hidden(tokens[1]), dhiddens_TBGU)
    dbias = None if bias_GU is None else jnp.sum(dhiddens_TBGU, (0, 1), dtype=jnp.float32).astype(bias_GU.dtype)
    return (dkernel, dbias), dstate, (dinputs_TBGU, None, None)


recur.defvjp(_forward, _backward)


# -------------------------------------------------------------------------------------------------------------- states


def hidden(state: State) -> jax.Array:
    """Returns the hidden vector of a state, which is the output."""
    return jax.tree.leaves(state)[-1]


def with_hidden(state: State, x_BU: jax.Array) -> State:
    """Returns a state with x_BU added to the hidden vector."""
    *cell, hidden = jax.tree.leaves(state)
    return jax.tree.unflatten(jax.tree.structure(state), [*cell, hidden + x_BU])


def where(condition_B: jax.Array, new: State, old: State) -> State:
    """Returns for each row one of two states."""
    return jax.tree.map(lambda a, b: jnp.where(condition_B[:, None], a, b), new, old)


def zeros_like(state: State) -> State:
    """Returns a state of zeros."""
    return jax.tree.map(jnp.zeros_like, state)


# -------------------------------------------------------------------------------------------------------------- meshes


def times(equation: str, x: jax.Array, kernel: jax.Array, few: bool) -> jax.Array:
    """Returns the product of x with a stacked kernel, to whose parts `few` tokens travel."""
    inputs, rest = equation.split(',')
    there = travel(equation, x, kernel.shape, NAMES) if few else None
    if there is None:
        return einsum(equation, x.dtype, x, kernel)
    y = einsum(equation, x.dtype, there.to_kernel(x, inputs), kernel)
    return there.back(y, rest.split('->')[1])


def own_rows(x: jax.Array) -> jax.Array:
    """Returns an array [B, ...] whose rows are split over all axes of the mesh that divide them."""
    mesh, rows = jax.sharding.get_abstract_mesh(), len(x)
    axes = split('batch', rows) if splits() else None
    if axes is None:
        return x
    for other in mesh.axis_names:
        if other in free_axes() and other not in axes and rows % ways((*axes, other)) == 0:
            axes += (other,)
    return sharding.divided(x, [axes])


def whole(kernel: jax.Array) -> jax.Array:
    """Returns a kernel that every device has all of, gathered once and not for each token."""
    return sharding.divided(kernel, [()] * kernel.ndim) if splits() else kernel


# --------------------------------------------------------------------------------------------------------------- cells


def simple(h_BU: State, inputs_B1U: jax.Array, hiddens_B1U: jax.Array) -> State:
    """h' = tanh(W x + U h + b) (Elman 1990)."""
    return jnp.tanh(inputs_B1U[:, 0] + hiddens_B1U[:, 0])


def lstm(state: State, inputs_BGU: jax.Array, hiddens_BGU: jax.Array) -> State:
    """Hochreiter & Schmidhuber 1997, with the forget gate of Gers et al. 2000."""
    i_BU, f_BU, g_BU, o_BU = jnp.moveaxis(hiddens_BGU + inputs_BGU, 1, 0)
    cell_BU = nn.sigmoid(f_BU) * state[0] + nn.sigmoid(i_BU) * jnp.tanh(g_BU)
    return cell_BU, nn.sigmoid(o_BU) * jnp.tanh(cell_BU)


def gru(h_BU: State, inputs_BGU: jax.Array, hiddens_BGU: jax.Array) -> State:
    """Cho et al. 2014, section 2.3; the reset gate is on U h + b, not on h."""
    r_BU, z_BU = jnp.moveaxis(nn.sigmoid(inputs_BGU[:, :2] + hiddens_BGU[:, :2]), 1, 0)
    n_BU = jnp.tanh(inputs_BGU[:, 2] + r_BU * hiddens_BGU[:, 2])
    return (1.0 - z_BU) * n_BU + z_BU * h_BU


CELLS: dict[str, Cell] = {
    'rnn': Cell(simple, ('',), input_biases=('',)),
    'lstm': Cell(lstm, tuple('ifgo'), hidden_biases=tuple('ifgo'), memory=True),
    'gru': Cell(gru, tuple('rzn'), input_biases=tuple('rzn'), hidden_biases=('n',)),
}
