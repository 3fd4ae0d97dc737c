"""Shapes of large published models: `tformer inspect` shows what they would need on a cluster.

    tformer inspect --config=configs/shapes.py:llama_70b --config.mesh.fsdp=256 --config.mesh.tensor=8
    tformer train --config=configs/shapes.py:llama_7b --config.data.path=DIR --workdir=runs/llama

Each is a model of configs/architectures with activations in bfloat16 and every layer recomputed in the backward pass.
DIR holds {train,valid}.txt. Arguments: the keys of SHAPES; `smoke`, a size that any machine trains.
"""

import pathlib
from typing import Any

from ml_collections import ConfigDict

from tformer.config import difference, load, override, recipe

ARCHITECTURES = f'{pathlib.Path(__file__).parent}/architectures'

SHAPES = {
    'llama_7b': 'llama.py',  # Touvron et al. 2023 (Llama 2), 2.2 and table 1: 4,096 tokens, 4M a batch
    'llama_13b': 'llama.py:llama2_13b',  # the same
    'llama_8b': 'llama.py:llama3_1_8b',  # Llama Team 2024, table 3: 8,192 tokens
    'llama_70b': 'llama.py:llama3_1_70b',  # the same: 80 layers, 8,192 wide, 64 heads on 8, 28,672, 128,256 tokens
    'mixtral_8x7b': 'mixtral.py',  # Jiang et al. 2024, table 1
    'gpt2_xl': 'gpt2.py:xl',  # Radford et al. 2019, table 2: 48 layers, 1,600 wide
    't5_11b': 't5.py:11b',  # Raffel et al. 2020, 3.7: 24 + 24 layers, 1,024 wide, 128 heads of 128, 65,536
    'bert_large': 'bert.py:large',  # Devlin et al. 2019, 3: 24 layers, 1,024 wide, 16 heads
}


def get_config(arguments: str = '') -> ConfigDict:
    executed = {'model.dtype': 'bfloat16', 'model.remat': 'full'}
    base = override(load(f'{ARCHITECTURES}/{SHAPES["llama_7b"]}'), executed)

    def shape(name: str) -> dict[str, Any]:
        made = override(load(f'{ARCHITECTURES}/{SHAPES[name]}'), executed)
        return {field: value for field, (_, value) in difference(base, made).items()}

    smoke = {
        'model.vocab_size': 400,
        'model.encoder_vocab_size': None,
        'model.emb_dim': 32,
        'model.mlp_dim': 64,
        'model.num_encoder_layers': 4,
        'model.num_decoder_layers': 4,
        'model.num_heads': 4,
        'model.num_kv_heads': None,
        'model.head_dim': None,
        'model.max_len': 64,
        'data.tokenizer_vocab_size': 400,
        'data.length': 32,
        'data.encoder_length': None,
        'decode.max_len': 16,
        'train.num_steps': 2,
        'train.batch_size': 8,
        'train.eval_batches': 1,
        'evaluate.max_examples': 16,
    }
    return recipe(base, arguments, **{name: shape(name) for name in SHAPES}, smoke=smoke)
