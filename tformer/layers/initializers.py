"""Initial values of kernels and tables, by what the parameter is for."""

from collections.abc import Callable
from typing import NamedTuple

import jax
from jax.nn import initializers

from tformer.errors import choose
from tformer.layers.parametrization import width_factor
from tformer.layers.resolved import ResolvedModel

Initializer = Callable[..., jax.Array]


class Parameter(NamedTuple):
    """The facts about a parameter that its initial value may depend on."""

    role: str  # query key value attention_out mlp_in mlp_out dense output; of tables: embedding, position, relative
    fan_in: int  # inputs that are summed into one output; of a table, its width
    fan_out: int  # outputs
    head_dim: int  # of the queries
    stack: str  # encoder or decoder, where it stands in one
    encoder_layers: int  # 0 without an encoder
    decoder_layers: int  # likewise

    @property
    def residual_sublayers(self) -> int:
        """The number of sub-layers that add to the residual stream of this stack."""
        layers = {'encoder': self.encoder_layers, 'decoder': self.decoder_layers}[self.stack]
        return layers * (3 if self.stack == 'decoder' and self.encoder_layers else 2)


TABLES = ('embedding', 'position', 'relative')


def deepnorm(stack: str, encoder_layers: int, decoder_layers: int) -> tuple[float, float]:
    """Returns (alpha, the factor on the residual; beta, the gain of initial values) (Wang et al. 2022, table 1)."""
    if not (encoder_layers and decoder_layers):
        layers = encoder_layers + decoder_layers
        return (2 * layers) ** 0.25, (8 * layers) ** -0.25
    if stack == 'decoder':
        return (3 * decoder_layers) ** 0.25, (12 * decoder_layers) ** -0.25
    mixed = (encoder_layers**4 * decoder_layers) ** (1 / 16)
    return 0.81 * mixed, 0.87 / mixed


def depths(cfg: ResolvedModel) -> tuple[int, int]:
    """Returns the numbers of encoder and decoder layers, 0 for a stack that the family lacks."""
    encoder = cfg.num_encoder_layers if cfg.family != 'decoder' else 0
    return encoder, cfg.num_decoder_layers if cfg.family != 'encoder' else 0


def make_initializer(cfg: ResolvedModel, role: str, fan_in: int, fan_out: int, stack: str = '') -> Initializer:
    """Returns the initializer of one parameter (see `Parameter`).

    Under muP tables and outputs start as at base_emb_dim, and kernels inside as there over the square root of the
    factor in width (Yang et al. 2022, table 8).
    """
    width = width_factor(cfg)
    base_in, base_out = round(fan_in / width), fan_out if role in (*TABLES, 'output') else round(fan_out / width)
    parameter = Parameter(role, base_in, base_out, cfg.head_dim, stack, *depths(cfg))
    made = choose(INITIALIZERS, cfg.initializer, 'model.initializer')(parameter)
    shrink = 1.0 if role in (*TABLES, 'output') else width**-0.5
    return made if shrink == 1.0 else lambda *args: made(*args) * shrink


def _uniform(deviation: float) -> Initializer:
    bound = 3**0.5 * deviation
    return lambda key, shape, dtype: jax.random.uniform(key, shape, dtype, -bound, bound)


def _tables_by_width(kernels: Callable[[Parameter], Initializer]) -> Callable[[Parameter], Initializer]:
    """Returns the initializers `kernels`, but for tables a normal of the deviation width^-0.5."""

    def choice(parameter: Parameter) -> Initializer:
        table = parameter.role in TABLES
        return initializers.normal(parameter.fan_in**-0.5) if table else kernels(parameter)

    return choice


@_tables_by_width
def xavier(parameter: Parameter) -> Initializer:
    return _uniform((2 / (parameter.fan_in + parameter.fan_out)) ** 0.5)


@_tables_by_width
def lecun(parameter: Parameter) -> Initializer:
    # The standard deviation is that after the cut at two of the uncut normal.
    return initializers.truncated_normal(parameter.fan_in**-0.5 / 0.87962566103423978)


def truncated_normal(parameter: Parameter) -> Initializer:
    return initializers.truncated_normal(0.02)


def gpt2(parameter: Parameter) -> Initializer:
    into_stream = parameter.role in ('attention_out', 'mlp_out')
    return initializers.normal(0.02 * (parameter.residual_sublayers**-0.5 if into_stream else 1.0))


def t5(parameter: Parameter) -> Initializer:
    deviations = {'embedding': 1.0, 'query': (parameter.fan_in * parameter.head_dim) ** -0.5}
    return initializers.normal(deviations.get(parameter.role, parameter.fan_in**-0.5))


@_tables_by_width
def deepnorm_xavier(parameter: Parameter) -> Initializer:
    small = parameter.role in ('value', 'attention_out', 'mlp_in', 'mlp_out')
    gain = deepnorm(parameter.stack, parameter.encoder_layers, parameter.decoder_layers)[1] if small else 1.0
    return initializers.normal(gain * (2 / (parameter.fan_in + parameter.fan_out)) ** 0.5)


INITIALIZERS: dict[str, Callable[[Parameter], Initializer]] = {
    'xavier': xavier,  # Glorot & Bengio 2010, as the original's code does
    'lecun': lecun,  # LeCun et al. 1998
    'truncated_normal': truncated_normal,  # Devlin et al. 2019, A.2: 0.02
    'gpt2': gpt2,  # Radford et al. 2019, 2.3: what adds to the stream is smaller by the root of how often
    't5': t5,  # Raffel et al. 2020, as its code does: the scores' scale is in the queries
    'deepnorm': deepnorm_xavier,  # Wang et al. 2022, figure 2
}
