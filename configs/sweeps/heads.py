"""How many heads at the same width (Vaswani et al. 2017, table 3, rows A): one sees less than several.

    tformer sweep --config=configs/sweeps/heads.py --workdir=runs/heads --dry_run
    tformer sweep --config=configs/sweeps/heads.py --workdir=runs/heads --parallel=2

Heads share the width, so that parameters and FLOPs are the same. A small language model of the standard library's
bytes, six seeds of each of four arms; `g2p`: of configs/g2p.py:demo, three seeds. `smoke`: two steps.

Machine and time: two CPU cores that did other work too, 21 minutes.
"""

from tformer.lab.sweep import Sweep, grid, product, seeds

G2P = {
    'model.emb_dim': 64,
    'model.mlp_dim': 256,
    'data.num_buckets': 2,
    'train.num_steps': 520,
    'train.eval_every': 520,
    'evaluate.max_examples': 2000,
}


def get_sweep(size: str = 'small') -> Sweep:
    arms = grid({'model.num_heads': [8, 4, 2, 1]})
    if size == 'smoke':
        return Sweep('../lm_stdlib.py:smoke', arms)
    if size == 'g2p':
        return Sweep('../g2p.py:demo', product([G2P], arms, seeds(3)))
    return Sweep('../lm_stdlib.py:bytes', product(arms, seeds(6)))
