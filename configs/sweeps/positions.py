"""Position encodings beyond the trained length: the loss at two and four times that length (Press et al. 2022).

    tformer sweep --config=configs/sweeps/positions.py --workdir=runs/positions --dry_run
    tformer sweep --config=configs/sweeps/positions.py --workdir=runs/positions --parallel=2

A small language model of the standard library's bytes is trained in windows of 64 and scored in windows of 64, 128 and
256: `loss_at_N` in result.json. Learned positions from 64 on are never trained. Three seeds of each of six arms.
`smoke` takes two steps.

Sinusoidal: Vaswani et al. 2017; learned: Gehring et al. 2017; rope: Su et al. 2021; relative: Raffel et al. 2020; none:
Haviv et al. 2022. Machine and time: 11 minutes on two CPU cores that were shared with other work.
"""

from typing import Literal

from tformer.lab.sweep import Sweep, grid, product, seeds

BEYOND = {'model.max_len': 256, 'evaluate.lengths': (64, 128, 256)}


def get_sweep(size: Literal['small', 'smoke'] = 'small') -> Sweep:
    arms = grid({'model.position': ['sinusoidal', 'learned', 'rope', 'alibi', 'relative', None]})
    if size == 'smoke':
        return Sweep('../lm_stdlib.py:smoke', product([{'evaluate.lengths': (32, 64)}], arms))
    return Sweep('../lm_stdlib.py:bytes', product([BEYOND], arms, seeds(3)))
