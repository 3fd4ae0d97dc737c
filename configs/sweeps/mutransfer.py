"""With muP the best learning rate stays the same as a model widens; without it, it falls (Yang et al. 2022, figure 1).

    tformer sweep --config=configs/sweeps/mutransfer.py --workdir=runs/mutransfer --dry_run
    tformer sweep --config=configs/sweeps/mutransfer.py --workdir=runs/mutransfer --together=18 --parallel=2
    tformer sweep --config=configs/sweeps/mutransfer.py:large --workdir=runs/mutransfer

The report draws the loss against the learning rate, with a line for each width. The models are small language models of
the standard library's bytes, 32, 64 and 128 wide with heads of 16, at six rates, with and without muP, whose base is
the smallest width; three seeds of each. `large` has widths of 128 to 2048 at eleven rates and one seed. `smoke` takes
two steps. Data, widths and rates differ from those of the paper.

Machine and time: 108 trials in 5 minutes on two CPU cores, in 22 on two that were shared with other work.
"""

from collections.abc import Iterable
from typing import Literal

from tformer.lab.sweep import Overrides, Sweep, grid, product, seeds


def table(widths: Iterable[int], head_dim: int, rates: Iterable[float]) -> list[Overrides]:
    """Returns all widths, the first of which is muP's base, at all rates, with the standard parametrization and muP."""
    base, *_ = widths = list(widths)
    shapes = [
        {'model.emb_dim': width, 'model.mlp_dim': 4 * width, 'model.num_heads': width // head_dim} for width in widths
    ]
    kinds = [{}, {'model.parametrization': 'mup', 'model.base_emb_dim': base}]
    return product(kinds, shapes, grid({'optimizer.learning_rate': rates}))


def get_sweep(size: Literal['small', 'large', 'smoke'] = 'small') -> Sweep:
    plain = {
        'model.activation': 'relu',
        'data.tokenizer': 'byte',
        'optimizer.schedule': 'constant',
        'optimizer.weight_decay': 0.0,
        'optimizer.warmup_steps': 0,
    }
    if size == 'large':
        widths, rates = (128, 256, 512, 1024, 2048), [2.0**power for power in range(-16, -5)]
        return Sweep('../lm_stdlib.py', product([plain], table(widths, 32, rates)))
    if size == 'smoke':
        return Sweep('../lm_stdlib.py:smoke', product([plain], table((16, 32), 8, [1e-3, 2e-3])))
    short = {
        **plain,
        'model.num_decoder_layers': 2,
        'model.max_len': 64,
        'data.length': 64,
        'data.num_buckets': 1,
        'train.num_steps': 200,
        'train.eval_every': 200,
        'train.eval_batches': 20,
        'evaluate.max_examples': 4,
        'evaluate.samples': 0,
    }
    rates = [2.0**power for power in range(-9, -3)]
    return Sweep('../lm_stdlib.py', product([short], table((32, 64, 128), 16, rates), seeds(3)))
