r"""GLUE (Wang et al. 2019) with a pre-trained BERT, fine-tuned as in Devlin et al. 2019, 4.1.

    tformer train --config=configs/glue.py:mnli --workdir=runs/mnli --config.train.init_from=runs/bert
    tformer train --config=configs/glue.py:stsb --workdir=runs/stsb --config.train.init_from=runs/bert

    tformer train --config=configs/glue.py:mnli,files --config.data.path=DIR --workdir=runs/mnli \
        --config.train.init_from=runs/bert                                                       # or from files

runs/bert is a run of configs/bert.py (use `large` in both or in neither). Arguments: a task of cola sst2 mrpc stsb
qqp mnli qnli rte wnli, sst2 if none is given; `layer_decay`, a learning rate that falls with the depth (Clark et al.
2020, appendix B); `smoke`, a size that any machine trains: `:mnli,files,smoke`. TFDS: glue/TASK. DIR holds
{train,valid}.tsv, label<TAB>text[<TAB>second text].

GLUE keeps the labels of its test splits secret, so the validation split is scored as test; of mnli, the matched one
is valid and the mismatched one is test. The paper tried the learning rates 5e-5, 4e-5, 3e-5, 2e-5 for each task and
took the best (`--config.optimizer.learning_rate`). Batches of 32, 3 epochs; a tenth of the steps is warm-up, as in
its code.

Machine and time: not run here; in the paper at most an hour on one Cloud TPU (section 4).
Expected on the test splits, in percent, scored by GLUE's server (table 1; scores as below, without wnli):

| | mnli m/mm | qqp | qnli | sst2 | cola | stsb | mrpc | rte |
| --- | --- | --- | --- | --- | --- | --- | --- | --- |
| base | 84.6/83.4 | 71.2 | 90.5 | 93.5 | 52.1 | 85.8 | 88.9 | 66.4 |
| large | 86.7/85.9 | 72.1 | 92.7 | 94.9 | 60.5 | 86.5 | 89.3 | 70.1 |

Scores: `matthews` for cola, `spearman` for stsb, `f1` of the positive class for mrpc and qqp, otherwise `accuracy`.
"""

import pathlib
from typing import Any

from ml_collections import ConfigDict

from tformer.config import changes, load, override, recipe

BERT = f'{pathlib.Path(__file__).parent}/bert.py'
EPOCHS, BATCH = 3, 32


def task(name: str, examples: int, *texts: str, score: str = 'accuracy', **more: Any) -> dict[str, Any]:
    """Returns the differences of a task of so many training examples, whose texts have these names in TFDS."""
    return {
        'data.tfds_name': f'glue/{name}',
        'data.columns': ('label', *texts),
        'optimizer.warmup_steps': round(0.1 * EPOCHS * examples / BATCH),
        'train.best_metric': f'valid/{score}',
        **{field.replace('__', '.'): value for field, value in more.items()},
    }


SENTENCES = 'sentence1', 'sentence2'
TASKS = {
    'cola': task('cola', 8551, 'sentence', score='matthews'),
    'sst2': task('sst2', 67_349, 'sentence'),
    'mrpc': task('mrpc', 3668, *SENTENCES, score='f1', evaluate__positive_label='equivalent'),
    'stsb': task(
        'stsb', 5749, *SENTENCES, score='spearman', train__objective='regression', data__label_range=(0.0, 5.0)
    ),
    'qqp': task('qqp', 363_849, 'question1', 'question2', score='f1', evaluate__positive_label='duplicate'),
    'mnli': task(
        'mnli', 392_702, 'premise', 'hypothesis',
        data__tfds_splits=('train', 'validation_matched', 'validation_mismatched'),
    ),
    'qnli': task('qnli', 104_743, 'question', 'sentence'),
    'rte': task('rte', 2490, *SENTENCES),
    'wnli': task('wnli', 635, *SENTENCES),
}  # fmt: skip


def get_config(arguments: str = '') -> ConfigDict:
    base = override(
        load(BERT),
        {
            'model.head_dropout_rate': 0.1,
            'data.tfds_splits': ('train', 'validation', 'validation'),
            'data.length': 128,
            'data.overlong': 'truncate',
            'optimizer.learning_rate': 2e-5,
            'optimizer.final_fraction': 0.0,
            'train.objective': 'classification',
            'train.num_steps': None,
            'train.num_epochs': EPOCHS,
            'train.batch_size': BATCH,
            'train.eval_every': None,
            'train.eval_batches': None,
            **TASKS['sst2'],
        },
    )
    return recipe(
        base,
        arguments,
        **TASKS,
        large=f'{BERT}:large',
        layer_decay={'optimizer.layer_decay': 0.8},
        files={'data.source': 'files', 'data.columns': ()},
        smoke={**changes(f'{BERT}:smoke'), 'train.num_epochs': None},
    )
