"""Batch norm in place of layer norm: its statistics do not hold for other batches (Shen et al. 2020, 3).

    tformer sweep --config=configs/sweeps/batchnorm.py --workdir=runs/batchnorm --dry_run
    tformer sweep --config=configs/sweeps/batchnorm.py --workdir=runs/batchnorm --parallel=2

Where training uses a batch's own mean and variance evaluation has running ones, so `train/loss` and `valid/loss` part.
Before and after each sub-layer, three seeds of each of four arms; a trial is configs/g2p.py:demo at half its width for
a fifth of its steps, on one device: batch norm needs the whole batch. `smoke`: two steps.

Machine and time: not run here.
"""

from tformer.lab.sweep import Sweep, grid, product, seeds


def get_sweep(size: str = 'small') -> Sweep:
    arms = grid({'model.norm_placement': ['pre', 'post'], 'model.norm': ['layernorm', 'batchnorm']})
    if size == 'smoke':
        return Sweep('../g2p.py:smoke', product([{'mesh.data': 1}], arms))
    tiny = {
        'model.emb_dim': 64,
        'model.mlp_dim': 256,
        'data.num_buckets': 2,
        'train.num_steps': 520,
        'train.eval_every': 260,
        'evaluate.max_examples': 2000,
        'mesh.data': 1,
    }
    return Sweep('../g2p.py:demo', product([tiny], arms, seeds(3)))
