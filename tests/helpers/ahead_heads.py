"""Compiles the gradient of attention by our own kernel of an accelerator, for heads of many sizes; JSON, a line each.

python tests/helpers/ahead_heads.py v5e:2x4 | h100:8
"""

import json
import sys

import jax
import jax.numpy as jnp

from tformer.commands.planning import dry_run
from tformer.distributed import devices, hlo
from tformer.distributed.costs import kernels
from tformer.layers import kernel_choice
from tformer.layers.kernels import ScoreOptions
from tformer.layers.masks import AttentionMask

OF_PLATFORM = {'tpu': 'mosaic', 'gpu': 'triton'}
CASES = [
    (size, dtype, bias) for size in (64, 80, 128, 256, 512) for dtype in ('bfloat16', 'float32') for bias in (0, 1)
]
B, N, K, T = 2, 4, 2, 500


def main(device: str) -> None:
    target = devices.Target.parse(device)
    dry_run.pretend(1)
    devices.prepare(target.device.platform)
    kernel = kernel_choice.KERNELS[OF_PLATFORM[target.jax_platform]].function
    mesh = jax.sharding.Mesh(target.devices()[:1], ('data',))
    place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())

    def array(shape: tuple[int, ...], dtype: str) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=place)

    def gradient(arrays: dict[str, jax.Array], places_BT: jax.Array, key: jax.Array) -> dict[str, jax.Array]:
        def loss(arrays: dict[str, jax.Array]) -> jax.Array:
            mask = AttentionMask(places_BT, places_BT, causal=True, order='behind')
            dropout = {'dropout_rate': 0.1, 'dropout_key': jax.random.wrap_key_data(key)}
            options = ScoreOptions(0.1, bias_1NX=arrays.get('bias'), **dropout)
            return (kernel(arrays['q'], arrays['k'], arrays['v'], mask, options) ** 2).sum(dtype=jnp.float32)

        return jax.grad(loss)(arrays)

    for size, dtype, bias in CASES:
        arrays = {'q': array((B, N, T, size), dtype), **{name: array((B, K, T, size), dtype) for name in 'kv'}}
        arrays |= {'bias': array((1, N, 2 * T - 1), 'float32')} if bias else {}
        with jax.set_mesh(mesh):
            compiled = jax.jit(gradient).lower(arrays, array((B, T), 'int32'), array((2,), 'uint32')).compile()
        found = sum(kernels(hlo.parse(compiled.as_text())).values())
        print(json.dumps({'case': [size, dtype, bias], 'kernels': found}), flush=True)


if __name__ == '__main__':
    main(*sys.argv[1:])
