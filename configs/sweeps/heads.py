"""How many heads at the same width (Vaswani et al. 2017, table 3, rows A): one sees less than several.

    tformer sweep --config=configs/sweeps/heads.py --workdir=runs/heads --dry_run
    tformer sweep --config=configs/sweeps/heads.py --workdir=runs/heads --parallel=2

Heads share the width, so that parameters and FLOPs are the same. A small language model of the standard library's
bytes, six seeds of each of four arms: not 0 to 5, of which three and then six had been looked at. `smoke`: two steps.

Machine and time: two CPU cores that did other work too, about 45 minutes (`--together=6 --parallel=2`).
"""

from typing import Literal

from tformer.lab.sweep import Sweep, grid, product, seeds


def get_sweep(size: Literal['small', 'smoke'] = 'small') -> Sweep:
    arms = grid({'model.num_heads': [8, 4, 2, 1]})
    if size == 'smoke':
        return Sweep('../lm_stdlib.py:smoke', arms)
    return Sweep('../lm_stdlib.py:bytes', product(arms, seeds(6, first=6)))
