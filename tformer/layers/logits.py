"""The logits of a vocabulary in chunks, of which one is in memory at a time."""

import functools
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

from tformer.layers.embed import narrowed
from tformer.layers.heads import STATISTICS, TokenStatistics, token_statistics
from tformer.layers.parallel.each_device import on_own_tokens

# Positions of each row whose logits are held at once; auto: as `num_chunks` says; None: all.
Chunk = int | Literal['auto'] | None
AUTO_LOGITS = 2**24  # of a row: 64 MiB
AUTO_TOKENS = 2048  # of a device: with fewer at once, reading the table and adding to its gradient takes longer


class LogitsInput(NamedTuple):
    """All that a model's logits are computed from."""

    model: nn.Module  # unbound; its method `logits` is applied
    variables: Any  # those that it needs
    x_BTD: jax.Array  # the residual stream after the last stack

    def logits(self, real_BT: jax.Array, padded: bool = False) -> jax.Array:
        """Returns what `Family.logits` does."""
        found: Any = self.model.apply(self.variables, self.x_BTD, real_BT, padded, method='logits')
        return found


def num_chunks(rows: int, length: int, vocab_size: int) -> int:
    """Returns in how many parts the logits of the tokens [rows, length] of a device are computed with
    train.loss_chunk=auto: AUTO_LOGITS of each row at once, rounded down to a power of two of positions, but AUTO_TOKENS
    tokens at least."""
    of_row = max(AUTO_LOGITS // vocab_size, 1).bit_length() - 1
    of_device = (-(-AUTO_TOKENS // rows) - 1).bit_length()
    return -(-length // 2 ** max(of_row, of_device))


def statistics_in_chunks(
    own: LogitsInput,
    real_BT: jax.Array,
    targets_BT: jax.Array,
    chunk: int | Literal['auto'],
    teacher: LogitsInput | None = None,
    temperature: float | jax.Array = 1.0,
) -> TokenStatistics:
    """Returns `token_statistics` [B, T] of the logits of `own`, a chunk at a time.

    The backward pass computes the logits again, chunk by chunk. Each device adds up the gradients of its own tokens
    over all chunks, in float32, before devices exchange the sums, in the dtype of the activations.
    """
    cfg, inputs = own.model.cfg, [own] if teacher is None else [own, teacher]
    models, variables, streams = (list(part) for part in zip(*inputs, strict=True))
    params = own.variables['params']
    narrow = jax.tree.map(lambda x: narrowed(cfg, cfg.vocab_size, x) if x.ndim > 1 else x, params)
    variables[0] = {**own.variables, 'params': narrow}

    def in_chunks(shared: Any, tokens: Any) -> TokenStatistics:
        (learning, *others), temperatures = shared
        rows, length = tokens[1].shape
        count = num_chunks(rows, length, cfg.vocab_size) if chunk == 'auto' else -(-targets_BT.shape[1] // chunk)
        sums = jax.tree.map(lambda x: x.astype(jnp.float32), learning['params'])

        @functools.partial(
            jax.checkpoint, prevent_cse=False, policy=jax.checkpoint_policies.save_only_these_names(STATISTICS)
        )
        def one(part: Any) -> TokenStatistics:
            streams, real_BT, targets_BT = part
            read = {**learning, 'params': jax.tree.map(_read, jax.lax.stop_gradient(learning['params']), sums)}
            each = zip(models, [read, *others], streams, strict=True)
            logits = [LogitsInput(*own).logits(real_BT, teacher is None) for own in each]
            return token_statistics(logits[0], targets_BT, *logits[1:], *temperatures, size=cfg.vocab_size)

        found = jax.lax.map(one, jax.tree.map(functools.partial(_split, count), tokens))
        return jax.tree.map(lambda x: jnp.moveaxis(x, 0, 2).reshape(rows, -1)[:, :length], found)

    shared = variables, [] if teacher is None else [temperature]
    return on_own_tokens(in_chunks, shared, (streams, real_BT, targets_BT))


def _split(count: int, x: jax.Array) -> jax.Array:
    """Returns x [B, T, ...] in chunks [count, B, T / count, ...]: number i has the positions i, i + count, ..."""
    x = jnp.pad(x, [(0, 0), (0, -x.shape[1] % count), *[(0, 0)] * (x.ndim - 2)])
    return jnp.moveaxis(x.reshape(x.shape[0], -1, count, *x.shape[2:]), 2, 0)


@jax.custom_vjp
def _read(kernel: jax.Array, sums: jax.Array) -> jax.Array:
    """Returns the kernel, but its gradient is that of `sums`, which a loop adds up in float32."""
    return kernel


_read.defvjp(lambda kernel, sums: (kernel, None), lambda _, dx: (None, dx.astype(jnp.float32)))
