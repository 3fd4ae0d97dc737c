"""A checkpoint of the hub's library against the same weights here: outputs, and the tensors that are exported again."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import make_hf_reference as references
from tformer import checks, hf
from tformer.config import Config, Data, Decode, Model, Train
from tformer.config.tasks import TASKS
from tformer.layers import outputs
from tformer.model import build

TOLERANCE = 1e-4  # float32


def detection(model: Any, batch: dict) -> jax.Array:
    return model.detection_head(model.features(batch))


def model_of(reference: references.Reference) -> Model:
    """Returns the model of a reference, with its three classes where it has any."""
    return dataclasses.replace(hf.model_of(reference.config, lambda line: None), num_classes=3)


def our_outputs(cfg: Model, params: dict, batch: dict, names: tuple[str, ...]) -> dict[str, np.ndarray]:
    methods = {'logits': '__call__', 'pooled': 'pool', 'detection': detection}
    methods |= {name: outputs.HEADS[name].method for name in references.HEADS.values()}
    model, batch = build(cfg), {name: jnp.asarray(value) for name, value in batch.items()}
    return {name: np.asarray(model.apply({'params': params}, batch, method=methods[name])) for name in names}


def compare(reference: references.Reference) -> dict[str, float]:
    """Returns the largest difference of each output at real tokens."""
    cfg = hf.model_of(reference.config)
    checks.check_here(run_of(cfg))
    head = next((name for name in references.HEADS.values() if name in reference.outputs), None)
    params = hf.import_params(reference.config['model_type'], reference.tensors, cfg, head)
    found = our_outputs(model_of(reference), params, reference.batch, tuple(reference.outputs))
    differences = {}
    for name, expected in reference.outputs.items():
        assert expected.shape == found[name].shape and np.std(expected) > 0.1
        real = reference.batch['positions'] >= 0 if name not in ('pooled', 'class') else ...
        differences[name] = float(np.abs(found[name] - expected)[real].max())
    return differences


def run_of(cfg: Model) -> Config:
    """Returns a run of this model that fits together if the model does."""
    objective = next(name for name, task in TASKS.items() if cfg.family in task.families)
    return Config(cfg, Data(length=8), train=Train(objective=objective, num_steps=1), decode=Decode(max_len=8))


def check_exported(reference: references.Reference) -> None:
    cfg, family = hf.model_of(reference.config, lambda line: None), reference.config['model_type']
    found = hf.export_params(family, hf.import_params(family, reference.tensors, cfg), cfg)
    table = hf.FAMILIES[family]
    left = {key for key in reference.tensors if key not in found}
    assert left <= {*table.copies, *table.zeros}
    for key, tensor in found.items():
        np.testing.assert_array_equal(tensor, reference.tensors[key])
