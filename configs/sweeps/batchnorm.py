"""Batch norm instead of layer norm: statistics of one batch do not fit the next (Shen et al. 2020, section 3).

    tformer sweep --config=configs/sweeps/batchnorm.py --workdir=runs/batchnorm --dry_run
    tformer sweep --config=configs/sweeps/batchnorm.py --workdir=runs/batchnorm --parallel=2

In training batch norm uses the mean and variance of the batch; in evaluation it uses running averages. The model is a
small language model of the standard library's bytes, with the norm before or after each sub-layer. Three seeds of each
of four arms run on one device, because batch norm needs the whole batch. `g2p` is the same on configs/g2p.py:demo.
`smoke` takes two steps.

Machine and time: 7 minutes on two CPU cores that were shared with other work.
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
