"""Pre-training of BART (Lewis et al. 2020, 2.2 and 5.1): restore a text from permuted sentences and masked spans.

    tformer train --config=configs/bart.py:large --workdir=runs/bart
    tformer train --config=configs/cnn_dailymail.py:large --workdir=runs/cnn --config.train.init_from=runs/bart

    tformer train --config=configs/bart.py:files --config.data.path=DIR --workdir=runs/bart    # or from files

TFDS: c4/en, whose validation split is cut in two; the paper uses RoBERTa's 160 GB of news, books, stories and web
text. DIR holds {train,valid,test}.jsonl, one object per line with the key "text". Arguments: `large`; `smoke` is a
size that any machine trains: `:files,smoke`.

Machine and time: not run here; the paper gives none.
Expected: the results of configs/cnn_dailymail.py.

From the paper: 30 % of the tokens are masked in spans of 3 on average, all sentences are permuted, 500,000 steps of
8,000 rows (`--config.train.microbatches`). The paper leaves out learning rate, warm-up and moments; these are
RoBERTa's (Liu et al. 2019, table 9). The paper turns dropout off in the last tenth of the steps; this recipe does
not.
"""

import pathlib

from ml_collections import ConfigDict

from tformer.config import changes, load, override, recipe

ARCHITECTURE = f'{pathlib.Path(__file__).parent}/architectures/bart.py'


def get_config(arguments: str = '') -> ConfigDict:
    base = override(
        load(ARCHITECTURE),
        {
            'data.source': 'tfds',
            'data.tfds_name': 'c4/en',
            'data.tfds_splits': ('train', 'validation[:50%]', 'validation[50%:]'),
            'data.length': 512,
            'data.batching': 'pack',
            'data.noise': ('permute', 'infill'),
            'data.infill_rate': 0.3,
            'data.mean_span_length': 3.0,
            'optimizer.learning_rate': 6e-4,
            'optimizer.warmup_steps': 24_000,
            'optimizer.beta2': 0.98,
            'optimizer.epsilon': 1e-6,
            'optimizer.clip_norm': None,
            'train.objective': 'denoising',
            'train.num_steps': 500_000,
            'train.batch_size': 8000,
            'train.label_smoothing': 0.0,
            'train.eval_every': 5000,
            'train.eval_batches': 10,
        },
    )
    large = {
        **changes(f'{ARCHITECTURE}:large'),
        'optimizer.learning_rate': 4e-4,
        'optimizer.warmup_steps': 30_000,
    }
    return recipe(
        base,
        arguments,
        large=large,
        files={'data.source': 'files'},
        smoke=f'{ARCHITECTURE}:smoke',
    )
