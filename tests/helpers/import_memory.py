"""The peak of the memory of the host while a checkpoint of many files goes onto eight CPU devices.

    python tests/helpers/import_memory.py [--gigabytes=3] [--shards=1]

Writes a bfloat16 Llama of random numbers to a temporary directory, then reads it in a process of its own, which prints
the bytes of the arrays, of the largest tensor, and the growth of the resident memory at its peak, as one JSON line.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import threading
import time

import ml_dtypes
import numpy as np

from tformer.hf import safetensors

LAYERS, VOCAB = 11, 4096


def write(place: pathlib.Path, size: float, shards: int) -> None:
    """Writes a Llama of about `size` bytes in 12 files, one for each layer and one for the embeddings, or in 1."""
    width = max(64, round((size / 2 / (LAYERS * 12 + 1)) ** 0.5 / 64) * 64)
    inner, heads = 8 * width // 3, width // 64
    shapes = {'model.embed_tokens.weight': (VOCAB, width), 'model.norm.weight': (width,)}
    for layer in range(LAYERS):
        names = {f'self_attn.{role}_proj': (width, width) for role in 'qkvo'}
        names |= {'mlp.gate_proj': (inner, width), 'mlp.up_proj': (inner, width), 'mlp.down_proj': (width, inner)}
        names |= {'input_layernorm': (width,), 'post_attention_layernorm': (width,)}
        shapes |= {f'model.layers.{layer}.{name}.weight': shape for name, shape in names.items()}
    rng, dtype = np.random.default_rng(0), np.dtype(ml_dtypes.bfloat16)
    row = rng.normal(size=1 << 16).astype(dtype)
    typed = {name: (dtype, shape) for name, shape in shapes.items()}
    layer = sum(2 * int(np.prod(shape)) for name, shape in shapes.items() if '.layers.0.' in name)
    most = layer if shards > 1 else 1 << 60
    safetensors.write_directory(place, typed, lambda name: np.resize(row, shapes[name]), most)
    fields = {'model_type': 'llama', 'vocab_size': VOCAB, 'hidden_size': width, 'intermediate_size': inner}
    fields |= {'num_hidden_layers': LAYERS, 'num_attention_heads': heads, 'num_key_value_heads': heads}
    fields |= {'max_position_embeddings': 512, 'rms_norm_eps': 1e-6, 'hidden_act': 'silu', 'tie_word_embeddings': True}
    (place / 'config.json').write_text(json.dumps(fields))


def resident() -> int:
    """Returns the bytes of this process that are in memory."""
    return int(pathlib.Path('/proc/self/statm').read_text().split()[1]) * os.sysconf('SC_PAGE_SIZE')


def read(place: pathlib.Path) -> None:
    """Reads the directory onto the devices and prints what that took."""
    import jax

    from tformer import config as config_lib
    from tformer import hf
    from tformer.commands import import_
    from tformer.hf.directory import open_hub

    hub = open_hub(str(place))
    model = hf.model_of(hub.hub_config)
    fields = {'model.param_dtype': 'bfloat16', 'mesh.fsdp': 8, 'mesh.data': 1, 'data.length': 64}
    config = config_lib.override(config_lib.Config(model=model), fields)
    import_.places(config)  # what this traces is no memory of the parameters
    jax.block_until_ready(jax.device_put(np.zeros(8)))
    peak = [before := resident()]
    done = threading.Event()

    def watch() -> None:
        while not done.is_set():
            peak[0] = max(peak[0], resident())
            time.sleep(0.002)

    watcher = threading.Thread(target=watch)
    watcher.start()
    params = jax.block_until_ready(import_.load(hub, config))
    done.set()
    watcher.join()
    found = {
        'files': len(list(place.glob('*.safetensors'))),
        'arrays': sum(x.nbytes for x in jax.tree.leaves(params)),
        'largest_tensor': max(hub.tensors[name].nbytes for name in hub.tensors),
        'peak': peak[0] - before,
    }
    print(json.dumps(found))


def measure(size: float, shards: int) -> dict[str, int]:
    """Returns what `read` prints of a checkpoint of `size` bytes in `shards` files."""
    flags = '--xla_force_host_platform_device_count=8'
    with tempfile.TemporaryDirectory() as place:
        write(pathlib.Path(place), size, shards)
        command = [sys.executable, __file__, f'--read={place}']
        env = {**os.environ, 'JAX_PLATFORMS': 'cpu', 'XLA_FLAGS': flags}
        ran = subprocess.run(command, env=env, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout.splitlines()[-1])


if __name__ == '__main__':
    parser = argparse.ArgumentParser()
    parser.add_argument('--gigabytes', type=float, default=3)
    parser.add_argument('--shards', type=int, default=LAYERS + 1, choices=(1, LAYERS + 1))
    parser.add_argument('--read', type=pathlib.Path)
    asked = parser.parse_args()
    if asked.read:
        read(asked.read)
    else:
        print(json.dumps(measure(asked.gigabytes * 1e9, asked.shards)))
