"""A run's directory: its resolved config and its tokenizers, made once and checked ever after."""

import json
import pathlib

from tformer import config as config_lib
from tformer.config import Config
from tformer.data.mixture import Joined
from tformer.data.tokenizers import Tokenizers, cached_tokenizers, train_tokenizers
from tformer.errors import UserError, nearest

# What may differ between a run and its continuation, and between training and evaluation: sections, and fields.
FREE_SECTIONS = ('decode', 'evaluate', 'mesh')
FREE_FIELDS = (
    'data.path',
    'data.valid_path',
    'data.test_path',
    'data.mixture',  # its weights are in the fingerprint of the data
    'data.tfds_dir',
    'data.tokenizer_path',
    'data.prefetch',
    'data.num_threads',
    'data.num_workers',
    'data.cache_dir',
    'train.log_every',
    'train.keep_last',
    'train.eval_batches',
    'train.checkpoint_every',
    'model.scan_layers',
    'model.remat',
    'model.attention_kernel',
)


def is_free(field: str) -> bool:
    """Returns whether a dotted field may differ: it changes neither the parameters nor the updates."""
    return field.split('.')[0] in FREE_SECTIONS or field in FREE_FIELDS


def begun(workdir: pathlib.Path) -> bool:
    """Returns whether a workdir holds a checkpoint: before the first one, a run starts afresh."""
    return any(path.name.isdigit() for path in workdir.glob('checkpoints/*'))


def load_config(workdir: pathlib.Path) -> Config:
    """Returns the resolved config of a workdir.

    Raises:
      UserError: it is no workdir, or its config.json does not read.
    """
    file = workdir / 'config.json'
    if not file.is_file():
        parent = workdir.parent
        others = [str(path.parent) for path in parent.glob('*/config.json')] if parent.is_dir() else []
        raise UserError(f'{workdir} is no workdir: it has no config.json{nearest(workdir, others) if others else ""}')
    try:
        tree = json.loads(file.read_text())
        if not isinstance(tree, dict):
            raise ValueError('not a JSON object')
        return config_lib.from_dict(tree)
    except ValueError as error:
        raise UserError(f'{file}: {error}') from error


def check_config(workdir: pathlib.Path, config: Config) -> None:
    """Raises a `UserError` that names the fields that differ where the workdir holds checkpoints of another config."""
    if begun(workdir):
        differing = config_lib.difference(load_config(workdir), config)
        changed = [f'{k} ({old!r} there, {new!r} here)' for k, (old, new) in differing.items() if not is_free(k)]
        if changed:
            raise UserError(
                f'{workdir} is of another config: {", ".join(changed)}; use a fresh --workdir, or its values'
            )


def save_config(workdir: pathlib.Path, config: Config) -> None:
    """Writes the resolved config."""
    file = workdir / 'config.json'
    partial = file.with_suffix('.tmp')
    partial.write_text(json.dumps(config_lib.to_dict(config), indent=2) + '\n')
    partial.replace(file)


def tokenizers(workdir: pathlib.Path, config: Config, records: Joined) -> Tokenizers:
    """Returns the tokenizers of a run: its own where it has begun, else another run's, else trained ones."""
    if begun(workdir):
        return Tokenizers.load(workdir)
    made = new_tokenizers(config, records)
    made.save(workdir)
    return made


def new_tokenizers(config: Config, records: Joined) -> Tokenizers:
    """Returns the tokenizers of a run that begins."""
    if lender := config.data.tokenizer_from or config.train.init_from:
        return train_tokenizers(config, records, Tokenizers.load(lender))
    if 'huggingface' in (config.data.tokenizer, config.data.source_tokenizer):  # of a file, whose contents may change
        return train_tokenizers(config, records)
    return cached_tokenizers(config, records, [split.fingerprint for split in records.splits])
