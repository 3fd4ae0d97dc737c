"""How many heads at the same width (Vaswani et al. 2017, table 3, rows A): one sees less than several.

    tformer sweep --config=configs/sweeps/heads.py --workdir=runs/heads --dry_run
    tformer sweep --config=configs/sweeps/heads.py --workdir=runs/heads --parallel=2

Heads share the width, so that parameters and FLOPs are the same. Three seeds of each of four arms; a trial is
configs/g2p.py:demo at half its width for a fifth of its steps. `smoke`: two steps.

Machine and time: not run here.
"""

from tformer.lab.sweep import Sweep, grid, product, seeds


def get_sweep(size: str = 'small') -> Sweep:
    arms = grid({'model.num_heads': [8, 4, 2, 1]})
    if size == 'smoke':
        return Sweep('../g2p.py:smoke', arms)
    tiny = {
        'model.emb_dim': 64,
        'model.mlp_dim': 256,
        'data.num_buckets': 2,
        'train.num_steps': 520,
        'train.eval_every': 520,
        'evaluate.max_examples': 2000,
    }
    return Sweep('../g2p.py:demo', product([tiny], arms, seeds(3)))
