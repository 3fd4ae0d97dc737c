r"""Text from text by a trained model: a workdir, an imported one, or a directory of the hub.

    tformer train --config=configs/finetune_seq2seq.py --config.data.path=DIR --workdir=runs/summaries \
        --config.train.init_from=runs/bart

The model is that of train.init_from, an encoder-decoder or a decoder. DIR holds {train,valid,test}.tsv,
source<TAB>target. Arguments: `t5`, the rate of Raffel et al. 2020, 3.1.2, which models of T5 need; `small`, `lora`,
`frozen`, `layer_decay` and `smoke`, as in finetune_classify.py.

The label smoothing and the rate are those of Lewis et al. 2020, 5.3, and of its code.
"""

import pathlib

from ml_collections import ConfigDict

from tformer.config import Optimizer, load, override, recipe

CLASSIFY = f'{pathlib.Path(__file__).parent}/finetune_classify.py'


def get_config(arguments: str = '') -> ConfigDict:
    base = override(
        load(CLASSIFY),
        {
            'model.head_dropout_rate': 0.0,
            'data.length': 256,
            'optimizer.learning_rate': 3e-5,
            'train.objective': 'seq2seq',
            'train.label_smoothing': 0.1,
            'train.init_narrow': (),
            'train.best_metric': 'valid/loss',
            'evaluate.metrics': ('chrf',),
        },
    )
    return recipe(
        base,
        arguments,
        t5={
            'optimizer.name': 'adafactor',
            'optimizer.learning_rate': 1e-3,
            'optimizer.schedule': 'constant',
            'optimizer.beta2': Optimizer.beta2,  # which it does not read
            'optimizer.epsilon': Optimizer.epsilon,
        },
        small=f'{CLASSIFY}:small',
        lora=f'{CLASSIFY}:lora',
        frozen=f'{CLASSIFY}:frozen',
        layer_decay=f'{CLASSIFY}:layer_decay',
        smoke=f'{CLASSIFY}:smoke',
    )
