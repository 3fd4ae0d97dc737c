"""A training that carries all that a run can carry, as one process or several, and every array that it saves."""

import pathlib
from collections.abc import Callable

import jax
import numpy as np
import orbax.checkpoint as ocp

import toy_data
from lives import Life, reserve_port
from places import ROOT
from tformer.training import checkpoint

STEPS = 8


# All that a run carries besides parameters: accumulation, dropout, packed rows of a mixture, averages, moments.
LOADED = (
    '--config.train.microbatches=2 --config.model.dropout_rate=0.1 --config.optimizer.ema_decay=0.9 '
    '--config.data.batching=pack --config.train.skip_spikes=6'
).split()

FAMILIES = {
    'encoder': ['train.objective=masked_lm', 'model.num_encoder_layers=1'],
    'decoder': ['train.objective=causal_lm'],
    'encoder_decoder': [
        'train.objective=span_corruption', 'data.sentinels=8', 'model.num_encoder_layers=1',
        'model.num_decoder_layers=1',
    ],
}  # fmt: skip


def arguments(place: pathlib.Path, family: str, *more: str) -> list[str]:
    """Of a training on a mixture of two sets of running text."""
    for name in 'ab':
        toy_data.running(place / name)
    parts = f'("path={place}/a weight=1", "path={place}/b weight=2")'
    return [
        'train', f'--config={ROOT}/configs/lm_stdlib.py:smoke', f'--config.model.family={family}',
        *(f'--config.{field}' for field in FAMILIES[family]), '--config.data.source=files',
        f'--config.data.mixture={parts}', '--config.data.tokenizer=symbol', '--config.data.length=32',
        f'--config.train.num_steps={STEPS}', '--config.train.eval_every=4', '--config.train.checkpoint_every=1',
        '--config.train.log_every=3', '--config.train.batch_size=16', '--config.evaluate.samples=0', *more,
    ]  # fmt: skip


def begin(
    place: pathlib.Path,
    command: list[str],
    workdir: pathlib.Path,
    processes: int = 1,
    devices: int = 1,
    before: Callable[[], None] | None = None,
    victim: int | None = 0,
    optimised: bool = False,
) -> list[Life]:
    """Starts a run as so many processes, of which the `victim`, None: each, first calls `before`."""
    port = reserve_port()
    together = f'--coordinator=127.0.0.1:{port.getsockname()[1]}', f'--num_processes={processes}'
    lives = [
        Life(
            place, *command, f'--workdir={workdir}',
            *((*together, f'--process_id={number}') if processes > 1 else ()),
            devices=devices, before=before if victim in (None, number) else None, optimised=optimised,
        )
        for number in range(processes)
    ]  # fmt: skip
    lives[0].port = port  # held as long as the life is
    return lives


def end(lives: list[Life]) -> None:
    for life in lives:
        assert life.wait() == 0, life.said[-3000:]


def arrays(workdir: pathlib.Path, step: int) -> dict[str, bytes]:
    """Every array of a checkpoint, by its path, as bytes."""
    here, found = jax.sharding.SingleDeviceSharding(jax.devices()[0]), {}
    for item in checkpoint.ARRAYS:
        with ocp.StandardCheckpointer() as reader:
            shapes = reader.metadata(checkpoint.directory(workdir, step) / item).item_metadata
            target = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here), shapes.tree)
            tree = reader.restore(checkpoint.directory(workdir, step) / item, target)
        for path, x in jax.tree_util.tree_leaves_with_path(tree):
            found[f'{item}{jax.tree_util.keystr(path)}'] = np.asarray(x).tobytes()
    return found
