"""Norm placement and warm-up: post-norm needs a warm-up of the learning rate, pre-norm does not (Xiong et al. 2020).

    tformer sweep --config=configs/sweeps/warmup.py --workdir=runs/warmup --dry_run
    tformer sweep --config=configs/sweeps/warmup.py --workdir=runs/warmup --parallel=2

Encoder and decoder have six layers each, 64 wide, on the data of the g2p demo, with Adam at a constant rate and without
clipping. Three seeds of each of four arms. `smoke` takes two steps.

Machine and time: 7 minutes on two CPU cores.
"""

from typing import Literal

from tformer.lab.sweep import Sweep, grid, product, seeds

DEEP = {
    'model.emb_dim': 64,
    'model.mlp_dim': 256,
    'model.num_encoder_layers': 6,
    'model.num_decoder_layers': 6,
    'model.scan_layers': True,
    'data.length': 16,
    'data.encoder_length': 16,
    'data.num_buckets': 2,
    'optimizer.name': 'adam',
    'optimizer.schedule': 'constant',
    'optimizer.learning_rate': 1e-3,
    'optimizer.clip_norm': None,
    'train.num_steps': 300,
    'train.batch_size': 64,
    'train.eval_every': 300,
    'train.eval_batches': 20,
    'evaluate.max_examples': 1000,
    'evaluate.samples': 0,
}


def get_sweep(size: Literal['small', 'smoke'] = 'small') -> Sweep:
    arms = grid({'model.norm_placement': ['post', 'pre'], 'optimizer.warmup_steps': [100, 0]})
    if size == 'smoke':
        return Sweep('../g2p.py:smoke', arms)
    return Sweep('../g2p.py:demo', product([DEEP], arms, seeds(3)))
