"""tformer: one transformer block, three families, every design choice one config field away.

    import jax, tformer

    config = tformer.load_config('configs/lm_stdlib.py:smoke', {'model.vocab_size': '512'})
    batch = tformer.random_batch(config)
    model = tformer.build(config.model)
    logits = model.apply(model.init(jax.random.key(0), batch), batch)
    state = tformer.new_state(config, batch)
    state, metrics = tformer.train_step(config)(state, batch)

    run = tformer.load_run('runs/demo')
    print(run.generate(['transformer']))
    maps = run.activations(run.batch(['transformer']), ['encoder.stack.layers.attention.probabilities'])

Importing tformer does not import JAX: each name is loaded when it is first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tformer.commands.attention import attention as attention
    from tformer.commands.benchmark import benchmark as benchmark
    from tformer.commands.embed import embed as embed
    from tformer.commands.evaluate import evaluate as evaluate
    from tformer.commands.export import export as export
    from tformer.commands.fill import fill as fill
    from tformer.commands.freeze import freeze as freeze
    from tformer.commands.freeze import load_frozen as load_frozen
    from tformer.commands.generate import generate as generate
    from tformer.commands.harness import harness as harness
    from tformer.commands.import_ import import_hub as import_hub
    from tformer.commands.inspect import inspect as inspect
    from tformer.commands.predict import predict as predict
    from tformer.commands.prepare import prepare as prepare
    from tformer.commands.prepare import prepare_set as prepare_set
    from tformer.commands.replay import replay as replay
    from tformer.commands.report import report as report
    from tformer.commands.run import Run as Run
    from tformer.commands.score import score as score
    from tformer.commands.sweep import sweep as sweep
    from tformer.commands.train import train as train
    from tformer.config import Config as Config
    from tformer.config import Data as Data
    from tformer.config import Decode as Decode
    from tformer.config import Evaluate as Evaluate
    from tformer.config import Mesh as Mesh
    from tformer.config import Model as Model
    from tformer.config import Optimizer as Optimizer
    from tformer.config import Train as Train
    from tformer.errors import UserError as UserError
    from tformer.model import build as build
    from tformer.training.by_hand import load_config as load_config
    from tformer.training.by_hand import new_state as new_state
    from tformer.training.by_hand import random_batch as random_batch
    from tformer.training.by_hand import train_step as train_step

    load_run = Run.load

_NAMES = {
    'tformer.commands.attention': ('attention',),
    'tformer.commands.benchmark': ('benchmark',),
    'tformer.commands.embed': ('embed',),
    'tformer.commands.evaluate': ('evaluate',),
    'tformer.commands.export': ('export',),
    'tformer.commands.fill': ('fill',),
    'tformer.commands.freeze': ('freeze', 'load_frozen'),
    'tformer.commands.generate': ('generate',),
    'tformer.commands.harness': ('harness',),
    'tformer.commands.import_': ('import_hub',),
    'tformer.commands.inspect': ('inspect',),
    'tformer.commands.predict': ('predict',),
    'tformer.commands.prepare': ('prepare', 'prepare_set'),
    'tformer.commands.replay': ('replay',),
    'tformer.commands.report': ('report',),
    'tformer.commands.run': ('Run',),
    'tformer.commands.score': ('score',),
    'tformer.commands.sweep': ('sweep',),
    'tformer.commands.train': ('train',),
    'tformer.config': ('Config', 'Data', 'Decode', 'Evaluate', 'Mesh', 'Model', 'Optimizer', 'Train'),
    'tformer.errors': ('UserError',),
    'tformer.model': ('build',),
    'tformer.training.by_hand': ('load_config', 'new_state', 'random_batch', 'train_step'),
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names}

__all__ = sorted([*_MODULES, 'load_run'])


def __getattr__(name: str) -> Any:
    if name == 'load_run':
        return __getattr__('Run').load
    if name not in _MODULES:
        raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
    value = globals()[name] = getattr(importlib.import_module(_MODULES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
