"""Pre-training of GPT-2's smallest model (Radford et al. 2019; the architecture's `medium`, `large`, `xl` too).

    tformer train --config=configs/gpt2.py --workdir=runs/gpt2
    tformer train --config=configs/gpt2.py:wikipedia --workdir=runs/gpt2
    tformer generate --workdir=runs/gpt2 'The transformer is'

    tformer train --config=configs/gpt2.py:files --config.data.path=DIR --workdir=runs/gpt2    # or from files

TFDS: c4/en, whose validation split is cut in two; `wikipedia` is wiki40b/en, which is smaller and has three splits.
DIR holds {train,valid,test}.jsonl, one object per line with the key "text". `smoke` is a size that any machine
trains: `:files,smoke`.

Machine and time: not run here; the paper gives none.
Expected: unknown. The paper's text, WebText, is not public, and its results are on other sets, without training on
them.

The paper gives a context of 1,024 tokens and batches of 512 (2.3). Learning rate and schedule are GPT-3's at the same
size (Brown et al. 2020, table 2.1 and B), and the number of steps makes its 300 billion tokens. `wikipedia` has much
less text and fewer steps; their number is a guess.
"""

import pathlib

from ml_collections import ConfigDict

from tformer.config import load, override, recipe

ARCHITECTURE = f'{pathlib.Path(__file__).parent}/architectures/gpt2.py'


def get_config(arguments: str = '') -> ConfigDict:
    base = override(
        load(ARCHITECTURE),
        {
            'data.source': 'tfds',
            'data.tfds_name': 'c4/en',
            'data.tfds_splits': ('train', 'validation[:50%]', 'validation[50%:]'),
            'train.eval_batches': 100,
        },
    )
    return recipe(
        base,
        arguments,
        **{size: f'{ARCHITECTURE}:{size}' for size in ('medium', 'large', 'xl')},
        wikipedia={
            'data.tfds_name': 'wiki40b/en',
            'data.tfds_splits': ('train', 'validation', 'test'),
            'train.num_steps': 50_000,
        },
        files={'data.source': 'files'},
        smoke=f'{ARCHITECTURE}:smoke',
    )
