r"""SQuAD 1.1 and 2.0 with a pre-trained BERT, fine-tuned as in Devlin et al. 2019, 4.2 and 4.3.

    tformer train --config=configs/squad.py --workdir=runs/squad --config.train.init_from=runs/bert
    tformer train --config=configs/squad.py:v2 --workdir=runs/squad2 --config.train.init_from=runs/bert
    tformer evaluate --workdir=runs/squad2 --split=valid --config.evaluate.null_threshold=-2.0

    tformer train --config=configs/squad.py:files --config.data.path=DIR --workdir=runs/squad \
        --config.train.init_from=runs/bert                                                       # or from files

runs/bert is a run of configs/bert.py (use `large` in both or in neither). TFDS: squad/v1.1, squad/v2.0; the test
split is hidden, so the validation split is scored as test. DIR holds {train,valid}.jsonl, one object per line with
the keys question, context and answers ({"text": [...], "answer_start": [...]}, both empty if there is no answer).
`smoke` is a size that any machine trains: `:files,smoke`.

`v2` answers that there is no answer where that scores better by evaluate.null_threshold; the paper takes the
threshold that is best on the validation split. Windows of 384 tokens with a stride of 128, questions of 64 and
answers of 30 tokens are those of its code.

Machine and time: not run here; in the paper about 30 minutes on one Cloud TPU for 1.1 (section 4).
Expected on the validation split, exact match and F1 in percent: 1.1 base 80.8, 88.5, large 84.1, 90.9 (table 2);
2.0 large 78.7, 81.9 (table 3).
"""

import pathlib

from ml_collections import ConfigDict

from tformer.config import changes, load, override, recipe

BERT = f'{pathlib.Path(__file__).parent}/bert.py'


def get_config(arguments: str = '') -> ConfigDict:
    base = override(
        load(BERT),
        {
            'data.tfds_name': 'squad/v1.1',
            'data.tfds_splits': ('train', 'validation', 'validation'),
            'data.length': 384,
            'data.stride': 128,
            'data.question_length': 64,
            'optimizer.learning_rate': 5e-5,
            'optimizer.warmup_steps': 821,  # a tenth
            'optimizer.final_fraction': 0.0,
            'train.objective': 'question_answering',
            'model.pooling': 'mean',  # nothing is pooled
            'model.pooler': False,
            'train.num_steps': None,
            'train.num_epochs': 3,
            'train.batch_size': 32,
            'train.eval_every': None,
            'train.eval_batches': None,
            'train.best_metric': 'valid/squad_f1',
            'evaluate.answer_length': 30,
        },
    )
    return recipe(
        base,
        arguments,
        v2={
            'data.tfds_name': 'squad/v2.0',
            'optimizer.warmup_steps': 543,
            'train.num_epochs': 2,
            'train.batch_size': 48,
            'evaluate.null_threshold': 0.0,
        },
        large=f'{BERT}:large',
        files={'data.source': 'files'},
        smoke={
            **changes(f'{BERT}:smoke'),
            'data.question_length': 8,
            'data.stride': 8,
            'train.num_epochs': None,
        },
    )
