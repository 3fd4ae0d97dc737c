"""Grokking: what is known by heart for long is understood at last, with weight decay (Power et al. 2022, figures 1, 2).

    tformer sweep --config=configs/sweeps/grokking.py --workdir=runs/grokking --dry_run
    tformer sweep --config=configs/sweeps/grokking.py --workdir=runs/grokking --parallel=2

Division mod 59 by one layer. To compare in metrics.jsonl: the steps at which `train/loss` falls below 0.1 nats and at
which `valid/accuracy` passes 99 %. Three seeds of each of two arms. `smoke`: two steps.

Machine and time: two CPU cores that did other work too, 9 minutes with --together=6.
"""

from typing import Literal

from tformer.lab.sweep import Sweep, grid, product, seeds


def get_sweep(size: Literal['small', 'smoke'] = 'small') -> Sweep:
    arms = grid({'optimizer.weight_decay': [1.0, 0.0]})
    if size == 'smoke':
        return Sweep('../algorithmic.py:smoke', arms)
    return Sweep('../algorithmic.py:small', product(arms, seeds(3)))
