"""The position-wise feed-forward: out(activation(in(x))), or gated."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import linen as nn

from tformer.distributed.sharding import constrain, platform
from tformer.errors import choose
from tformer.layers.dropout import MaybeScalar, drop
from tformer.layers.linear import Dense
from tformer.layers.resolved import ResolvedModel

Activation = Callable[..., jax.Array]


def _differentiated(function: Activation, factor: float) -> Activation:
    """Returns an error function with its derivative, factor exp(-x^2): jax's own fails in `shard_map` of jax 0.12."""
    function = jax.custom_jvp(function)

    @function.defjvp
    def _(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
        (x,), (dx,) = primals, tangents
        return function(x), jnp.asarray(factor, x.dtype) * (dx * jnp.exp(-jnp.square(x)))

    return function


_erf = _differentiated(jax.lax.erf, 2 / math.sqrt(math.pi))
_erfc = _differentiated(jax.lax.erfc, -2 / math.sqrt(math.pi))


@jax.custom_vjp
def _gradient_rounded(x: jax.Array) -> jax.Array:
    """Returns x. On a GPU its gradient is written in x's type before anything reads it: XLA would write it in float32,
    too, for a sum in float32."""
    return x


def _gradient_rounded_backward(_: None, dx: jax.Array) -> tuple[jax.Array]:
    return (jax.lax.optimization_barrier(dx) if platform() == 'gpu' else dx,)


_gradient_rounded.defvjp(lambda x: (x, None), _gradient_rounded_backward)


def gelu(x: jax.Array) -> jax.Array:
    """x Phi(x), exactly (Hendrycks & Gimpel 2016)."""
    if _is_narrow(x):
        wide = _gradient_rounded(x).astype(jnp.float32)
        return (0.5 * wide * (1 + _erf(wide * math.sqrt(0.5)))).astype(x.dtype)
    return 0.5 * x * _erfc(-x * jnp.asarray(math.sqrt(0.5), x.dtype))


def gelu_tanh(x: jax.Array) -> jax.Array:
    """The approximation 0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))) (Hendrycks & Gimpel 2016, 2)."""
    if _is_narrow(x):  # 0.5 (1 + tanh(z)) is the logistic function of 2 z
        wide = _gradient_rounded(x).astype(jnp.float32)
        z = math.sqrt(2 / math.pi) * (wide + 0.044715 * wide**3)
        return (wide * jax.nn.sigmoid(2 * z)).astype(x.dtype)
    return jax.nn.gelu(x, approximate=True)


def _is_narrow(x: jax.Array) -> bool:
    """Tells whether float32 has digits to spare for x, so that what is fastest there is exact enough."""
    return x.dtype.itemsize < 4


def relu_squared(x: jax.Array) -> jax.Array:
    """max(x, 0)^2 (So et al. 2021, 3)."""
    return jnp.square(jax.nn.relu(x))


def gated(activation: Activation) -> Activation:
    """Returns activation(gate) * up (Shazeer 2020, eq. 5)."""

    def joined(gate: jax.Array, up: jax.Array) -> jax.Array:
        return activation(gate) * up

    return joined


def swiglu_clamped(gate: jax.Array, up: jax.Array) -> jax.Array:
    """gate sigmoid(1.702 gate) (up + 1), with gate at most 7 and up in [-7, 7] (gpt-oss, Agarwal et al. 2025)."""
    gate, up = jnp.minimum(gate, 7.0), jnp.clip(up, -7.0, 7.0)
    return gate * jax.nn.sigmoid(1.702 * gate) * (up + 1)


def activated(name: str, x: jax.Array, projection: Callable[[int], nn.Module]) -> jax.Array:
    """Returns an activation of one projection of `x`, or of two where it is gated; `projection` makes number i.

    Of the activation itself the backward pass keeps its inputs alone.
    """
    inputs, activation = choose(ACTIVATIONS, name, 'model.activation')
    return jax.checkpoint(activation, prevent_cse=False)(*[projection(i)(x) for i in range(inputs)])


class Mlp(nn.Module):
    cfg: ResolvedModel
    stack: str

    @nn.compact
    def __call__(
        self, x_BTD: jax.Array, real_BT: jax.Array | None = None, dropout_rate: MaybeScalar = None
    ) -> jax.Array:
        """Returns out_BTD. Only the mixture of experts, which may take this module's place, uses `real_BT`."""
        cfg = self.cfg
        shape, names, bias = (cfg.emb_dim, cfg.mlp_dim), ('embed', 'mlp'), cfg.mlp_bias

        def projection(i: int) -> Dense:
            return Dense(cfg, 'BTD,DF->BTF', shape, names, bias, 'mlp_in', self.stack, name=f'in_{i}')

        h_BTF = constrain(activated(cfg.activation, x_BTD, projection), 'batch', 'length', 'act_mlp')
        h_BTF = drop(self, h_BTF, dropout_rate)
        return Dense(cfg, 'BTF,FD->BTD', shape[::-1], names[::-1], bias, 'mlp_out', self.stack, name='out')(h_BTF)


ACTIVATIONS: dict[str, tuple[int, Activation]] = {  # how many projections in, and what joins them
    'relu': (1, jax.nn.relu),  # Vaswani et al. 2017, eq. 2
    'relu_squared': (1, relu_squared),  # So et al. 2021
    'gelu': (1, gelu),  # Devlin et al. 2019
    'gelu_tanh': (1, gelu_tanh),  # Radford et al. 2019
    'silu': (1, jax.nn.silu),  # Elfwing et al. 2018; Ramachandran et al. 2017
    'glu': (2, gated(jax.nn.sigmoid)),  # Dauphin et al. 2017
    'reglu': (2, gated(jax.nn.relu)),  # Shazeer 2020, as all that follow
    'geglu': (2, gated(gelu)),
    'geglu_tanh': (2, gated(gelu_tanh)),  # T5 1.1, Gemma
    'swiglu': (2, gated(jax.nn.silu)),
    'swiglu_clamped': (2, swiglu_clamped),
}
