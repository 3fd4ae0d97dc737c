"""The position-wise feed-forward: out(activation(in(x))), or gated."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import linen as nn

from tformer.distributed.sharding import constrain, platform
from tformer.errors import choose
from tformer.layers.accelerators import activation_kernel
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
    if _is_narrow(x):
        return wide_gelu_tanh(_gradient_rounded(x).astype(jnp.float32)).astype(x.dtype)
    return jax.nn.gelu(x, approximate=True)


def wide_gelu_tanh(x: jax.Array) -> jax.Array:
    """The same, in float32: 0.5 (1 + tanh(z)) is the logistic function of 2 z."""
    z = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
    return x * jax.nn.sigmoid(2 * z)


def _is_narrow(x: jax.Array) -> bool:
    """Tells whether float32 has digits to spare for x, so that what is fastest there is exact enough."""
    return x.dtype.itemsize < 4


@jax.custom_vjp
def relu(x: jax.Array) -> jax.Array:
    """max(x, 0), of which the backward pass keeps the result alone, as the next product does."""
    return jax.nn.relu(x)


def _relu_forward(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    y = relu(x)
    if platform() == 'gpu':  # XLA would keep x, too, which is positive where y is
        y = jax.lax.optimization_barrier(y)
    return y, y


relu.defvjp(_relu_forward, lambda y, dy: (jnp.where(y > 0, dy, jnp.zeros_like(dy)),))


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


def activated(name: str, x: jax.Array, projection: Callable[[int], Dense], alone: bool = True) -> jax.Array:
    """Returns an activation of one projection of `x`, or of two where it is gated; `projection` makes number i.

    Of the activation itself the backward pass keeps its inputs alone, or of `relu` its result. On a GPU a kernel
    computes it where it stands `alone`: XLA joins it with what follows.
    """
    inputs, activation = choose(ACTIVATIONS, name, 'model.activation')
    layers = [projection(i) for i in range(inputs)]
    if alone and name in WIDE and has_kernel(x, layers[0].shape[-1]):
        return activation_kernel.activate(activation_kernel.Options(WIDE[name]), *layers[0](x, apart=True))
    if activation is not relu:
        activation = jax.checkpoint(activation, prevent_cse=False)
    return activation(*[layer(x) for layer in layers])


def has_kernel(x: jax.Array, features: int) -> bool:
    """Tells whether a kernel computes activations [B, T, features] of x: of more tokens than a step of decoding."""
    tokens = x.ndim == 3 and x.shape[1] > 1
    return platform() == 'gpu' and _is_narrow(x) and tokens and features % activation_kernel.WIDTH == 0


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

        alone = dropout_rate is None or not self.has_rng('dropout')
        h_BTF = constrain(activated(cfg.activation, x_BTD, projection, alone), 'batch', 'length', 'act_mlp')
        h_BTF = drop(self, h_BTF, dropout_rate)
        return Dense(cfg, 'BTF,FD->BTD', shape[::-1], names[::-1], bias, 'mlp_out', self.stack, name='out')(h_BTF)


ACTIVATIONS: dict[str, tuple[int, Activation]] = {  # how many projections in, and what joins them
    'relu': (1, relu),  # Vaswani et al. 2017, eq. 2
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

WIDE: dict[str, Activation] = {  # of float32, as kernels compute them; others are as fast by XLA
    'gelu': lambda x: x * activation_kernel.normal_cdf(x),
    'gelu_tanh': wide_gelu_tanh,
}
