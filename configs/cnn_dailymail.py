r"""Summaries of CNN and Daily Mail articles with a pre-trained BART (Lewis et al. 2020, 5.3).

    tformer train --config=configs/cnn_dailymail.py:large --workdir=runs/cnn --config.train.init_from=runs/bart

    tformer train --config=configs/cnn_dailymail.py:large,files --config.data.path=DIR --workdir=runs/cnn \
        --config.train.init_from=runs/bart                                                       # or from files

runs/bart is a run of configs/bart.py (use `large` in both or in neither). TFDS: cnn_dailymail. DIR holds
{train,valid,test}.jsonl, one object per line with the keys article and highlights; a line feed separates the
sentences of the highlights. `smoke` is a size that any machine trains: `:files,smoke`. With a T5:
configs/text_to_text.py:cnn_dailymail. DIR holds {train,valid,test}.jsonl, one
object a line with the keys article and highlights, a line feed between the sentences of the latter. `smoke` is a size
that any machine trains: `:files,smoke`. With a T5: configs/text_to_text.py:cnn_dailymail.

Machine and time: not run here; the paper gives none.
Expected on the test split, `large`: ROUGE-1 44.16, ROUGE-2 21.28, ROUGE-L 40.90 (table 3), which are `rouge1`,
`rouge2` and `rougeLsum`, in percent. The paper uses a beam of 5, tunes length and penalty, and lets no three words
repeat; this recipe has a beam of 4.

Label smoothing 0.1 is the paper's (5.3). Batches of 65,536 tokens of articles, 20,000 steps, learning rate, warm-up
and clipping are those of the example for this set in its code.
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
            'data.tfds_name': 'cnn_dailymail',
            'data.columns': ('article', 'highlights'),
            'data.length': 256,
            'data.encoder_length': 1024,
            'data.overlong': 'truncate',
            'data.batch_tokens': 65_536,
            'decode.max_len': 140,
            'evaluate.metrics': ('rouge',),
        },
    )
    return recipe(
        base,
        arguments,
        large=f'{ARCHITECTURE}:large',
        files={'data.source': 'files'},
        smoke={
            **changes(f'{ARCHITECTURE}:smoke'),
            'data.encoder_length': 32,
            'data.batch_tokens': None,
            'data.num_buckets': 1,
        },
    )
