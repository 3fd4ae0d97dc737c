"""The three families: which stacks exist and which mask they get.

Shape letters, in all of tformer; a file that needs more of them says so at its head:

    B batch            D residual stream         N query heads              E experts
    T query length     W token table             K key and value heads      L layers
    S key length       F feed-forward            G = N / K                  C classes
    V vocabulary                                 H size of a head of queries and keys, U of values

A batch holds `inputs` and `positions` [B, T] (position -1 is padding), with packing `segment_ids`, for a prefix LM
`prefix` (bool), for an encoder `token_types`, and for two stacks `encoder_inputs`, `encoder_positions` and
`encoder_segment_ids`. Missing positions count from 0.

There are no modes. A model trains where a dropout rng is given, decodes where a cache is given, and updates BatchNorm's
statistics where their collection is mutable. `dropout_rates=None` stands for the rates of the configuration.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.sharding import PartitionSpec

from tformer.config import Model
from tformer.distributed.compilers import traced
from tformer.distributed.sharding import platform, unpipelined
from tformer.errors import choose
from tformer.layers.block import LAYER_SHARING
from tformer.layers.dropout import DropoutRates
from tformer.layers.embed import Embedding
from tformer.layers.heads import TokenStatistics, token_statistics
from tformer.layers.layer_stack import as_read, layers_apart
from tformer.layers.logits import Chunk, LogitsInput, statistics_in_chunks
from tformer.layers.outputs import HEADS
from tformer.layers.quantized import INT8, without_kernels
from tformer.layers.recurrent import RecurrentTower
from tformer.layers.resolved import ResolvedModel, resolve_model
from tformer.layers.tower import Batch, Tower, positions_of, real_tokens, tokens_of_texts


class Family(nn.Module):
    """What all families share: token embeddings below the stacks, and heads on the residual stream after the last one.

    A head that is never called has no parameters.
    """

    cfg: ResolvedModel

    def setup(self) -> None:
        self.embed = Embedding(self.cfg, self.cfg.vocab_size)
        modules = {name: make for head in HEADS.values() for name, make in head.modules.items()}
        for name, make in modules.items():
            setattr(self, name, make(self.cfg))

    def features(self, batch: Batch, dropout_rates: DropoutRates | None = None) -> jax.Array:
        """Returns x_BTD, the residual stream after the last stack."""
        raise NotImplementedError

    def logits(self, x_BTD: jax.Array, real_BT: jax.Array, padded: bool = False) -> jax.Array:
        """Returns logits_BTV, float32, of the residual stream after the last stack; `padded`: as `VocabularyHead`."""
        tied = self.embed.logits if self.cfg.tied_embeddings in ('all', 'output') else None
        return self.head(x_BTD, real_BT, tied, padded)

    def __call__(self, batch: Batch, dropout_rates: DropoutRates | None = None) -> jax.Array:
        """Returns logits_BTV, float32."""
        return self.logits(self.features(batch, dropout_rates), real_tokens(batch))

    def logits_input(self, batch: Batch, dropout_rates: DropoutRates | None = None) -> LogitsInput:
        """Returns all that the logits of a batch are computed from."""
        x_BTD = self.features(batch, dropout_rates)
        ends = {
            kind: {name: tree for name, tree in self.variables[kind].items() if name in ('embed', 'head')}
            for kind in ('params', INT8)
            if kind in self.variables
        }
        return LogitsInput(self.clone(parent=None, name=None), ends, x_BTD)

    def token_statistics(
        self,
        batch: Batch,
        dropout_rates: DropoutRates | None = None,
        *,
        chunk: Chunk,
        teacher: LogitsInput | None = None,
        temperature: float | jax.Array = 1.0,
    ) -> TokenStatistics:
        """Returns the statistics [B, T] of each token's logits, of which only [B, chunk, V] are in memory at once, or
        all of them.

        With a `teacher` they have the divergence from its logits at a temperature, of which no more are in memory.
        """
        V, padded, targets_BT, real_BT = self.cfg.vocab_size, teacher is None, batch['targets'], real_tokens(batch)
        if chunk is None:
            logits_BTV = self.logits(self.features(batch, dropout_rates), real_BT, padded)
            taught = None if teacher is None else teacher.logits(real_BT)
            return token_statistics(logits_BTV, targets_BT, taught, temperature, size=V)
        own = self.logits_input(batch, dropout_rates)
        return statistics_in_chunks(own, real_BT, targets_BT, chunk, teacher, temperature)

    def transform(self, x: jax.Array) -> jax.Array:
        """Returns x [..., D] as the heads of tasks read it."""
        return self.head.transform(x) if self.cfg.task_transform else x

    def pool(self, batch: Batch, dropout_rates: DropoutRates | None = None) -> jax.Array:
        """Returns x_BD, one vector for each sequence, or x_BKD, one for each of the texts that share a row."""
        several = 'segment_weights' in batch
        return self.pooler(self.features(batch, dropout_rates), (tokens_of_texts if several else real_tokens)(batch))


def make_tower(cfg: ResolvedModel, stack: str, cross: bool = False) -> Any:
    """Returns a stack of blocks, or of recurrent cells."""
    return (Tower if cfg.recurrence is None else RecurrentTower)(cfg, stack, cross)


class EncoderOnly(Family):
    """BERT: every token attends to all others (Devlin et al. 2019)."""

    def setup(self) -> None:
        super().setup()
        self.encoder = make_tower(self.cfg, 'encoder')

    def features(self, batch: Batch, dropout_rates: DropoutRates | None = None) -> jax.Array:
        return self.encoder(self.embed(batch['inputs']), batch, dropout_rates)


class DecoderFamily(Family):
    """A family whose last stack is a decoder, which generates token by token with a cache."""

    def extend(
        self, tokens_BT: jax.Array, positions_BT: jax.Array, cache: Any, prefix_BT: jax.Array | None = None
    ) -> tuple[jax.Array, Any]:
        """Returns (logits_BTV of the new tokens, the cache with them); a whole prefix must come in one call."""
        x_BTD, cache = self.decoder.extend(self.embed(tokens_BT), positions_BT, cache, prefix_BT)
        return self.logits(x_BTD, positions_BT >= 0), cache


class DecoderOnly(DecoderFamily):
    """GPT: every token attends to those before it (Radford et al. 2018)."""

    def setup(self) -> None:
        super().setup()
        self.decoder = make_tower(self.cfg, 'decoder')

    def features(self, batch: Batch, dropout_rates: DropoutRates | None = None) -> jax.Array:
        return self.decoder(self.embed(batch['inputs']), batch, dropout_rates)

    def start(self, batch: Batch, slots: int) -> Any:
        """Returns an empty cache of `slots` slots for the rows of `batch`."""
        return self.decoder.start(batch['inputs'].shape[0], slots, None, None)


class EncoderDecoder(DecoderFamily):
    """The original (Vaswani et al. 2017), T5, BART: a decoder that also attends to an encoder's output."""

    def setup(self) -> None:
        super().setup()
        cfg = self.cfg
        if cfg.tied_embeddings not in ('all', 'inputs'):
            self.encoder_embed = Embedding(cfg, cfg.encoder_vocab_size)
        self.encoder = make_tower(cfg, 'encoder')
        self.decoder = make_tower(cfg, 'decoder', cross=True)

    def encode(self, batch: Batch, dropout_rates: DropoutRates | None = None) -> Any:
        """Returns the encoder's output [B, S, D]; of a recurrent one `recurrent.Encoded`."""
        embed = self.embed if self.cfg.tied_embeddings in ('all', 'inputs') else self.encoder_embed
        return self.encoder.encode(embed(batch['encoder_inputs']), batch, dropout_rates)

    def features(self, batch: Batch, dropout_rates: DropoutRates | None = None) -> jax.Array:
        return self.decoder(self.embed(batch['inputs']), batch, dropout_rates, self.encode(batch, dropout_rates))

    def start(self, batch: Batch, slots: int) -> Any:
        """Returns an empty cache of `slots` slots, with what the decoder reads of the encoded `batch`."""
        if 'encoder_segment_ids' in batch:
            raise ValueError('decoding takes one source per row: encoder_segment_ids are not supported')
        with unpipelined():
            encoded = self.encode(batch, DropoutRates())
        return self.decoder.start(batch['inputs'].shape[0], slots, encoded, positions_of(batch, 'encoder_'))


