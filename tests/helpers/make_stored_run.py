"""Writes tests/stored_run: a finished run, small enough to keep, that this code and all after it must load.

python tests/helpers/make_stored_run.py
"""

import json
import os
import pathlib
import shutil
import tempfile

import toy_data
from places import TESTS
from tformer.commands import train as train_command
from whole_runs import load

PLACE = TESTS / 'stored_run'
FIELDS = {
    'train__num_steps': '3', 'train__keep_last': '1', 'data__tokenizer': 'symbol', 'model__emb_dim': '8',
    'model__mlp_dim': '16', 'model__num_heads': '2', 'model__num_encoder_layers': '1', 'model__num_decoder_layers': '1',
    'optimizer__ema_decay': '0.9', 'evaluate__samples': '0',
}  # fmt: skip

if __name__ == '__main__':
    place = pathlib.Path(tempfile.gettempdir()) / 'tformer_stored_run'  # what is stored names it
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    os.chdir(place)
    toy_data.parallel(pathlib.Path('data'))
    found = train_command.train_and_evaluate(
        load('translate.py:smoke', pathlib.Path(), data__path='data', **FIELDS), 'run'
    )
    shutil.rmtree(PLACE, ignore_errors=True)
    PLACE.mkdir()
    for name in ('config.json', 'tokenizer.json', 'tokenizer.target.symbol'):
        shutil.copy(f'run/{name}', PLACE)
    shutil.copytree('run/checkpoints', PLACE / 'checkpoints')
    (PLACE / 'scores.json').write_text(json.dumps(found, indent=2) + '\n')
    shutil.rmtree(place)
