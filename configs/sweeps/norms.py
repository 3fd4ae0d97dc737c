"""Layer norm and RMS norm, before, after and around each sub-layer, on the data of the g2p demo.

    tformer sweep --config=configs/sweeps/norms.py --workdir=runs/norms --dry_run
    tformer sweep --config=configs/sweeps/norms.py --workdir=runs/norms

Xiong et al. 2020 (pre, post), Zhang & Sennrich 2019 (RMS norm), Ding et al. 2021 (sandwich). There are three seeds of
each of six arms; a trial is configs/g2p.py:demo at half its width for a quarter of its steps. `smoke` takes two steps.

Machine and time: not run here.
"""

from typing import Literal

from tformer.lab.sweep import Sweep, grid, product, seeds


def get_sweep(size: Literal['small', 'smoke'] = 'small') -> Sweep:
    arms = grid({'model.norm': ['layernorm', 'rmsnorm'], 'model.norm_placement': ['pre', 'post', 'sandwich']})
    if size == 'smoke':
        return Sweep('../g2p.py:smoke', arms)
    tiny = {'model.emb_dim': 64, 'model.mlp_dim': 256, 'train.num_steps': 650, 'train.eval_every': 325}
    return Sweep('../g2p.py:demo', product([tiny], arms, seeds(3)))
