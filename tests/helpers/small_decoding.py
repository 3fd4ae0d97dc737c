"""A tiny model of each family, its prompts, and its forward pass."""

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from tformer import config
from tformer.decode import text
from tformer.model import build

V, B, P, S, T = 11, 3, 5, 4, 6
PAD, BOS, EOS = 0, 1, 2
BANNED = (PAD, BOS)
CASES = ('decoder', 'encoder_decoder', 'prefix_decoder')  # the last: a decoder whose prompts see themselves whole
LENGTHS = (5, 2, 4)  # of the prompts
LATENT = {'position': 'rope', 'num_kv_heads': None, 'kv_latent_dim': 6, 'query_latent_dim': 5, 'rotary_dim': 4}
LATENT_CASES = tuple(f'{case} of latents' for case in CASES)  # the same, whatever else their fields are


def make(family, vocab_size=V, seed=0, scale=1.0, **fields):
    """A tiny model and its variables; `scale` widens the distribution over the vocabulary."""
    sizes = {
        'max_len': 16,
        'emb_dim': 16,
        'mlp_dim': 32,
        'num_heads': 4,
        'num_encoder_layers': 1,
        'num_decoder_layers': 2,
    }
    family, _, latent = family.removeprefix('prefix_').partition(' of ')
    fields = {**sizes, **fields, **(LATENT if latent else {})}
    model = build(config.Model(family=family, vocab_size=vocab_size, **fields))
    batch = {'inputs': jnp.ones((1, 2), jnp.int32), 'encoder_inputs': jnp.ones((1, 2), jnp.int32)}
    variables = jax.jit(model.init)(jax.random.key(seed), batch)
    return model, jax.tree.map(lambda x: x * scale, variables)


def batch_of(family, vocab_size=V):
    """Prompts of unequal lengths, padded in front; with an encoder, BOS as the prompt and unequal sources."""
    family, rng = family.partition(' of ')[0], np.random.default_rng(0)
    tokens = rng.integers(3, vocab_size, (B, P)).astype(np.int32)
    positions = np.stack([np.arange(P) - (P - n) for n in LENGTHS]).clip(-1).astype(np.int32)
    rows = np.array([7, 8, 9], np.int32)
    if family != 'encoder_decoder':
        prefix = {'prefix': positions >= 0} if family == 'prefix_decoder' else {}
        return {'inputs': np.where(positions < 0, PAD, tokens), 'positions': positions, 'rows': rows, **prefix}
    sources = np.array([4, 2, 3])
    encoder_positions = np.where(np.arange(S)[None] < sources[:, None], np.arange(S)[None], -1).astype(np.int32)
    return {
        'inputs': np.full((B, 1), BOS, np.int32),
        'positions': np.zeros((B, 1), np.int32),
        'encoder_inputs': np.where(encoder_positions < 0, PAD, tokens[:, :S]).astype(np.int32),
        'encoder_positions': encoder_positions,
        'rows': rows,
    }


def row(batch, index):
    """One example alone, without the padding in front."""
    alone = {name: value[index : index + 1] for name, value in batch.items()}
    real = alone['positions'][0] >= 0
    own = [name for name in ('inputs', 'positions', 'prefix') if name in alone]
    return {**alone, **{name: alone[name][:, real] for name in own}}


def generator(model, run, tokenizers, *, cut):
    """Returns generate(variables, texts, seed=0) -> the best text that a run's `Writer` writes for each."""
    writer = text.make_writer(model, run, tokenizers, cut=cut)
    return lambda variables, texts, seed=0: text.best(writer.write(variables, texts, seed))


FORWARD = jax.jit(lambda model, variables, batch: model.apply(variables, batch), static_argnums=0)


class Walk(flax.struct.PyTreeNode):
    """A cache of beams over tables: the number of each row, and one for all that each of its hypotheses has read."""

    row_B: jax.Array
    state_BM: jax.Array

    @classmethod
    def start(cls, row_B):
        return cls(row_B, jnp.zeros((len(row_B), 1), int))

    def read(self, tokens_BM, positions_BM, states):
        return self.replace(state_BM=(self.state_BM * 7 + tokens_BM + 11 * positions_BM) % states)

    def at(self, tables):
        """What tables [rows, states, ...] have for each hypothesis."""
        return jnp.asarray(tables)[self.row_B[:, None], self.state_BM]

    def branch(self, hypotheses):
        return self.replace(state_BM=jnp.repeat(self.state_BM, hypotheses, axis=1))

    def take(self, parents_BM):
        return self.replace(state_BM=jnp.take_along_axis(self.state_BM, parents_BM, axis=1))


@jax.tree_util.register_static
class Nothing:
    """A cache of beams whose steps read no cache."""

    def branch(self, hypotheses):
        return self

    def take(self, parents_BM):
        return self
