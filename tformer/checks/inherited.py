"""The model of the run or the hub directory that a config starts from, so that the config need not repeat its shape."""

import pathlib
from collections.abc import Collection

from tformer import config as config_lib
from tformer.checks.conditions import require
from tformer.config import Config, override, values
from tformer.config.tasks import HEADS, TASKS
from tformer.data import stores
from tformer.errors import UserError, nearest
from tformer.hf import directory as hub_directory
from tformer.hf.heads import POOLED

# Fields beside the model's that its parameters were trained with: the tokens around a text, and who sees which.
AROUND = (
    *('data.start', 'data.source_start', 'data.source_end', 'data.end', 'data.separator'),
    *('data.bidirectional_prefix', 'decode.ends', 'decode.forced_end'),
)
NARROW = 512  # the largest emb_dim of a model with the fields of train.init_narrow
# Fields of the model that are the run's own: how it is computed, and how many classes its labels have.
OWN = tuple(f'model.{x}' for x in 'scan_layers remat attention_kernel dtype param_dtype num_classes'.split())


def with_model(config: Config, stated: Collection[str] = ()) -> Config:
    """Returns `config` with the model of train.init_from where train.init_model asks for it, which then is False.

    Fields that the user has `stated`, and those that differ from their defaults, stay as they are; those of
    train.init_narrow have its values where the model is narrow, unless the user has stated them. Where texts are
    pooled here and were not there, a decoder's last token, the only one that has seen all others, stands for its text.

    Raises:
      UserError: train.init_from is neither a workdir nor a hub directory, or its config cannot be read.
    """
    if not config.train.init_model or config.train.init_from is None:
        return config
    theirs = _config_of(config.train.init_from)
    own, defaults, found = values(config), values(Config()), values(theirs)
    pools, pooled = (HEADS[TASKS[x.train.objective].head].pools for x in (config, theirs))
    if not pools or not pooled:
        found |= {f'model.{name}': defaults[f'model.{name}'] for name in POOLED}
    if pools and not pooled and theirs.model.family == 'decoder':
        found['model.pooling'] = 'last'
    taken = {
        name: value
        for name, value in found.items()
        if (name.startswith('model.') or name in AROUND) and name not in (*OWN, *stated) and own[name] == defaults[name]
    }
    narrow = theirs.model.emb_dim <= NARROW
    taken |= {name: value for name, value in _narrow(config).items() if narrow and name not in stated}
    return override(config, {**taken, 'train.init_model': False, 'train.init_narrow': ()})


def _narrow(config: Config) -> dict[str, str]:
    """Returns the fields of train.init_narrow. Raises a `UserError` where one of them is not FIELD=VALUE."""
    for setting in config.train.init_narrow:
        require('=' in setting, f'train.init_narrow={setting} is not FIELD=VALUE, such as optimizer.learning_rate=2e-4')
    return {name: value for name, _, value in (setting.partition('=') for setting in config.train.init_narrow)}


def _config_of(source: str) -> Config:
    """Returns the config of a workdir, or of the model of a hub directory. Raises a `UserError` if it is neither."""
    stores.require_local(source, 'train.init_from')
    path = pathlib.Path(source)
    if hub_directory.is_hub(path):
        return hub_directory.open_hub(source).run_config()
    if not (path / 'config.json').is_file():
        others = [file.parent for file in path.parent.glob('*/config.json')]
        raise UserError(f'train.init_from={source} has no config.json{nearest(path, others)}')
    return config_lib.from_json(path / 'config.json')


def check_known(config: Config) -> None:
    """Raises a `UserError` where the model is to be that of a run which is not named."""
    require(not config.train.init_model, 'train.init_model=True needs train.init_from: a workdir or a hub directory')
