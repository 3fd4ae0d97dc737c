"""Optimizers, each tuned by the same search and confirmed with fresh seeds (as Dahl et al. 2023 ask for).

    tformer sweep --config=configs/sweeps/optimizers.py --workdir=runs/optimizers/adamw
    tformer sweep --config=configs/sweeps/optimizers.py:muon --workdir=runs/optimizers/muon
    tformer sweep --config=configs/sweeps/optimizers.py:schedule_free --workdir=runs/optimizers/schedule_free
    tformer sweep --config=configs/sweeps/optimizers.py:lion --workdir=runs/optimizers/lion
    tformer report runs/optimizers/*/ --timing=false [--baseline=adamw/ITS_BEST_ARM]

Each search draws 16 points of a Sobol sequence over the learning rate (two and a half decades), the weight decay and
the warm-up of a small language model of the standard library's bytes, one seed each. The best arm and the values of the
recipe then train with five fresh seeds. `smoke` takes two steps.

Machine and time: 26 runs of 1,000 steps a method, 3 to 5 minutes on two CPU cores with --parallel=2.
"""

from typing import Literal

from tformer.lab.sweep import Overrides, Sweep, integers, log_uniform, search

SMALL = {
    'model.emb_dim': 32,
    'model.mlp_dim': 96,
    'model.num_heads': 2,
    'train.num_steps': 1000,
    'train.batch_size': 16,
    'train.eval_every': 1000,
    'optimizer.warmup_steps': 100,
    'evaluate.max_examples': 4,
}
# of each method: the lowest learning rate, and what differs from the recipe
METHODS: dict[str, tuple[float, Overrides]] = {
    'adamw': (3e-4, {}),
    'muon': (3e-4, {'optimizer.name': 'muon'}),
    # no schedule, and larger rates (Defazio et al. 2024, 4.1)
    'schedule_free': (1e-3, {'optimizer.name': 'schedule_free', 'optimizer.schedule': 'constant'}),
    # a third of Adam's rates and ten times its decay (Chen et al. 2023, 5: a third to a tenth of the rate)
    'lion': (1e-4, {'optimizer.name': 'lion', 'optimizer.learning_rate': 2e-4, 'optimizer.weight_decay': 1.0}),
}


def get_sweep(size: Literal['adamw', 'muon', 'schedule_free', 'lion', 'smoke'] = 'adamw') -> Sweep:
    if size == 'smoke':
        space = {'optimizer.learning_rate': log_uniform(1e-4, 1e-2)}
        return Sweep('../lm_stdlib.py:smoke', search(space, 'qmc', trials=2, confirm=2))
    lowest, method = METHODS[size]
    decay = 10 if size == 'lion' else 1
    space = {
        'optimizer.learning_rate': log_uniform(lowest, 300 * lowest),
        'optimizer.weight_decay': log_uniform(0.01 * decay, 1.0 * decay),
        'optimizer.warmup_steps': integers(1, 300),
    }
    return Sweep('../lm_stdlib.py:bytes', search(space, 'qmc', trials=16, baseline={**SMALL, **method}))
