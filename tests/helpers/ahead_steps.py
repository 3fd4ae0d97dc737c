"""Compiles loops of greedy steps of decoding, the last with a cache of eight bits; prints a line of JSON for each.

python tests/helpers/ahead_steps.py v5e:1x1 | h100:1
"""

import dataclasses
import json
import sys

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.sharding import NamedSharding, PartitionSpec

from tformer.commands.planning import dry_run
from tformer.config import Decode, Mesh, Model
from tformer.decode.generate import make_generate
from tformer.distributed import costs, devices, hlo, meshes, sharding
from tformer.model import build

ROWS, PROMPT, NEW = 4, 128, 128
MODEL = Model(
    family='decoder', vocab_size=8192, emb_dim=1024, mlp_dim=4096, num_heads=8, num_decoder_layers=4, max_len=256,
    position='rope', norm='rmsnorm', dropout_rate=0.0, dtype='bfloat16', mlp_bias=False,
)  # fmt: skip
GROUPED = dataclasses.replace(MODEL, num_kv_heads=2)
CASES = ((MODEL, None), (GROUPED, None), (GROUPED, 'int8'))
CACHED = 2 * MODEL.num_decoder_layers * ROWS * (PROMPT + NEW) * MODEL.emb_dim  # keys and values


def main(device: str) -> None:
    target = devices.Target.parse(device)
    dry_run.pretend(1)
    devices.prepare(target.device.platform)
    mesh_config = Mesh(data=1)
    mesh = meshes.make_mesh(mesh_config, target.devices())
    with sharding.placed(mesh, mesh_config):
        place = NamedSharding(mesh, PartitionSpec())

        def placed(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)

        batch = {'inputs': placed(jax.ShapeDtypeStruct((ROWS, PROMPT), jnp.int32))}
        for cfg, bits in CASES:
            model, decode = build(cfg), Decode(strategy='greedy', max_len=NEW, cache_quantization=bits)
            variables = jax.eval_shape(
                lambda batch, model=model: nn.meta.unbox(model.init(jax.random.key(0), batch)), batch
            )
            executable = (
                make_generate(model, decode, eos=1).lower(jax.tree.map(placed, variables), batch, None).compile()
            )
            steps = [work for work in costs.works(hlo.parse(executable.as_text())) if work.times == NEW]
            row = {
                'parameters': sum(x.size for x in jax.tree.leaves(variables)),
                'bytes': sum(work.bytes for work in steps),
                'attention': sum(work.flops for work in steps if 'attention.mix' in work.source),
            }
            print(json.dumps(row), flush=True)


if __name__ == '__main__':
    main(sys.argv[1])
