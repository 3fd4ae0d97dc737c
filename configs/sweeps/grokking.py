"""Grokking: with weight decay, a memorised task is generalised much later (Power et al. 2022, figures 1 and 2).

    tformer sweep --config=configs/sweeps/grokking.py --workdir=runs/grokking --dry_run
    tformer sweep --config=configs/sweeps/grokking.py --workdir=runs/grokking --parallel=2

One layer learns division modulo 59. Compare the steps at which `train/loss` falls below 0.1 nats and `valid/accuracy`
passes 99 %: `--reach=train/loss=0.1,valid/accuracy=0.99`. Three seeds of each of two arms. `smoke` takes two steps.

Machine and time: 5 minutes with --together=6 on two CPU cores that were shared with other work.
"""

from typing import Literal

from tformer.lab.sweep import Sweep, grid, product, seeds


def get_sweep(size: Literal['small', 'smoke'] = 'small') -> Sweep:
    arms = grid({'optimizer.weight_decay': [1.0, 0.0]})
    if size == 'smoke':
        return Sweep('../algorithmic.py:smoke', arms)
    return Sweep('../algorithmic.py:small', product(arms, seeds(3)))
