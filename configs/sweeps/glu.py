"""Gated feed-forwards at the same number of parameters: mlp_dim is matched (Shazeer 2020, GLU variants, table 1).

    tformer sweep --config=configs/sweeps/glu.py --workdir=runs/glu --dry_run
    tformer sweep --config=configs/sweeps/glu.py --workdir=runs/glu --parallel=2

A gate adds a third kernel, so a gated feed-forward has two thirds of the width. No kernel has a bias, as in the paper.
Differences from the paper: its `bilinear` is not among the activations, and its model and data are T5's. There are
three seeds of each of seven arms; a trial is configs/g2p.py:demo at half its width for a quarter of its steps. `smoke`
takes two steps.

Machine and time: not run here.
"""

from typing import Literal

from tformer.lab.sweep import Match, Sweep, one_at_a_time, product, seeds


def get_sweep(size: Literal['small', 'smoke'] = 'small') -> Sweep:
    plain = {'model.mlp_bias': False}
    gates = {'model.activation': ['gelu', 'silu', 'glu', 'reglu', 'geglu', 'swiglu']}
    match = [Match('parameters', 'model.mlp_dim')]
    if size == 'smoke':
        return Sweep('../g2p.py:smoke', one_at_a_time(plain, gates), match)
    tiny = {**plain, 'model.emb_dim': 64, 'model.mlp_dim': 256, 'train.num_steps': 650, 'train.eval_every': 325}
    return Sweep('../g2p.py:demo', product(one_at_a_time(tiny, gates), seeds(3)), match)
