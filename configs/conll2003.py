r"""Named entities of CoNLL-2003 with a pre-trained BERT, fine-tuned as in Devlin et al. 2019, 5.3.

    tformer train --config=configs/conll2003.py --workdir=runs/ner --config.train.init_from=runs/bert

    tformer train --config=configs/conll2003.py:files --config.data.path=DIR --workdir=runs/ner \
        --config.train.init_from=runs/bert                                                       # or from files

runs/bert is a run of configs/bert.py (use `large` in both or in neither). TFDS: conll2003. DIR holds
{train,valid,test}.conll, one token per line with its tag last and blank lines between sentences, as in the shared
task. `smoke` is a size that any machine trains: `:files,smoke`.

Machine and time: not run here; the paper gives none.
Expected on the test split: entity F1 92.4 base, 92.8 large (table 7). The paper reads each sentence with as much of
its document as fits; this recipe reads it alone. Which of the learning rates of its A.3 the paper used is not known.
"""

import pathlib

from ml_collections import ConfigDict

from tformer.config import changes, load, override, recipe

BERT = f'{pathlib.Path(__file__).parent}/bert.py'


def get_config(arguments: str = '') -> ConfigDict:
    base = override(
        load(BERT),
        {
            'model.head_dropout_rate': 0.1,
            'data.tfds_name': 'conll2003',
            'data.tfds_splits': ('train', 'dev', 'test'),
            'data.columns': ('tokens', 'ner'),
            'data.labels': ('PER', 'ORG', 'LOC', 'MISC'),
            'data.length': 128,
            'data.overlong': 'truncate',
            'optimizer.learning_rate': 5e-5,
            'optimizer.warmup_steps': 132,  # a tenth
            'optimizer.final_fraction': 0.0,
            'train.objective': 'token_classification',
            'model.pooling': 'mean',  # nothing is pooled
            'model.pooler': False,
            'train.num_steps': None,
            'train.num_epochs': 3,
            'train.batch_size': 32,
            'train.eval_every': None,
            'train.eval_batches': None,
            'train.best_metric': 'valid/entity_f1',
        },
    )
    return recipe(
        base,
        arguments,
        large=f'{BERT}:large',
        files={'data.source': 'files', 'data.columns': ()},
        smoke={**changes(f'{BERT}:smoke'), 'train.num_epochs': None},
    )
