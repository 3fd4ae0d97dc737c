"""Token embeddings, and what is done to them before the first block of a stack."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import linen as nn

from tformer.distributed.sharding import constrain, partitioned
from tformer.errors import choose
from tformer.layers.dropout import DropoutRates, drop
from tformer.layers.initializers import make_initializer
from tformer.layers.linear import Dense, product
from tformer.layers.lookup import lookup
from tformer.layers.norms import make_norm
from tformer.layers.parallel.each_device import split, ways
from tformer.layers.parallel.few_tokens import travel
from tformer.layers.parametrization import base_width
from tformer.layers.positions import POSITIONS
from tformer.layers.quantized import quantized_kernel
from tformer.layers.resolved import ResolvedModel


def embedding_width(cfg: ResolvedModel) -> int:
    """Returns the width W of the token table: emb_dim, unless it is factorised."""
    return cfg.embedding_factor_dim or cfg.emb_dim


def narrowed(cfg: ResolvedModel, vocab_size: int, x: jax.Array) -> jax.Array:
    """Returns a parameter in the dtype of the activations.

    XLA may gather the parts of a width that devices split before it rounds them. A barrier keeps it from that; where
    they split the vocabulary, too, it would have XLA gather more.
    """
    x, vocab = x.astype(cfg.dtype), split('vocab', vocab_size)
    alone = ways(split('embed', cfg.emb_dim) or ()) > 1 and vocab is not None and ways(vocab) == 1
    return jax.lax.optimization_barrier(x) if alone else x


class Embedding(nn.Module):
    """One vector for each token; the same table turns vectors into logits where the output is tied to it.

    Rows of the table stay whole on each device: XLA looks up parts of rows badly.
    """

    cfg: ResolvedModel
    vocab_size: int
    axis: str = 'vocab'  # logical name of the table's rows

    def setup(self) -> None:
        cfg, width = self.cfg, embedding_width(self.cfg)
        init = partitioned(make_initializer(cfg, 'embedding', width, self.vocab_size), self.axis, 'embed')
        table = self.param('table', init, (self.vocab_size, width), jnp.dtype(cfg.param_dtype))
        self.parts = narrowed(cfg, self.vocab_size, table)
        self.table = _gathered(('act_vocab' if self.axis == 'vocab' else None, 'act_embed'), self.parts)

    def __call__(self, tokens_BT: jax.Array) -> jax.Array:
        few = travel('BT,VW->BTW', tokens_BT, self.parts.shape, (self.axis, 'embed'))
        if few is None:
            return constrain(lookup(self.table, tokens_BT), 'batch', 'length', 'act_embed')
        return few.back(lookup(self.parts, few.to_kernel(tokens_BT, 'BT')), 'BTW')

    def logits(self, x_BTW: jax.Array, bias_V: jax.Array | None = None, padded: bool = False) -> jax.Array:
        """Returns logits_BTV, float32, with a bias where it is given (Press & Wolf 2017); `padded`: as of `product`."""
        _, integers = quantized_kernel(self, 'table', lambda: self.table, [1])
        few = travel('BTW,VW->BTV', x_BTW, self.parts.shape, (self.axis, 'embed'))
        if few is not None:
            given = few.to_kernel(x_BTW, 'BTW')
            logits = few.back(product('BTW,VW->BTV', given, self.parts, jnp.float32, integers), 'BTV')
            return logits if bias_V is None else logits + jnp.broadcast_to(bias_V, logits.shape)
        logits = product('BTW,VW->BTV', x_BTW, self.table, jnp.float32, integers, bias_V, padded)
        return constrain(logits, 'batch', 'length', 'act_vocab')


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gathered(names: tuple[str | None, ...], table_VW: jax.Array) -> jax.Array:
    """Returns a table constrained by logical names. Its gradient is not: each device needs that of its part alone."""
    return constrain(table_VW, *names)


_gathered.defvjp(lambda names, table_VW: (_gathered(names, table_VW), None), lambda names, _, d_VW: (d_VW,))


class InputEmbedding(nn.Module):
    """Scales embeddings, adds positions and types, normalises, drops out, projects up.

    Vaswani et al. 2017, 3.4, 3.5 and 5.4; Devlin et al. 2019, 3.2; Lan et al. 2020, 3.1.
    """

    cfg: ResolvedModel
    position: str | None  # the encoding whose vectors are added here, a key of `POSITIONS`

    @nn.compact
    def __call__(
        self,
        x_BTW: jax.Array,
        positions_BT: jax.Array,
        dropout_rates: DropoutRates,
        token_types_BT: jax.Array | None = None,
    ) -> jax.Array:
        cfg, width = self.cfg, embedding_width(self.cfg)
        x_BTW = x_BTW * choose(EMBEDDING_SCALES, cfg.embedding_scale, 'model.embedding_scale')(
            cfg.embedding_factor_dim or base_width(cfg)
        )
        added = choose(POSITIONS, self.position, 'model.position').added
        if added is not None:
            x_BTW += added(cfg, width, name='positions')(positions_BT)
        if cfg.num_token_types:
            types = jnp.zeros_like(positions_BT) if token_types_BT is None else token_types_BT
            x_BTW += Embedding(cfg, cfg.num_token_types, 'token_types', name='token_types')(types)
        if cfg.embedding_norm:
            x_BTW = make_norm(cfg)(x_BTW, positions_BT >= 0)
        x_BTW = drop(self, x_BTW, dropout_rates.residual)
        if cfg.embedding_factor_dim:
            shape, names = (width, cfg.emb_dim), ('factor', 'embed')
            x_BTW = Dense(cfg, 'BTW,WD->BTD', shape, names, bias=True, name='projection')(x_BTW)
        return constrain(x_BTW, 'batch', 'stream_length', 'act_embed')


EMBEDDING_SCALES: dict[str | None, Callable[[int], float]] = {
    'sqrt_dim': lambda emb_dim: emb_dim**0.5,  # Vaswani et al. 2017, 3.4
    None: lambda emb_dim: 1.0,
}
