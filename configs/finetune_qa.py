r"""Answers in a text by a trained model: a workdir, an imported one, or a directory of the hub.

    tformer train --config=configs/finetune_qa.py --config.data.path=DIR --workdir=runs/answers \
        --config.train.init_from=runs/bert

The model is that of train.init_from. DIR holds {train,valid,test}.jsonl in the form of SQuAD: an object a line with
question, context and answers ({"text": [...], "answer_start": [...]}, both empty if there is no answer). Arguments:
`small`, `lora`, `frozen`, `layer_decay` and `smoke`, as in finetune_classify.py.

Windows of 384 tokens with a stride of 128, and 3 epochs, are those of Devlin et al. 2019, 4.2, and of its code.
"""

import pathlib

from ml_collections import ConfigDict

from tformer.config import changes, load, override, recipe

CLASSIFY = f'{pathlib.Path(__file__).parent}/finetune_classify.py'


def get_config(arguments: str = '') -> ConfigDict:
    base = override(
        load(CLASSIFY),
        {
            'data.length': 384,
            'train.objective': 'question_answering',
            'train.num_epochs': 3,
            'train.init_narrow': (),
            'train.best_metric': 'valid/squad_f1',
        },
    )
    return recipe(
        base,
        arguments,
        small=f'{CLASSIFY}:small',
        lora=f'{CLASSIFY}:lora',
        frozen=f'{CLASSIFY}:frozen',
        layer_decay=f'{CLASSIFY}:layer_decay',
        smoke={**changes(f'{CLASSIFY}:smoke'), 'data.stride': 8, 'data.question_length': 8},
    )
