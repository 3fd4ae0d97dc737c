"""Smaller caches: multi-head, grouped and multi-query attention (Ainslie et al. 2023, table 1; Shazeer 2019), latents.

    tformer sweep --config=configs/sweeps/gqa.py --workdir=runs/gqa --dry_run
    tformer sweep --config=configs/sweeps/gqa.py --workdir=runs/gqa
    tformer sweep --config=configs/sweeps/gqa.py:small --workdir=runs/small --parallel=2

By default (`large`) each arm is configs/t5.py:v1_1_large with 16 (all), 8, 4 or 1 key and value heads in every
attention, trained from scratch. The paper's table differs: it continues from a multi-head checkpoint with averaged
heads, which is not available here, keeps all heads in the encoder, and has fewer heads at the XXL size only. Fewer
heads save time in generation: measure it by `tformer benchmark` with the fields of an arm.

`small` is a language model of the standard library's source with 8, 4, 2 and 1 heads, which cache 256, 128, 64 and 32
numbers for each token and layer, and with latents (DeepSeek-AI 2024, 2.1) of as many numbers as 2 heads; three seeds
each, for a laptop. `smoke` takes two steps.

Machine and time: `small` was run on two CPU cores that were shared with other work (docs/results.md; its time was not
taken), `large` not here.
"""

from typing import Literal

from tformer.lab.sweep import Sweep, grid, product, seeds


def get_sweep(size: Literal['large', 'small', 'smoke'] = 'large') -> Sweep:
    if size == 'large':
        return Sweep('../t5.py:v1_1_large', grid({'model.num_kv_heads': [None, 8, 4, 1]}))
    if size == 'smoke':
        return Sweep('../t5.py:smoke', grid({'model.num_kv_heads': [None, 2, 1]}))
    tiny = {
        'model.emb_dim': 128,
        'model.mlp_dim': 256,
        'model.num_heads': 8,
        'model.num_decoder_layers': 2,
        'model.max_len': 128,
        'data.tokenizer': 'byte',
        'data.length': 128,
        'data.num_buckets': 1,
        'train.num_steps': 300,
        'train.eval_every': 300,
        'train.eval_batches': 20,
        'evaluate.max_examples': 8,
        'evaluate.samples': 0,
    }
    arms = [*grid({'model.num_kv_heads': [None, 4, 2, 1]}), {'model.kv_latent_dim': 48, 'model.rotary_dim': 16}]
    return Sweep('../lm_stdlib.py', product([tiny], arms, seeds(3)))
