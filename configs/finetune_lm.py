r"""Your running text by a trained language model: a workdir, an imported one, or a directory of the hub.

    tformer train --config=configs/finetune_lm.py --config.data.path=DIR --workdir=runs/own \
        --config.train.init_from=runs/gpt2
    tformer train --config=configs/finetune_lm.py:masked --config.data.path=DIR --workdir=runs/own_bert \
        --config.train.init_from=runs/bert

The model is that of train.init_from: a decoder, or with `masked` an encoder, whose pre-training goes on with text of
the task before it is fine-tuned on its labels (Gururangan et al. 2020). DIR holds {train,valid,test}.txt. Further
arguments: `small`, `lora`, `frozen`, `layer_decay` and `smoke`, as in finetune_classify.py.
"""

import pathlib

from ml_collections import ConfigDict

from tformer.config import load, override, recipe

CLASSIFY = f'{pathlib.Path(__file__).parent}/finetune_classify.py'


def get_config(arguments: str = '') -> ConfigDict:
    base = override(
        load(CLASSIFY),
        {
            'model.head_dropout_rate': 0.0,
            'data.length': 256,
            'data.batching': 'pack',
            'data.overlong': 'drop',
            'train.objective': 'causal_lm',
            'train.init_narrow': (),
            'train.best_metric': 'valid/loss',
        },
    )
    return recipe(
        base,
        arguments,
        masked={'train.objective': 'masked_lm', 'optimizer.learning_rate': 1e-4, 'model.family': 'encoder'},
        small=f'{CLASSIFY}:small',
        lora=f'{CLASSIFY}:lora',
        frozen=f'{CLASSIFY}:frozen',
        layer_decay=f'{CLASSIFY}:layer_decay',
        smoke=f'{CLASSIFY}:smoke',
    )
