"""Model sizes and training lengths for a scaling law and its compute-optimal size (Hoffmann et al. 2022, section 3).

    tformer sweep --config=configs/sweeps/scaling.py --workdir=runs/scaling --dry_run
    tformer sweep --config=configs/sweeps/scaling.py --workdir=runs/scaling --parallel=2
    tformer sweep --config=configs/sweeps/scaling.py:isoflop --workdir=runs/isoflop --parallel=2

The models are language models of the standard library's bytes; each learning-rate schedule is as long as its run. By
default there is a grid of four sizes and four numbers of tokens, to fit loss = E + A / N^alpha + B / D^beta (approach 3
of the paper). `isoflop` has five sizes at each of three budgets of FLOPs, which determine the steps, to find the least
loss of each budget (approach 2). `smoke` takes two steps.

Machine and time: 2 minutes for the grid and 4 for `isoflop` on two CPU cores, three times as long on shared ones.
"""

import pathlib
from typing import Literal

from tformer.config import load, override
from tformer.lab.sweep import Overrides, Sweep, grid, matching, product

LM = f'{pathlib.Path(__file__).parents[1]}/lm_stdlib.py'
TINY = {
    'model.max_len': 64,
    'model.num_heads': 2,
    'data.tokenizer': 'byte',
    'data.length': 64,
    'data.num_buckets': 1,
    'optimizer.warmup_steps': 20,
    'train.eval_batches': 20,
    'train.batch_size': 16,
    'evaluate.max_examples': 4,
    'evaluate.samples': 0,
}


def shape(width: int, layers: int) -> Overrides:
    return {'model.emb_dim': width, 'model.mlp_dim': 3 * width, 'model.num_decoder_layers': layers}


def steps(arm: Overrides, flops: float) -> Overrides:
    """Returns the arm with the number of training steps that is nearest to `flops`."""
    one = override(load(LM), {**arm, 'train.num_steps': 1})
    return {**arm, 'train.num_steps': max(1, round(flops / matching.num_flops(one)))}


def get_sweep(size: Literal['grid', 'isoflop', 'smoke'] = 'grid') -> Sweep:
    if size == 'smoke':
        return Sweep(f'{LM}:smoke', [shape(16, 1), shape(32, 2)])
    fixed = {**TINY, 'train.eval_every': None}
    if size == 'isoflop':
        budgets = {2e11: (16, 24, 32, 48, 64), 6e11: (24, 32, 48, 64, 80), 1.8e12: (32, 48, 64, 80, 96)}
        arms = [(flops, {**fixed, **shape(width, 2)}) for flops, widths in budgets.items() for width in widths]
        return Sweep(LM, [steps(arm, flops) for flops, arm in arms])
    sizes = [shape(*each) for each in ((16, 2), (32, 2), (64, 2), (96, 3))]
    return Sweep(LM, product([fixed], sizes, grid({'train.num_steps': [100, 200, 400, 800]})))
