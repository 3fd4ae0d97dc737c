"""A search for the learning rate, weight decay and dropout of a small model, by rungs (Li et al. 2020).

    tformer sweep --config=configs/sweeps/tuning.py --workdir=runs/tuning --dry_run
    tformer sweep --config=configs/sweeps/tuning.py --workdir=runs/tuning --parallel=2
    tformer sweep --config=configs/sweeps/tuning.py:whole --workdir=runs/whole       # without early stopping

The model has one layer on either side, 64 wide, and trains for 270 steps on the data of the g2p demo. The search draws
27 arms by chance and pauses them after 30 and 90 steps; a third goes on from each. The best arm and the recipe's own
values run again with five fresh seeds. `smoke` draws two arms of two steps.

Machine and time: 19 minutes on two CPU cores beside other work, 6 of them CPU time.
"""

from typing import Literal

from tformer.lab.sweep import Sweep, asha, log_uniform, search, uniform

SPACE = {
    'optimizer.learning_rate': log_uniform(1e-4, 1e-1),
    'optimizer.weight_decay': log_uniform(1e-3, 1.0),
    'model.dropout_rate': uniform(0.0, 0.3),
}
BRIEF = {
    'model.emb_dim': 64,
    'model.mlp_dim': 256,
    'model.num_encoder_layers': 1,
    'model.num_decoder_layers': 1,
    'data.length': 16,
    'data.encoder_length': 16,
    'data.num_buckets': 1,
    'optimizer.warmup_steps': 20,
    'train.num_steps': 270,
    'train.batch_size': 64,
    'train.eval_every': 30,
    'train.eval_batches': 4,
    'evaluate.max_examples': 500,
    'evaluate.samples': 0,
}


def get_sweep(size: Literal['asha', 'whole', 'smoke'] = 'asha') -> Sweep:
    if size == 'smoke':
        return Sweep('../g2p.py:smoke', search(SPACE, 'random', trials=2, confirm=2))
    rungs = asha(rungs=2) if size == 'asha' else None
    return Sweep('../g2p.py:demo', search(SPACE, 'random', trials=27, rungs=rungs, baseline=BRIEF))
