"""Tasks computed by a rule: equations of modular arithmetic, and sequences that are copied, reversed or sorted."""

import random
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from tformer.config import tasks
from tformer.config.run import Data
from tformer.data.sources.records import Read, Record, fingerprint, place_of, split_of
from tformer.errors import UserError, choose

Pairs = Iterable[tuple[str, str]]  # (source, target), without repetition
Operation = Callable[[np.ndarray, np.ndarray, int], np.ndarray]  # a, b and p to c, in [0, p)

SEQUENCES = 20_000  # drawn for the train and valid splits together
VALID_SHARE = 0.05  # of these
TEST_SEQUENCES = 1_000


class Task(NamedTuple):
    """A rule that computes the pairs of a split, and the forms of records (`config.tasks.RECORDS`) they can have."""

    pairs: Callable[[Data, str], Pairs]
    forms: tuple[str, ...]
    fields: tuple[str, ...]  # the fields of config.data that it reads


def load(config: Data, objective: str, split: str) -> tuple[str, Read]:
    """Returns the fingerprint and the pairs of data.task: source and target, or a text and its class.

    Numbers are symbols from 0 to data.modulus - 1, separated by spaces. The pairs and their splits depend on the config
    only, by hashes: they are the same on every machine and for every train.seed.
    """
    task, names = choose(TASKS, config.task, 'data.task'), FIELDS[tasks.TASKS[objective].records]

    def read() -> tuple[list[Record], int]:
        pairs = task.pairs(config, split)
        return [{**dict(zip(names, pair, strict=True)), 'where': f'{config.task} {pair[0]}'} for pair in pairs], 0

    settings = config.modulus, config.train_share, config.train_lengths, config.test_lengths
    return fingerprint('algorithmic', config.task, settings, objective, split), read


def forms(config: Data) -> tuple[str, ...]:
    """Returns the forms of records that data.task has."""
    return choose(TASKS, config.task, 'data.task').forms


def equations(operation: Operation, least: int = 0, prime: bool = False) -> Task:
    """Returns the task of all equations a o b = c mod p with 0 <= a < p and least <= b < p: 'a o b' -> 'c'.

    The train split has data.train_share of them, valid and test half of the rest each. A larger train split contains
    the smaller ones. With `prime`, data.modulus must be a prime.
    """

    def pairs(config: Data, split: str) -> Pairs:
        p, held_out = config.modulus, (1 - config.train_share) / 2
        if prime and any(p % divisor == 0 for divisor in range(2, p)):
            raise UserError(f'data.modulus={p}: data.task={config.task} divides, so it must be a prime')
        a, b = (grid.ravel() for grid in np.meshgrid(np.arange(p), np.arange(least, p), indexing='ij'))
        for x, y, c in zip(a.tolist(), b.tolist(), operation(a, b, p).tolist(), strict=True):
            source = f'{x} o {y}'
            if split_of(source, valid=held_out, test=held_out) == split:
                yield source, str(c)

    return Task(pairs, ('pair', 'class'), ('modulus', 'train_share'))


def divided(a: np.ndarray, b: np.ndarray, p: int) -> np.ndarray:
    """Returns a / b mod p for a prime p: a b^(p - 2), by Fermat's little theorem; 0 where b is 0."""
    inverses = np.array([pow(number, p - 2, p) for number in range(p)])
    return a * inverses[b] % p


def divided_or_subtracted(a: np.ndarray, b: np.ndarray, p: int) -> np.ndarray:
    """Returns a / b mod p where b is odd, a - b mod p where it is even."""
    return np.where(b % 2 == 1, divided(a, b, p), (a - b) % p)


def sequences(rule: Callable[[list[int]], Sequence[int]]) -> Task:
    """Returns the task of applying `rule` to distinct random sequences with lengths in data.train_lengths.

    The valid split has other sequences of these lengths; the test split has sequences of data.test_lengths.
    """

    def pairs(config: Data, split: str) -> Pairs:
        is_test = split == 'test'
        low, high = config.test_lengths if is_test else config.train_lengths
        rng, seen = random.Random(f'{config.modulus} {low} {high}'), set()
        for _ in range(TEST_SEQUENCES if is_test else SEQUENCES):
            numbers = [int(rng.random() * config.modulus) for _ in range(low + int(rng.random() * (high + 1 - low)))]
            source = ' '.join(map(str, numbers))
            if source not in seen and (is_test or (place_of(source) < VALID_SHARE) == (split == 'valid')):
                yield source, ' '.join(map(str, rule(numbers)))
            seen.add(source)

    return Task(pairs, ('pair',), ('modulus', 'train_lengths', 'test_lengths'))


TASKS: dict[str, Task] = {
    # Power et al. 2022, A.1.1
    'modular_addition': equations(lambda a, b, p: (a + b) % p),
    'modular_subtraction': equations(lambda a, b, p: (a - b) % p),
    'modular_division': equations(divided, least=1, prime=True),
    'modular_division_or_subtraction': equations(divided_or_subtracted, prime=True),
    'modular_squares': equations(lambda a, b, p: (a**2 + b**2) % p),
    'modular_quadratic': equations(lambda a, b, p: (a**2 + a * b + b**2) % p),
    'modular_cubic': equations(lambda a, b, p: (a**3 + a * b**2 + b) % p),
    'copy': sequences(lambda numbers: numbers),
    'reverse': sequences(lambda numbers: numbers[::-1]),
    'sort': sequences(sorted),
}

FIELDS: dict[str, tuple[str, str]] = {  # the fields that a pair becomes
    'pair': ('source', 'target'),
    'class': ('text', 'label'),
}
