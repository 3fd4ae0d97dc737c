"""Which kernel computes attention: the table of implementations, and `auto`, which picks the best that serves."""

import os
from collections.abc import Callable, Set
from typing import NamedTuple

import jax

from tformer.config import Model
from tformer.errors import UserError, choose
from tformer.layers import kernels
from tformer.layers.accelerators.cudnn import cudnn
from tformer.layers.accelerators.mosaic import mosaic
from tformer.layers.accelerators.splash import flash
from tformer.layers.accelerators.triton import triton
from tformer.layers.blocked import blocked
from tformer.layers.kernels import ScoreOptions
from tformer.layers.masks import AttentionMask
from tformer.layers.positions import POSITIONS

AUTO = 'auto'


def on_arrays(kernel: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Returns a kernel of an array mask_BTS as one of an `AttentionMask`."""

    def function(
        q_BNTH: jax.Array, k_BKSH: jax.Array, v_BKSU: jax.Array, mask: AttentionMask, options: ScoreOptions
    ) -> jax.Array:
        return kernel(q_BNTH, k_BKSH, v_BKSU, mask.array(), options.of_pairs(q_BNTH.shape[2]))

    return function


class Kernel(NamedTuple):
    """An implementation of an `AttentionMask`, the `FEATURES` it serves, and the jax backends it runs on (none named:
    all)."""

    function: Callable[..., jax.Array]
    serves: frozenset[str]
    platforms: tuple[str, ...] = ()
    ordered: bool = False  # relies on the order that `masks.ordered` vouches for
    by_distance: bool = False  # takes a bias as `bias_1NX` where the order is known


FEATURES = {  # what a model may need of its kernel, and the field, or the variable, that needs it
    'bias': 'a position bias (model.position)',
    'softcap': 'model.attention_softcap',
    'sink': 'model.attention_sink',
    'dropout': 'model.attention_dropout_rate',
    'value_dim': 'a model.value_dim other than head_dim',
    'odd_heads': 'a model.head_dim that is not a multiple of 8, or above 256',
    'float32': 'model.dtype=float32',
    'bfloat16': 'model.dtype=bfloat16',
    'deterministic': 'deterministic operations (XLA_FLAGS)',
}

# XLA's flags for the same bits each time. With them a program fails as it runs if two of its layers have the same
# backward attention of cuDNN (jax 0.11.2): XLA writes the flag into the first of equal calls only.
DETERMINISTIC = ('--xla_gpu_deterministic_ops', '--xla_gpu_exclude_nondeterministic_ops')


def needs(cfg: Model, drops: bool = True) -> set[str]:
    """Returns what a model needs of its kernel, keys of `FEATURES`; `drops` says whether its dropout is applied."""
    head_dim = cfg.head_dim or cfg.emb_dim // cfg.num_heads
    asked = {
        'bias': POSITIONS[cfg.position].bias is not None,
        'softcap': cfg.attention_softcap is not None,
        'sink': cfg.attention_sink is not None,
        'dropout': drops and cfg.attention_dropout_rate > 0,
        'value_dim': cfg.kv_latent_dim is not None or cfg.value_dim not in (None, head_dim),
        'odd_heads': cfg.kv_latent_dim is not None or head_dim % 8 > 0 or head_dim > 256,
        'deterministic': deterministic(),
        cfg.dtype: True,
    }
    return {name for name, needed in asked.items() if needed}


def deterministic() -> bool:
    """Returns whether XLA_FLAGS asks GPUs for the same bits each time."""
    given = (flag.partition('=') for flag in os.environ.get('XLA_FLAGS', '').split())
    return any(name in DETERMINISTIC and value.lower() in ('', 'true', '1') for name, _, value in given)


def pick(cfg: Model, platform: str, drops: bool = True) -> str:
    """Returns the key of `KERNELS` that computes a model's attention on `platform`, a jax backend; `drops` as of
    `needs`.

    Raises:
      UserError: the model names a kernel that does not serve it there.
    """
    asked = needs(cfg, drops)
    if cfg.attention_kernel != AUTO:
        line = unserved(cfg.attention_kernel, asked, platform)
        if line is not None:
            raise UserError(line)
        return cfg.attention_kernel
    return next(name for name in BEST.get(platform, ('reference',)) if unserved(name, asked, platform) is None)


def described(cfg: Model, platform: str, *, packed: bool, prefix: bool = False, drops: bool = True) -> str:
    """Returns the pick in words, and why it is none of the kernels that would be faster; `packed` are rows of several
    examples, `prefix` those with one that sees itself whole, `drops` as of `needs`."""
    picked, asked, best = pick(cfg, platform, drops), needs(cfg, drops), BEST.get(platform, ())
    faster = best[: best.index(picked)] if picked in best and cfg.attention_kernel == AUTO else ()
    why = [f'{name} does not serve {", ".join(_missing(KERNELS[name], asked, platform))}' for name in faster]
    windowed = cfg.window is not None and cfg.family == 'encoder'
    unknown = ['packed rows'] * packed + ['a prefix'] * prefix + ['a window of an encoder'] * windowed
    if picked == 'cudnn' and unknown:
        picked, why = 'triton', [f'cudnn does not serve {unknown[0]}']
    if picked == 'flash' and prefix and cfg.window is not None:
        picked, why = 'mosaic', ['flash does not serve a prefix beside a window']
    return f'attention by {picked}' + f' ({"; ".join(why)})' * bool(why)


def unserved(name: str, needs: Set[str], platform: str) -> str | None:
    """Returns one line that says why kernel `name` cannot serve `needs`, keys of `FEATURES`, on `platform`, a jax
    backend, and which kernels can; None if it can."""
    unknown = needs - FEATURES.keys()
    assert not unknown, f'unknown features {sorted(unknown)}'
    lacks = _missing(choose(KERNELS, name, 'model.attention_kernel'), needs, platform)
    if not lacks:
        return None
    able = [other for other, kernel in KERNELS.items() if not _missing(kernel, needs, platform)]
    return f'model.attention_kernel={name} does not serve {", ".join(lacks)}; {", ".join(able)} do'


def _missing(kernel: Kernel, needs: Set[str], platform: str) -> list[str]:
    lacks = [words for feature, words in FEATURES.items() if feature in needs - kernel.serves]
    elsewhere = kernel.platforms and platform not in kernel.platforms
    return lacks + ([f'platform {platform}'] if elsewhere else [])


BEST = {
    'tpu': ('flash', 'mosaic', 'chunked'),
    'gpu': ('cudnn', 'triton', 'chunked'),
}  # the first that serves; elsewhere `reference`

# What kernels of Pallas serve.
SHARED = frozenset({'softcap', 'sink', 'value_dim', 'odd_heads', 'float32', 'bfloat16', 'deterministic'})

KERNELS: dict[str, Kernel] = {
    'reference': Kernel(on_arrays(kernels.reference), frozenset(FEATURES)),
    'chunked': Kernel(on_arrays(kernels.chunked), frozenset(FEATURES)),
    'blocked': Kernel(blocked, frozenset(FEATURES), ordered=True),
    'xla': Kernel(on_arrays(kernels.xla), frozenset({'bias', 'odd_heads', 'float32', 'bfloat16', 'deterministic'})),
    'cudnn': Kernel(cudnn, frozenset({'bias', 'bfloat16'}), ('gpu',), ordered=True, by_distance=True),
    'triton': Kernel(triton, frozenset(FEATURES), ('gpu',), ordered=True, by_distance=True),
    'flash': Kernel(flash, SHARED, ('tpu',), ordered=True),
    'mosaic': Kernel(mosaic, frozenset(FEATURES), ('tpu',), ordered=True, by_distance=True),
}
