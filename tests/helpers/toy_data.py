"""Small data sets that the tests make: parallel, labelled and running text, each with something to learn."""

import json
import pathlib
import random

from tformer.config import Model
from tformer.config.tasks import TASKS

WORDS = ('the', 'a', 'small', 'green', 'old', 'house', 'tree', 'river', 'bird', 'stone', 'sees', 'finds', 'loves')


def reader_of(objective: str) -> Model:
    """A model of the family that the objective is best known of."""
    return Model(family=TASKS[objective].families[0])


def sentences(count: int, seed: int, lengths: tuple[int, int] = (3, 9)) -> list[str]:
    rng = random.Random(seed)
    return [' '.join(rng.choices(WORDS, k=rng.randint(*lengths))) for _ in range(count)]


def parallel(directory: pathlib.Path, train: int = 64) -> pathlib.Path:
    """source<TAB>target, the target is the source's words backwards."""
    for split, count, seed in (('train', train, 0), ('valid', 12, 1), ('test', 12, 2)):
        rows = (f'{text}\t{" ".join(reversed(text.split()))}' for text in sentences(count, seed))
        write(directory / f'{split}.tsv', rows)
    return directory


def labelled(directory: pathlib.Path, train: int = 64) -> pathlib.Path:
    """label<TAB>text, the label says whether 'bird' occurs."""
    for split, count, seed in (('train', train, 0), ('valid', 16, 1), ('test', 16, 2)):
        write(directory / f'{split}.tsv', (f'{"bird" if "bird" in t else "none"}\t{t}' for t in sentences(count, seed)))
    return directory


def scored(directory: pathlib.Path, train: int = 64) -> pathlib.Path:
    """score<TAB>text<TAB>text, the score, from 0 to 5, is the share of the first text's words that the second has."""
    for split, count, seed in (('train', train, 0), ('valid', 16, 1), ('test', 16, 2)):
        rows = zip(sentences(count, seed), sentences(count, seed + 3), strict=True)
        shares = ((len({*one.split()} & {*other.split()}) / len({*one.split()}), one, other) for one, other in rows)
        write(directory / f'{split}.tsv', (f'{5 * share:.2f}\t{one}\t{other}' for share, one, other in shares))
    return directory


def tagged(directory: pathlib.Path) -> pathlib.Path:
    """A word and its tag a line; birds are entities."""
    for split, count, seed in (('train', 64, 0), ('valid', 16, 1), ('test', 16, 2)):
        texts = (text.split() for text in sentences(count, seed))
        lines = (f'{word} {"B-BIRD" if word == "bird" else "O"}' for words in texts for word in [*words, ''])
        write(directory / f'{split}.conll', (line.removeprefix(' O') for line in lines))
    return directory


def answered(directory: pathlib.Path) -> pathlib.Path:
    """Questions for the first word of a text."""
    for split, count, seed in (('train', 64, 0), ('valid', 16, 1), ('test', 16, 2)):
        rows = (
            {'question': 'which word?', 'context': text, 'answers': {'text': [text.split()[0]], 'answer_start': [0]}}
            for text in sentences(count, seed)
        )
        write(directory / f'{split}.jsonl', map(json.dumps, rows))
    return directory


def running(directory: pathlib.Path) -> pathlib.Path:
    """Running text, one document a split."""
    for split, count, seed in (('train', 200, 0), ('valid', 20, 1), ('test', 20, 2)):
        write(directory / f'{split}.txt', sentences(count, seed))
    return directory


def write(file: pathlib.Path, lines: object) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text('\n'.join(lines) + '\n', encoding='utf-8')  # type: ignore[call-overload]