FAMILIES: dict[str, type[nn.Module]] = {
    'encoder': EncoderOnly,
    'decoder': DecoderOnly,
    'encoder_decoder': EncoderDecoder,
}

TIED_EMBEDDINGS = ('all', 'inputs', 'output', None)


def build(cfg: Model) -> nn.Module:
    """Returns the model that `cfg` describes, with derived sizes filled in.

    Raises:
      UserError: an unknown family.
    """
    return choose(FAMILIES, cfg.family, 'model.family')(resolve_model(cfg))


def for_steps(cfg: ResolvedModel, variables: Any, apart: bool = True) -> Any:
    """Returns a model's variables as a loop of steps reads them fastest: kernels and tables in the activations' dtype.

    On CPUs and GPUs those of each layer stand `apart`, beside those of the stack that a prompt is read by, so that the
    decoder's parameters are held twice; a TPU reads a layer's out of the stack's. What stages of a pipeline share out
    is gathered once: XLA would gather the stack for each of its layers.
    """
    if cfg.recurrence is not None:
        return variables
    if jax.sharding.get_abstract_mesh().shape.get('pipeline', 1) > 1:
        variables = {**variables, 'params': _without_stages(cfg, variables['params'])}
    apart = apart and not LAYER_SHARING[cfg.layer_sharing].shared and platform() != 'tpu'
    found = layers_apart(variables, ('decoder', 'stack'), cfg.dtype) if apart else variables

    def one(keys: Any, x: Any) -> Any:
        stacked = any(getattr(key, 'key', '') == 'layers' for key in keys)
        return x if apart and stacked else as_read(keys, x, cfg.dtype)

    return {**found, 'params': jax.tree_util.tree_map_with_path(one, found['params'])}


