"""Label smoothing: worse likelihood and better outputs (Szegedy et al. 2016, section 7; Vaswani et al. 2017, 5.4).

    tformer sweep --config=configs/sweeps/label_smoothing.py --workdir=runs/label_smoothing --dry_run
    tformer sweep --config=configs/sweeps/label_smoothing.py --workdir=runs/label_smoothing --parallel=2

Compare `nll`, which is without smoothing, with `accuracy` and `word_error_rate`. Three seeds of each of three arms; a
trial is configs/g2p.py:demo at half its width for three tenths of its steps. `smoke` takes two steps.

Machine and time: 8 minutes on two CPU cores that were shared with other work.
"""

from typing import Literal

from tformer.lab.sweep import Sweep, grid, product, seeds


def get_sweep(size: Literal['small', 'smoke'] = 'small') -> Sweep:
    arms = grid({'train.label_smoothing': [0.0, 0.1, 0.2]})
    if size == 'smoke':
        return Sweep('../g2p.py:smoke', product([{'train.best_metric': 'valid/accuracy'}], arms))
    tiny = {
        'model.emb_dim': 64,
        'model.mlp_dim': 256,
        'data.num_buckets': 2,
        'train.num_steps': 780,
        'train.eval_every': 780,
        'evaluate.max_examples': 2000,
    }
    return Sweep('../g2p.py:demo', product([tiny], arms, seeds(3)))
