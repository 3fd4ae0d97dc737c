"""Recurrent baselines: a stack of simple RNN, LSTM or GRU layers in place of the transformer's blocks.

Everything else is the transformer's: embeddings, heads, the batch, objectives, decoding. The cache is the state. A
state is an array [B, D], or for an LSTM a pair of them (cell, hidden); stacked over layers it is [L, B, D].

The decoder's first state is the encoder's last, layer by layer (Sutskever et al. 2014, section 2; Cho et al. 2014,
2.2). With attention, the outputs of the decoder's top layer attend to those of the encoder's (Luong et al. 2015, 3.1;
without input feeding). Dropout acts between layers, not between tokens (Zaremba et al. 2014).
"""

import flax.struct
import jax
import jax.numpy as jnp
from flax import linen as nn

from tformer.distributed.sharding import constrain
from tformer.errors import choose
from tformer.layers.dropout import DropoutRates, drop
from tformer.layers.embed import InputEmbedding
from tformer.layers.initializers import make_initializer
from tformer.layers.layer_stack import LayerStack, NamedValue, PerLayer
from tformer.layers.recurrent_attention import CrossAttention, Source
from tformer.layers.recurrent_cells import CELLS, Cell, CellKernels, State, read
from tformer.layers.resolved import ResolvedModel
from tformer.layers.tower import AnyTower, Batch, positions_of


class Encoded(flax.struct.PyTreeNode):
    """An encoder's output, as a decoder reads it."""

    x_BSD: jax.Array  # outputs of the top layer
    state: State  # of each layer after the last token, both directions concatenated, [L, B, D]


class StateCache(flax.struct.PyTreeNode):
    """What decoding carries between calls: the state of each layer [L, B, D], and the source of attention."""

    state: State
    source: Source | None
    hypotheses: int | None = flax.struct.field(pytree_node=False, default=None)  # of each row; None: a row is one text

    def repeat(self, times: int) -> 'StateCache':
        """Returns the cache with each row so many times, one after the other."""
        rows = jax.tree.map(lambda x: jnp.repeat(x, times, axis=1), self.state)
        return StateCache(rows, jax.tree.map(lambda x: jnp.repeat(x, times, axis=0), self.source))

    def branch(self, hypotheses: int) -> 'StateCache':
        """Returns the cache for M hypotheses of each row, whose states lie side by side."""
        return self.repeat(hypotheses).replace(hypotheses=hypotheses)

    def take(self, parents_BM: jax.Array) -> 'StateCache':
        """Returns the cache in which hypothesis m of a row goes on from `parents_BM`; the source stays."""
        B, M = parents_BM.shape
        rows = (parents_BM + M * jnp.arange(B)[:, None]).reshape(B * M)
        return self.replace(state=jax.tree.map(lambda x: jnp.take(x, rows, axis=1), self.state))


# ------------------------------------------------------------------------------------------------------------- layers


def make_cell(cfg: ResolvedModel, stack: str, units: int) -> CellKernels:
    """Returns the parameters of a cell. Each gate's hidden kernel starts orthogonal (Saxe et al. 2014)."""
    initializer = make_initializer(cfg, 'dense', cfg.emb_dim, units, stack)
    return CellKernels(cfg, cell_of(cfg), cfg.emb_dim, units, initializer)


def cell_of(cfg: ResolvedModel) -> Cell:
    """Returns the cell that a model is of."""
    return choose(CELLS, cfg.recurrence, 'model.recurrence')


