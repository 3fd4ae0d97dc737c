"""What the directory of a sentence encoder says about its vectors of texts, which no field of a model holds."""

import os
import pathlib
import re
from typing import Any

from tformer.config import Config, json_files
from tformer.config.tasks import TASKS

POOLING, LENGTH = '1_Pooling/config.json', 'sentence_bert_config.json'
POOLINGS = {'mean_tokens': 'mean', 'cls_token': 'cls', 'max_tokens': 'max', 'lasttoken': 'last'}  # ours
_MODE = 'pooling_mode_'


def vectors_of(directory: pathlib.Path, max_len: int) -> str | None:
    """Returns a line about vectors that are not those of `tformer embed` by its defaults; None where they are.

    The module after the pooling may be a norm (`--normalize`); any other is not read.
    """
    if not os.path.lexists(directory / POOLING):
        return None
    settings = json_files.read(directory / POOLING)
    modes = [name.removeprefix(_MODE) for name, on in settings.items() if name.startswith(_MODE) and on is True]
    ours = POOLINGS.get(modes[0]) if len(modes) == 1 else None
    said = [] if ours == 'mean' else [f'--pooling={ours}' if ours else f'a pooling without counterpart: {modes}']
    length = json_files.read_if_there(directory / LENGTH).get('max_seq_length')
    if type(length) is int and length < max_len:
        said.append(f'--length={length}')
    names = sorted(place.name for place in directory.glob('[0-9]*_*') if place.is_dir())
    others = [name for name in names if not re.fullmatch(r'\d+_(Pooling|Normalize|Transformer)', name)]
    said += [f'layers that are left out: {", ".join(others)}'] if others else []
    return f'{directory}: its vectors of texts are those of {", ".join(said)}' if said else None


def files(config: Config) -> dict[str, Any]:
    """Returns the files of JSON that make an exported run one of a sentence encoder, by name; {} if it is none.

    The vectors are those of `tformer embed`.
    """
    if TASKS[config.train.objective].head != 'comparison':
        return {}
    modules = {'Transformer': '', 'Pooling': '1_Pooling'}
    return {
        'modules.json': [
            {'idx': number, 'name': str(number), 'path': path, 'type': f'sentence_transformers.models.{kind}'}
            for number, (kind, path) in enumerate(modules.items())
        ],
        POOLING: {
            'word_embedding_dimension': config.model.emb_dim,
            **{_MODE + mode: ours == config.model.pooling for mode, ours in POOLINGS.items()},
        },
        LENGTH: {'max_seq_length': config.data.length, 'do_lower_case': False},
    }
