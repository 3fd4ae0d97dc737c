"""Position encodings beyond the trained length: how the loss goes on at twice and four times it (Press et al. 2022).

    tformer sweep --config=configs/sweeps/positions.py --workdir=runs/positions --dry_run
    tformer sweep --config=configs/sweeps/positions.py --workdir=runs/positions --parallel=2

A small language model of the standard library's bytes, trained in windows of 64 and scored in windows of 64, 128 and
256: `loss_at_N` in result.json. Of learned positions those from 64 on were never trained. Three seeds of each of six
arms. `smoke`: two steps.

Sinusoidal: Vaswani et al. 2017; learned: Gehring et al. 2017; rope: Su et al. 2021; relative: Raffel et al. 2020; none:
Haviv et al. 2022. Machine and time: not run here.
"""

from tformer.lab.sweep import Sweep, grid, product, seeds

SHORT = {
    'model.emb_dim': 96,
    'model.mlp_dim': 256,
    'model.num_decoder_layers': 2,
    'model.max_len': 256,
    'data.tokenizer': 'byte',
    'data.length': 64,
    'data.num_buckets': 1,
    'train.num_steps': 400,
    'train.batch_size': 32,
    'train.eval_every': 400,
    'train.eval_batches': 20,
    'evaluate.lengths': (64, 128, 256),
    'evaluate.max_examples': 8,
    'evaluate.samples': 0,
}


def get_sweep(size: str = 'small') -> Sweep:
    arms = grid({'model.position': ['sinusoidal', 'learned', 'rope', 'alibi', 'relative', None]})
    if size == 'smoke':
        return Sweep('../lm_stdlib.py:smoke', product([{'evaluate.lengths': (32, 64)}], arms))
    return Sweep('../lm_stdlib.py', product([SHORT], arms, seeds(3)))
