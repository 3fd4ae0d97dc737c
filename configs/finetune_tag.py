r"""A tag for each word by a trained model: a workdir, an imported one, or a directory of the hub.

    tformer train --config=configs/finetune_tag.py --config.data.path=DIR --workdir=runs/tagger \
        --config.train.init_from=runs/bert
    tformer evaluate --workdir=runs/tagger --baseline

The model is that of train.init_from. DIR holds {train,valid,test}.conll, one word per line with its tag last and blank
lines between sentences. Arguments: `small`, `lora`, `frozen`, `layer_decay` and `smoke`, as in finetune_classify.py.
"""

import pathlib

from ml_collections import ConfigDict

from tformer.config import load, override, recipe

CLASSIFY = f'{pathlib.Path(__file__).parent}/finetune_classify.py'


def get_config(arguments: str = '') -> ConfigDict:
    base = override(
        load(CLASSIFY),
        {
            'train.objective': 'token_classification',
            'train.init_narrow': (),
            'train.best_metric': 'valid/entity_f1',
        },
    )
    return recipe(
        base,
        arguments,
        small=f'{CLASSIFY}:small',
        lora=f'{CLASSIFY}:lora',
        frozen=f'{CLASSIFY}:frozen',
        layer_decay=f'{CLASSIFY}:layer_decay',
        smoke=f'{CLASSIFY}:smoke',
    )
