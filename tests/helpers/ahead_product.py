"""Compiles the product of two square matrices; prints a line of JSON.

python tests/helpers/ahead_product.py v5e:1x1
"""

import json
import sys

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from tformer.commands.planning import dry_run
from tformer.distributed import costs, devices, hlo

SIZE, DTYPE = 4096, 'bfloat16'


def main(text: str) -> None:
    target = devices.Target.parse(text)
    device = target.device
    dry_run.pretend(1)
    devices.prepare(device.platform)
    matrix = jax.ShapeDtypeStruct((SIZE, SIZE), DTYPE, sharding=SingleDeviceSharding(target.devices()[0]))
    works = costs.works(hlo.parse(jax.jit(jnp.matmul).lower(matrix, matrix).compile().as_text()))
    seconds = sum(work.times * (work.cycles or 0) for work in works) / device.clock
    print(json.dumps({'seconds': seconds, 'at_peak': 2 * SIZE**3 / device.flops[DTYPE]}))


if __name__ == '__main__':
    main(sys.argv[1])
