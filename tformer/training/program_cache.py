"""Programs that are kept from run to run of a process, so that runs which differ only in numbers compile once."""

import collections
import copy
import gc
from collections.abc import Mapping
from typing import Any

from jax.sharding import Mesh

from tformer.config import Config
from tformer.data.tokenizers.tokenizers import Tokenizers
from tformer.evaluation import scorer
from tformer.optim.hyperparameters import standard
from tformer.training.program import Program, make_program

MOST = 2  # programs of other configs or shapes go, and their memory with them

_tokenizers: dict[str, Tokenizers] = {}  # by their fingerprints
_kept: collections.OrderedDict[Any, Program] | None = None  # None: this process trains one run, and keeps nothing


def keep() -> None:
    """Keeps programs from now on. The arrays of a run are not kept."""
    global _kept
    _kept = collections.OrderedDict() if _kept is None else _kept


def forget() -> None:
    """Drops all programs, and keeps none from now on."""
    global _kept
    _kept = None
    _tokenizers.clear()


def program(config: Config, batch: Mapping[str, Any], mesh: Mesh) -> Program:
    """Returns `make_program(config, batch, mesh)`, compiled already if a run of equal shapes has used it.

    A run with a teacher gets a program of its own, because the teacher's variables belong to it.
    """
    if _kept is None or config.train.teacher is not None:
        return make_program(config, batch, mesh)
    shapes = tuple((name, x.shape[1:], x.dtype) for name, x in sorted(batch.items()))
    key = standard(config), shapes, mesh
    made = _kept.pop(key, None) or make_program(config, batch, mesh)
    _kept[key] = made
    if len(_kept) > MOST:
        _kept.popitem(last=False)
        gc.collect()
    return _of(made, config)


def tokenizers(made: Tokenizers) -> Tokenizers:
    """Returns equal tokenizers as one object, because the programs of generation are kept by it."""
    if _kept is None:
        return made
    if len(_tokenizers) > MOST:
        _tokenizers.clear()
    return _tokenizers.setdefault(made.fingerprint, made)


def _of(made: Program, config: Config) -> Program:
    """Returns a program with what another has compiled, and the numbers of `config`."""
    _ = made.jitted_step, made.jitted_init  # are made, and so shared
    found = copy.copy(made)
    found.__dict__.pop('hyper', None)
    found.__dict__['config'] = config
    return found


def score_of(program: Program, config: Config) -> scorer.Scorer:
    """Returns the scorer of a program's evaluations (`scorer.make_scorer`), the same as of a run before."""
    made: scorer.Scorer = program.once(
        'scorer', lambda: scorer.make_scorer(program.model, config, program.mesh, program.reference)
    )
    return made
