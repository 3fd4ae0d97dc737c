"""Measures `tformer prepare --output`: python tests/helpers/prepare_corpus.py PLACE MEGABYTES PROCESSES [exact|minhash]

The corpus is JSON lines of pieces of the standard library, 5 % of which come again; the tokenizer is trained on it.
"""

import json
import pathlib
import random
import resource
import shutil
import sys
import sysconfig
import time

from tformer.config import Config, Data, Model, Train
from tformer.data.prepared import prepare
from tformer.data.tokenizers.tokenizers import Tokenizers, train_tokenizers

ROOT = pathlib.Path(sysconfig.get_paths()['stdlib'])
TRAIN = Train(objective='causal_lm')


def corpus(place: pathlib.Path, megabytes: int) -> pathlib.Path:
    """Returns the file of a corpus, which is made once."""
    file = place / f'{megabytes}.jsonl'
    if not file.exists():
        lines = [line for path in sorted(ROOT.glob('*.py')) for line in path.read_text('latin-1').splitlines(True)]
        rng, size, before = random.Random(0), 0, ['']
        with file.with_suffix('.partial').open('w') as written:
            while size < megabytes * 10**6:
                start = rng.randrange(len(lines) - 120)
                text = ''.join(lines[start : start + rng.randint(5, 110)]) + f'# {size}\n'
                text = rng.choice(before) or text if rng.random() < 0.05 else text
                before = before if len(before) > 1000 else [*before, text]
                size += written.write(json.dumps({'text': text}) + '\n')
        file.with_suffix('.partial').rename(file)
    return file


def tokenizers(place: pathlib.Path) -> Tokenizers:
    """Returns 8,000 pieces of SentencePiece, which are trained once."""
    if not (place / 'tokenizer.json').exists():
        records = [{'text': path.read_text('latin-1')} for path in sorted(ROOT.glob('*.py'))[:120]]
        train_tokenizers(Config(model=Model(family='decoder'), train=TRAIN), records).save(place)
    return Tokenizers.load(place)


def main(place: pathlib.Path, megabytes: int, processes: int, deduplicate: str = 'exact') -> None:
    place.mkdir(parents=True, exist_ok=True)
    data = Data(path=(str(corpus(place, megabytes)),), cache_dir=str(place / 'cache'), deduplicate=deduplicate)
    config, output = Config(model=Model(family='decoder'), data=data, train=TRAIN), place / 'set'
    tokens = tokenizers(place)
    shutil.rmtree(output, ignore_errors=True)
    began, own = time.monotonic(), time.process_time()
    with prepare.processes(processes) as engine:
        print(prepare.write(config, tokens, str(output), engine, lambda line: print(line, flush=True)))
    wall = time.monotonic() - began
    time.sleep(2)  # the processes end
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(
        f'{wall:.0f} s; {used.ru_utime + used.ru_stime:.1f} s of CPU in {processes} processes, of which the largest '
        f'had {used.ru_maxrss / 1024:.0f} MB, and {time.process_time() - own:.1f} s in the one that waited for them'
    )


if __name__ == '__main__':
    main(pathlib.Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:])
