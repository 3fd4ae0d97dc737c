"""Pre-training of BERT (Devlin et al. 2019, 3.1 and A.2): masked tokens and next-sentence prediction; then fine-tuning.

    tformer train --config=configs/bert.py --workdir=runs/bert128
    tformer train --config=configs/bert.py:512 --workdir=runs/bert --config.train.init_from=runs/bert128
    tformer train --config=configs/glue.py:sst2 --workdir=runs/sst2 --config.train.init_from=runs/bert

    tformer train --config=configs/bert.py:files --config.data.path=DIR --workdir=runs/bert128    # or from files

TFDS: wikipedia/20230601.en, of which two slices are held out; the paper also uses BooksCorpus. DIR holds
{train,valid,test}.txt, paragraphs between blank lines, or .jsonl with the key "text"; both sentences of a pair come
from one text. Arguments: `large`; `512`, the second phase; `whole_word`, which masks all pieces of a word together
(the paper's code of May 2019); `smoke`, a size that any machine trains: `:files,smoke`.

Machine and time: not run here; in the paper 4 days on 16 TPU chips (base) and on 64 (large) (A.2).
Expected: the results of configs/glue.py, squad.py and conll2003.py; the paper has none for pre-training alone.

From the paper: batches of 256, 900,000 steps of 128 tokens and 100,000 of 512, a rate that rises to 1e-4 over 10,000
steps and falls to 0 over the million. Here the second phase starts with fresh moments, at the 1e-5 that its place in
the schedule gives. 30,522 pieces, here of SentencePiece and of cased text (`--config.data.normalization=nfkc_lower`
for the uncased model).
"""

import pathlib

from ml_collections import ConfigDict

from tformer.config import changes, load, override, recipe

ARCHITECTURE = f'{pathlib.Path(__file__).parent}/architectures/bert.py'


def get_config(arguments: str = '') -> ConfigDict:
    base = override(
        load(ARCHITECTURE),
        {
            'data.source': 'tfds',
            'data.tfds_name': 'wikipedia/20230601.en',
            'data.tfds_splits': ('train[2%:]', 'train[:1%]', 'train[1%:2%]'),
            'data.length': 128,
            'data.batching': 'bucket',
            'train.objective': 'masked_lm_nsp',
            'train.num_steps': 900_000,
            'train.eval_batches': 100,
            'optimizer.final_fraction': 0.1,
        },
    )
    second = {
        'data.length': 512,
        'train.num_steps': 100_000,
        'optimizer.learning_rate': 1e-5,
        'optimizer.warmup_steps': 1000,
        'optimizer.final_fraction': 0.0,
    }
    return recipe(
        base,
        arguments,
        **{'512': second},
        large=f'{ARCHITECTURE}:large',
        whole_word={'data.mask_unit': 'word'},
        files={'data.source': 'files'},
        smoke={**changes(f'{ARCHITECTURE}:smoke'), 'data.num_buckets': 1},
    )