class Layer(nn.Module):
    """A cell that reads rows in order; or two of half the width, one in each direction, with outputs concatenated."""

    cfg: ResolvedModel
    stack: str

    def setup(self) -> None:
        cfg, stack = self.cfg, self.stack
        if cfg.bidirectional and stack == 'encoder':
            self.forward_cell, self.backward_cell = (make_cell(cfg, stack, cfg.emb_dim // 2) for _ in range(2))
        else:
            self.cell = make_cell(cfg, stack, cfg.emb_dim)
        self.output = NamedValue()

    def __call__(
        self,
        x_BTD: jax.Array,
        state: State | None,
        real_BT: jax.Array,
        segments_BT: jax.Array | None,
        dropout_rates: DropoutRates,
        layer: PerLayer,
    ) -> tuple[jax.Array, State]:
        """Returns (the outputs, the state after the last real token)."""
        (B, _, D), tokens, cell = x_BTD.shape, (x_BTD, real_BT, segments_BT), cell_of(self.cfg)
        if self.cfg.bidirectional and self.stack == 'encoder':
            zero, forward, backward = cell.zeros(B, D // 2, self.cfg.dtype), self.forward_cell(), self.backward_cell()
            ways = read(cell, forward, zero, *tokens), read(cell, backward, zero, *tokens, backwards=True)
            state, x_BTD = jax.tree.map(lambda a, b: jnp.concatenate([a, b], -1), *ways)
        else:
            state = cell.zeros(B, D, self.cfg.dtype) if state is None else state
            state, x_BTD = read(cell, self.cell(), state, *tokens)
        x_BTD = drop(self, self.output(x_BTD), dropout_rates.residual)
        return constrain(x_BTD, 'batch', 'length', 'act_embed'), state


class RecurrentStack(LayerStack):
    """Recurrent layers, and attention on top of them."""

    def setup(self) -> None:
        in_axes = 0, nn.broadcast, nn.broadcast, nn.broadcast, 0
        self.layers = self.scan(Layer, {'__call__': in_axes})(self.cfg, self.stack)
        attends = self.cross and self.cfg.recurrent_attention is not None
        self.cross_attention = CrossAttention(self.cfg, self.stack) if attends else None

    def source(self, encoded: Encoded, positions_BS: jax.Array) -> Source | None:
        """Returns what the attention attends to; None without attention."""
        if self.cross_attention is None:
            return None
        return Source(self.cross_attention.keys(encoded.x_BSD), encoded.x_BSD, positions_BS)

    def __call__(
        self,
        x_BTD: jax.Array,
        state: State | None,
        source: Source | None,
        real_BT: jax.Array,
        segments_BT: jax.Array | None,
        dropout_rates: DropoutRates,
    ) -> tuple[jax.Array, State]:
        """Returns (x_BTD, the state of each layer after the last real token)."""
        x_BTD, state = self.layers(x_BTD, state, real_BT, segments_BT, dropout_rates, self.each_layer())
        if source is not None and self.cross_attention is not None:
            x_BTD = self.cross_attention(x_BTD, source)
        return x_BTD, state


class RecurrentTower(AnyTower):
    """A tower of recurrent layers."""

    def setup(self) -> None:
        self.input_embedding = InputEmbedding(self.cfg, position=None)
        self.stack = RecurrentStack(self.cfg, self.stack_name, self.num_layers, self.cross)

    def encode(
        self, x_BTW: jax.Array, batch: Batch, dropout_rates: DropoutRates | None = None, encoded: Encoded | None = None
    ) -> Encoded:
        """Returns outputs and last states, all positions at once; a decoder starts from those of the encoder."""
        rates = DropoutRates.of(self.cfg, dropout_rates)
        if 'prefix' in batch:
            raise ValueError('a recurrent model reads tokens in order: a bidirectional prefix is not supported')
        if encoded is not None and 'segment_ids' in batch:
            raise ValueError('a recurrent decoder takes one source per row: segment_ids are not supported')
        (positions_BT, segments_BT), state, source = self.tokens(batch), None, None
        if encoded is not None:
            state, source = encoded.state, self.stack.source(encoded, positions_of(batch, 'encoder_'))
        x_BTD = self.input_embedding(x_BTW, positions_BT, rates, batch.get('token_types'))
        return Encoded(*self.stack(x_BTD, state, source, positions_BT >= 0, segments_BT, rates))

    def __call__(
        self, x_BTW: jax.Array, batch: Batch, dropout_rates: DropoutRates | None = None, encoded: Encoded | None = None
    ) -> jax.Array:
        """Returns x_BTD."""
        return self.encode(x_BTW, batch, dropout_rates, encoded).x_BSD

    def start(self, rows: int, slots: int, encoded: Encoded | None, positions_BS: jax.Array | None) -> StateCache:
        """Returns the cache before the first token. It holds one state whatever the number of `slots`."""
        if encoded is not None and positions_BS is not None:
            return StateCache(encoded.state, self.stack.source(encoded, positions_BS))
        zero, L = cell_of(self.cfg).zeros(rows, self.cfg.emb_dim, self.cfg.dtype), self.cfg.num_decoder_layers
        return StateCache(jax.tree.map(lambda x: jnp.broadcast_to(x, (L, *x.shape)), zero), None)

    def extend(
        self, x_BTW: jax.Array, positions_BT: jax.Array, cache: StateCache, prefix_BT: jax.Array | None = None
    ) -> tuple[jax.Array, StateCache]:
        """Returns (x_BTD of the new tokens, the cache with them)."""
        if prefix_BT is not None:
            raise ValueError('a recurrent model reads tokens in order: a bidirectional prefix is not supported')
        shape = positions_BT.shape
        if cache.hypotheses is not None:  # a token of each
            x_BTW, positions_BT = (x.reshape(-1, 1, *x.shape[2:]) for x in (x_BTW, positions_BT))
        x_BTD = self.input_embedding(x_BTW, positions_BT, DropoutRates())
        x_BTD, state = self.stack(x_BTD, cache.state, cache.source, positions_BT >= 0, None, DropoutRates())
        return x_BTD.reshape(*shape, -1), cache.replace(state=state)
