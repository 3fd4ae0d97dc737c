"""Batch norm in place of layer norm: a batch's statistics do not hold for the next (Shen et al. 2020, section 3).

    tformer sweep --config=configs/sweeps/batchnorm.py --workdir=runs/batchnorm --dry_run
    tformer sweep --config=configs/sweeps/batchnorm.py --workdir=runs/batchnorm --parallel=2

Where training uses a batch's own mean and variance, evaluation has running ones. A small language model of the standard
library's bytes, the norm before and after each sub-layer; three seeds of each of four arms, on one device, for batch
norm needs the whole batch. `g2p`: of configs/g2p.py:demo. `smoke`: two steps.

Machine and time: two CPU cores that did other work too, 7 minutes.
"""

from typing import Literal

from tformer.lab.sweep import Sweep, grid, product, seeds

G2P = {
    'model.emb_dim': 64,
    'model.mlp_dim': 256,
    'data.num_buckets': 2,
    'train.num_steps': 520,
    'train.eval_every': 520,
    'evaluate.max_examples': 2000,
}


def get_sweep(size: Literal['small', 'g2p', 'smoke'] = 'small') -> Sweep:
    arms = grid({'model.norm_placement': ['pre', 'post'], 'model.norm': ['layernorm', 'batchnorm']})
    if size == 'smoke':
        return Sweep('../lm_stdlib.py:smoke', product([{'mesh.data': 1}], arms))
    if size == 'g2p':
        return Sweep('../g2p.py:demo', product([{**G2P, 'mesh.data': 1}], arms, seeds(3)))
    return Sweep('../lm_stdlib.py:bytes', product([{'mesh.data': 1}], arms, seeds(3)))
