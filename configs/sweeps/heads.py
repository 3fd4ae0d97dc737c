"""The number of heads at the same width (Vaswani et al. 2017, table 3, rows A): one head is worse than several.

    tformer sweep --config=configs/sweeps/heads.py --workdir=runs/heads --dry_run
    tformer sweep --config=configs/sweeps/heads.py --workdir=runs/heads --parallel=2

The heads share the width, so parameters and FLOPs are equal. The model is a small language model of the standard
library's bytes, with six seeds of each of four arms. The seeds begin at 6, because results of 0 to 5 had been seen
before. `smoke` takes two steps.

Machine and time: 24 trials in 6 minutes with --together=6 on two CPU cores that were shared with other work.
"""

from typing import Literal

from tformer.lab.sweep import Sweep, grid, product, seeds


def get_sweep(size: Literal['small', 'smoke'] = 'small') -> Sweep:
    arms = grid({'model.num_heads': [8, 4, 2, 1]})
    if size == 'smoke':
        return Sweep('../lm_stdlib.py:smoke', arms)
    return Sweep('../lm_stdlib.py:bytes', product(arms, seeds(6, first=6)))
