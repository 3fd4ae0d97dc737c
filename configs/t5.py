"""Pre-training of T5 on spans of C4 (Raffel et al. 2020, 3.1, with the spans of 3.3.4); then configs/text_to_text.py.

    tformer train --config=configs/t5.py --workdir=runs/t5
    tformer train --config=configs/text_to_text.py:mnli --workdir=runs/mnli --config.train.init_from=runs/t5

    tformer train --config=configs/t5.py:files --config.data.path=DIR --workdir=runs/t5    # or from files

TFDS: c4/en, whose validation split is cut in two. DIR holds {train,valid,test}.jsonl, one object per line with the
key "text". Arguments: the sizes of configs/architectures/t5.py; `smoke`, a size that any machine trains:
`:files,smoke`.

Machine and time: not run here; the paper gives none for this run.
Expected: the results of configs/text_to_text.py.

From the paper: 2^19 steps of 128 rows of 512 tokens, several texts in each row; 15 % of the tokens are masked in
spans of 3 on average, which makes 114 tokens to write; Adafactor at 1 / sqrt(max(step, 10,000)).
"""

import pathlib

from ml_collections import ConfigDict

from tformer.config import changes, load, override, recipe

ARCHITECTURE = f'{pathlib.Path(__file__).parent}/architectures/t5.py'
SIZES = 'small', 'large', '3b', '11b', 'v1_1_small', 'v1_1_base', 'v1_1_large', 'v1_1_xl', 'v1_1_xxl'


def get_config(arguments: str = '') -> ConfigDict:
    base = override(
        load(ARCHITECTURE),
        {
            'data.source': 'tfds',
            'data.tfds_name': 'c4/en',
            'data.tfds_splits': ('train', 'validation[:50%]', 'validation[50%:]'),
            'data.sentinels': 100,
            'data.encoder_length': 512,
            'data.length': 114,
            'data.batching': 'pack',
            'optimizer.learning_rate': 0.01,
            'optimizer.schedule': 'inverse_sqrt',
            'optimizer.warmup_steps': 10_000,
            'train.objective': 'span_corruption',
            'train.num_steps': 2**19,
            'train.eval_batches': 100,
        },
    )
    return recipe(
        base,
        arguments,
        **{size: f'{ARCHITECTURE}:{size}' for size in SIZES},
        files={'data.source': 'files'},
        smoke={
            **changes(f'{ARCHITECTURE}:smoke'),
            'model.vocab_size': 416,
            'model.encoder_vocab_size': 416,
            'data.sentinels': 16,
            'data.encoder_length': 32,
        },
    )
