"""WMT14 English to German as in Vaswani et al. 2017: base and big of table 3, trained as in section 5.

    tformer train --config=configs/wmt14_en_de.py --workdir=runs/base
    tformer evaluate --workdir=runs/base --split=test --average=5
    tformer train --config=configs/wmt14_en_de.py:big --workdir=runs/big
    tformer evaluate --workdir=runs/big --split=test --average=20

    tformer train --config=configs/wmt14_en_de.py:files --config.data.path=DIR --workdir=runs/mt    # or from files

TFDS: wmt14_translate/de-en, newstest2013 as valid, newstest2014 as test. DIR holds {train,valid,test}.tsv,
english<TAB>german. `:smoke` is a size that any machine trains: `:files,smoke`.

Machine and time: not run here; in the paper 12 hours (base) and 3.5 days (big) on 8 P100 (5.2). On less memory
`--config.train.microbatches=8` gives the same updates.
Expected, with the averages: BLEU 27.3 base, 28.4 big (table 2), which is `bleu_tokenized`; `bleu` is sacrebleu's.

From the paper: batches of about 25,000 tokens a side (here of the longer side), 37,000 shared pieces, 100,000 and
300,000 steps, the mean of the last 5 and 20 checkpoints (6.1). Those were 10 minutes apart: 1,500 steps of 0.4 s, and
600 of 1.0 s (5.2). Here an output has at most 256 pieces; in the paper it may be 50 longer than the input.
"""

import pathlib

from ml_collections import ConfigDict

from tformer.config import changes, load, override, recipe

ORIGINAL = f'{pathlib.Path(__file__).parent}/architectures/original.py'


def get_config(arguments: str = '') -> ConfigDict:
    base = override(
        load(ORIGINAL),
        {
            'data.source': 'tfds',
            'data.tfds_name': 'wmt14_translate/de-en',
            'data.columns': ('en', 'de'),
            'train.eval_every': 6000,
            'train.checkpoint_every': 1500,
            'train.keep_last': 5,
            'evaluate.metrics': ('bleu', 'bleu_tokenized'),
            'evaluate.language': 'de',
        },
    )
    return recipe(
        base,
        arguments,
        big={**changes(f'{ORIGINAL}:big'), 'train.checkpoint_every': 600, 'train.keep_last': 20},
        files={'data.source': 'files', 'data.columns': ()},
        smoke={**changes(f'{ORIGINAL}:smoke'), 'data.num_buckets': 1},
    )
