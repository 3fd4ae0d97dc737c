"""Multi-head latent attention: the keys and values of all heads come from one small vector of each token."""

import jax
import jax.numpy as jnp

from tformer.layers.attention import Attention, AttentionContext
from tformer.layers.dropout import MaybeScalar
from tformer.layers.initializers import make_initializer
from tformer.layers.linear import Dense, Kernel
from tformer.layers.norms import RMSNorm
from tformer.layers.positions import Angles, rotate
from tformer.layers.quantized import Quantized, numbers


class LatentAttention(Attention):
    """Self-attention whose cache holds a latent and one rotary key for each token (DeepSeek-AI 2024, 2.1, eq. 9-19).

    C is the width of the latent, R that of the rotary key, H that of a head's other numbers. The latents have an
    RMSNorm, as the paper's code does.
    """

    def setup(self) -> None:
        cfg, stack, D, N, C = self.cfg, self.stack, self.cfg.emb_dim, self.cfg.num_heads, self.cfg.kv_latent_dim
        assert C is not None
        width, latent = self.query_width, cfg.query_latent_dim
        if latent is not None:
            self.query_latent = Dense(cfg, 'BTD,DC->BTC', (D, latent), ('embed', 'latent'), role='query', stack=stack)
            self.query_latent_norm = RMSNorm(cfg)
        first = 'embed' if latent is None else 'latent'
        shape, names = (latent or D, N, width), (first, 'heads', 'head_dim')
        self.query = Dense(cfg, 'BTD,DNH->BNTH', shape, names, role='query', stack=stack)
        self.latent = Dense(cfg, 'BSD,DC->BSC', (D, C), ('embed', 'latent'), role='key', stack=stack)
        self.latent_norm = RMSNorm(cfg)
        self.rotary_key = Dense(cfg, 'BSD,DR->BSR', (D, cfg.rotary_dim), ('embed', 'head_dim'), role='key', stack=stack)

        def up(role: str, size: int) -> Kernel:
            init = make_initializer(cfg, role, C, N * size, stack)
            return Kernel(cfg, (C, N, size), ('latent', 'heads', 'head_dim'), init)

        self.key_up, self.value_up = up('key', cfg.head_dim), up('value', cfg.value_dim)
        shape, names = (N, cfg.value_dim, D), ('heads', 'head_dim', 'embed')
        self.out = Dense(cfg, 'BNTU,NUD->BTD', shape, names, role='attention_out', stack=stack)
        self.set_up_scores()

    @property
    def query_width(self) -> int:
        return self.cfg.head_dim + self.cfg.rotary_dim

    def keys_values(self, x_BSD: jax.Array, angles: Angles | None) -> tuple[jax.Array, jax.Array]:
        """Returns what a cache holds: the turned rotary keys [B, 1, S, R] and the latents [B, 1, S, C]."""
        latent_BSC, rotary_BSR = self.latent_norm(self.latent(x_BSD)), self.rotary_key(x_BSD)
        return rotate(rotary_BSR[:, None], angles), latent_BSC[:, None]

    def queries(self, x_BTD: jax.Array, angles: Angles | None) -> tuple[jax.Array, jax.Array]:
        """Returns the queries' plain part, BNTH, and their turned one, BNTR."""
        if self.cfg.query_latent_dim is not None:
            x_BTD = self.query_latent_norm(self.query_latent(x_BTD))
        q, rotary = jnp.split(self.query(x_BTD), [self.cfg.head_dim], -1)
        return q, rotate(rotary, angles)

    def kernels(self) -> tuple[jax.Array, jax.Array]:
        """Returns the kernels [C, N, H] and [C, N, U] that make keys and values of latents."""
        dtype = jnp.dtype(self.cfg.dtype)
        return self.key_up()[0].astype(dtype), self.value_up()[0].astype(dtype)

    def __call__(
        self,
        x_BTD: jax.Array,
        rotary_B1SR: jax.Array | Quantized,
        latent_B1SC: jax.Array | Quantized,
        context: AttentionContext,
        window: jax.Array | None = None,
        dropout_rate: MaybeScalar = None,
    ) -> jax.Array:
        """Makes each head's keys and values: fewest operations where each key is read by many queries."""
        q_BNTH, turned_BNTR = self.queries(x_BTD, context.query_angles)
        rotary_B1SR, latent_BSC = numbers(rotary_B1SR, q_BNTH.dtype), numbers(latent_B1SC, q_BNTH.dtype)[:, 0]
        keys_CNH, values_CNU = self.kernels()
        k_BNSH = jnp.einsum('BSC,CNH->BNSH', latent_BSC, keys_CNH)
        rotary_BNSR = jnp.broadcast_to(rotary_B1SR, (*k_BNSH.shape[:3], rotary_B1SR.shape[-1]))
        q, k = jnp.concatenate([q_BNTH, turned_BNTR], -1), jnp.concatenate([k_BNSH, rotary_BNSR], -1)
        v_BNSU = jnp.einsum('BSC,CNU->BNSU', latent_BSC, values_CNU)
        return self.out(self.mix(q, k, v_BNSU, context, window, dropout_rate))

    def absorbed(
        self,
        x_BTD: jax.Array,
        rotary_B1SR: jax.Array | Quantized,
        latent_B1SC: jax.Array | Quantized,
        context: AttentionContext,
        window: jax.Array | None = None,
        dropout_rate: MaybeScalar = None,
    ) -> jax.Array:
        """The same function with the kernels of keys and values on the queries' side: the latents are the keys and
        values of all heads, so that a step never makes those of earlier tokens (2.1.2)."""
        q_BNTH, turned_BNTR = self.queries(x_BTD, context.query_angles)
        keys_CNH, values_CNU = self.kernels()
        q_BNTC = jnp.einsum('BNTH,CNH->BNTC', q_BNTH, keys_CNH)
        rotary_B1SR, how = numbers(rotary_B1SR, q_BNTC.dtype), (context, window, dropout_rate)
        if self.few(q_BNTC):  # which read the latents where they are
            out_BNTC = self.mix(q_BNTC, latent_B1SC, latent_B1SC, *how, apart=(turned_BNTR, rotary_B1SR))
        else:
            latent_B1SC = numbers(latent_B1SC, q_BNTC.dtype)
            q, k = jnp.concatenate([q_BNTC, turned_BNTR], -1), jnp.concatenate([latent_B1SC, rotary_B1SR], -1)
            out_BNTC = self.mix(q, k, latent_B1SC, *how)
        return self.out(jnp.einsum('BNTC,CNU->BNTU', out_BNTC, values_CNU))