def _without_stages(cfg: ResolvedModel, params: Any) -> Any:
    """Returns parameters of which each device has all layers, as they are read."""

    def whole(keys: Any, x: Any) -> Any:
        if not traced(x) or all(getattr(key, 'key', '') != 'layers' for key in keys):
            return x
        narrow = jax.lax.optimization_barrier(as_read(keys, x, cfg.dtype))  # else XLA gathers before it rounds
        return jax.lax.with_sharding_constraint(
            narrow, PartitionSpec(None, *[PartitionSpec.UNCONSTRAINED] * (x.ndim - 1))
        )

    return jax.tree_util.tree_map_with_path(whole, params)


def quantized(model: nn.Module, variables: Any, kind: str | None) -> Any:
    """Returns the variables by which the products of a model are computed in fewer bits, a key of `QUANTIZATIONS`, in
    the place of their kernels; those that are so already as they are.

    Those of experts and of attention's scores and values stay as they are.
    """
    if kind is None or QUANTIZATIONS[kind] in variables:
        return variables
    found = _in_fewer_bits(variables, model, kind)
    return {**variables, 'params': without_kernels(variables['params'], found[QUANTIZATIONS[kind]]), **found}


@functools.partial(jax.jit, static_argnames=('model', 'kind'))
def _in_fewer_bits(variables: Any, model: nn.Module, kind: str) -> Any:
    token = jnp.zeros((1, 1), jnp.int32)
    with unpipelined():
        _, found = model.apply(variables, {'inputs': token, 'encoder_inputs': token}, mutable=[QUANTIZATIONS[kind]])
    return found


QUANTIZATIONS = {'int8': INT8}  # the collection of what a model's products are computed by
