"""A run's directory: its resolved config and its tokenizers, made once and checked ever after."""

import dataclasses
import json
import pathlib
from collections.abc import Sequence
from typing import Any

from tformer import config as config_lib
from tformer.config import Config
from tformer.data.tokenizers import Tokenizers, train_tokenizers
from tformer.errors import UserError, nearest

# Fields that may differ between a run and its continuation: they change neither the parameters nor the updates.
FREE = ('decode.', 'evaluate.', 'mesh.', 'data.prefetch', 'data.num_threads', 'data.path', 'data.valid_path',
        'data.test_path', 'data.tfds_dir', 'train.log_every', 'train.keep_last', 'train.eval_batches',
        'train.checkpoint_every', 'model.scan_layers', 'model.remat')  # fmt: skip


def load_config(workdir: pathlib.Path) -> Config:
    """Returns the resolved config of a workdir.

    Raises:
      UserError: it is no workdir.
    """
    file = workdir / 'config.json'
    if not file.is_file():
        parent = workdir.parent
        others = [str(path.parent) for path in parent.glob('*/config.json')] if parent.is_dir() else []
        raise UserError(f'{workdir} is no workdir: it has no config.json{nearest(workdir, others) if others else ""}')
    return config_lib.from_dict(json.loads(file.read_text()))


def save_config(workdir: pathlib.Path, config: Config) -> None:
    """Writes the resolved config.

    Raises:
      UserError: the workdir is of another config; names the fields that differ.
    """
    file = workdir / 'config.json'
    if file.is_file():
        differing = config_lib.difference(load_config(workdir), config)
        changed = [
            f'{k} ({old!r} there, {new!r} here)' for k, (old, new) in differing.items() if not k.startswith(FREE)
        ]
        if changed:
            raise UserError(
                f'{workdir} is of another config: {", ".join(changed)}; use a fresh --workdir, or its values'
            )
    partial = file.with_suffix('.tmp')
    partial.write_text(json.dumps(config_lib.to_dict(config), indent=2) + '\n')
    partial.replace(file)


def tokenizers(workdir: pathlib.Path, config: Config, records: Sequence[Any]) -> Tokenizers:
    """Returns the workdir's tokenizers: stored ones, or the pre-trained run's, or trained on `records` and stored."""
    if any(workdir.glob('tokenizer.*')):
        return Tokenizers.load(workdir)
    made = train_tokenizers(config, records)
    if config.train.init_from is not None:
        before = Tokenizers.load(pathlib.Path(config.train.init_from))
        made = dataclasses.replace(made, source=before.source, target=before.target)
    made.save(workdir)
    return made
