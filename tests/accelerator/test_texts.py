"""Texts that the chip writes are those of the CPU of the same process, token for token, in float32.

In the rehearsal another CPU device stands for the chip.
"""

import jax
import numpy as np
import pytest

from small_decoding import BANNED, CASES, EOS, batch_of, make
from tformer import config
from tformer.config import Mesh
from tformer.decode.generate import make_generate
from tformer.distributed import meshes, sharding

pytestmark = pytest.mark.accelerator

T = 6
WAYS = {
    'greedy': {'strategy': 'greedy'},
    'draws': {'strategy': 'sample', 'num_outputs': 2},
    'beams': {'strategy': 'beam', 'num_outputs': 2},
    'drafted': {'strategy': 'greedy', 'draft': 'prompt', 'draft_len': 2},
}


def written(family, way, device):
    """Returns (tokens_RT, scores_R) of random prompts and parameters, both made on the CPU."""
    cpu, mesh = jax.devices('cpu')[0], Mesh(data=1)
    with jax.default_device(cpu):
        model, variables = make(family, scale=2.0, position='rope')
        variables, batch, key = (
            jax.device_get(variables),
            batch_of(family),
            np.asarray(jax.random.key_data(jax.random.key(2))),
        )
    laid_out, decode = meshes.make_mesh(mesh, [device]), config.Decode(max_len=T, **WAYS[way])
    with sharding.placed(laid_out, mesh), jax.default_matmul_precision('highest'):
        given = jax.device_put((variables, batch, key), jax.NamedSharding(laid_out, jax.P()))
        generate = make_generate(model, decode, eos=EOS, banned=BANNED)
        return jax.device_get(generate(*given[:2], jax.random.wrap_key_data(given[2])))


@pytest.mark.parametrize('family', CASES)
@pytest.mark.parametrize('way', WAYS)
def test_the_chip_writes_what_the_cpu_writes(family, way) -> None:
    tokens, scores = written(family, way, jax.devices('cpu')[0])
    found, others = written(family, way, jax.devices()[-1])
    np.testing.assert_array_equal(found, tokens)
    np.testing.assert_allclose(others, scores, rtol=1e-4, atol=1e-4)
