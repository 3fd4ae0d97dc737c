"""Tasks with a rule: their equations and sequences, what is held out, and models that learn from them."""

import json
import pathlib
from collections import Counter

import pytest

import recipes
from tformer import checks, config
from tformer.commands import train as train_command
from tformer.config import Config, Data
from tformer.data.batches import pipeline
from tformer.data.sources import algorithmic, sources
from tformer.data.tokenizers import tokenizers, vocabulary
from tformer.errors import UserError

EQUATIONS = [name for name, task in algorithmic.TASKS.items() if 'class' in task.forms]
RULES = {'copy': list, 'reverse': lambda numbers: numbers[::-1], 'sort': sorted}
HAND_WORKED = {  # of a = 3, b = 5, then of a = 4, b = 2, mod 7
    'modular_addition': (1, 6),
    'modular_subtraction': (5, 2),
    'modular_division': (2, 2),  # 5 * 2 = 3 and 2 * 2 = 4
    'modular_division_or_subtraction': (2, 2),
    'modular_squares': (6, 6),  # 34, 20
    'modular_quadratic': (0, 0),  # 49, 28
    'modular_cubic': (2, 5),  # 27 + 75 + 5 = 107, 64 + 16 + 2 = 82
}


def load(split: str, objective: str = 'seq2seq', **data: object) -> list[sources.Record]:
    return list(sources.load(Data(source='algorithmic', **data), objective, split))


def every(**data: object) -> dict[str, str]:
    return {record['source']: record['target'] for split in sources.SPLITS for record in load(split, **data)}


@pytest.mark.parametrize('task', EQUATIONS)
def test_equations_hold_and_are_all_there_once(task: str) -> None:
    made = every(task=task, modulus=7)
    first, second = HAND_WORKED[task]
    assert (made['3 o 5'], made['4 o 2']) == (str(first), str(second))
    divisors = range(1, 7) if task == 'modular_division' else range(7)
    assert set(made) == {f'{a} o {b}' for a in range(7) for b in divisors}
    assert sum(len(load(split, task=task, modulus=7)) for split in sources.SPLITS) == len(made)
    assert set(made.values()) <= set(map(str, range(7)))


def test_division_inverts_multiplication_and_odd_divisors_only_divide() -> None:
    quotients, mixed = (every(task=f'modular_division{kind}', modulus=13) for kind in ('', '_or_subtraction'))
    for equation, quotient in quotients.items():
        a, _, b = equation.split()
        assert int(quotient) * int(b) % 13 == int(a)
        assert mixed[equation] == (quotient if int(b) % 2 else str((int(a) - int(b)) % 13))
    assert mixed['5 o 0'] == '5'


@pytest.mark.parametrize('share', [0.2, 0.5, 0.8])
def test_a_share_of_the_equations_is_trained_on_and_a_larger_one_holds_it(share: float) -> None:
    parts = {split: {r['source'] for r in load(split, train_share=share)} for split in sources.SPLITS}
    assert len(parts['train']) == pytest.approx(share * 97 * 96, rel=0.03)
    assert len(parts['valid']) == pytest.approx(len(parts['test']), rel=0.1)
    assert len(set.union(*parts.values())) == sum(map(len, parts.values())) == 97 * 96
    assert parts['train'] < {record['source'] for record in load('train', train_share=share + 0.1)}


@pytest.mark.parametrize('task', RULES)
def test_sequences_follow_their_rule_at_their_lengths(task: str) -> None:
    settings = {'task': task, 'modulus': 10, 'train_lengths': (2, 5), 'test_lengths': (6, 9)}
    parts = {split: load(split, **settings) for split in sources.SPLITS}
    for split, (low, high) in {'train': (2, 5), 'valid': (2, 5), 'test': (6, 9)}.items():
        numbers = [[int(symbol) for symbol in record['source'].split()] for record in parts[split]]
        assert {len(row) for row in numbers} == set(range(low, high + 1))
        assert {number for row in numbers for number in row} == set(range(10))
        for row, record in zip(numbers, parts[split], strict=True):
            assert record['target'] == ' '.join(map(str, RULES[task](row)))
    counts = Counter(record['source'] for records in parts.values() for record in records)
    assert max(counts.values()) == 1 and 50 < len(parts['valid']) < len(parts['train']) / 10


def test_what_decides_about_the_records_is_in_their_fingerprint() -> None:
    settings = {'task': 'sort', 'modulus': 5, 'train_share': 0.4, 'train_lengths': (1, 3), 'test_lengths': (9, 9)}
    changes = [{}, *({name: value} for name, value in settings.items())]
    marks = [sources.load(Data(source='algorithmic', **change), 'seq2seq', 'train').fingerprint for change in changes]
    marks.append(sources.load(Data(source='algorithmic'), 'classification', 'train').fingerprint)
    marks.append(sources.load(Data(source='algorithmic'), 'seq2seq', 'valid').fingerprint)
    assert len(set(marks)) == len(marks) == 8


MISTAKES = {
    "has no records for train.objective='causal_lm', only for seq2seq or": lambda: load('train', 'causal_lm'),
    "'classification', only for seq2seq or seq2seq_distilled$": lambda: load('train', 'classification', task='sort'),
    "data.task='modular_divison' is unknown; did you mean": lambda: load('train', task='modular_divison'),
    'data.modulus=6: data.task=modular_division divides, .* prime': lambda: load('train', modulus=6),
    'data.modulus=1 must be at least 2': lambda: check(modulus=1),
    r'data.train_share=1.0 must be in \[0, 1\)': lambda: check(train_share=1.0),
    'data.train_share=0.0 must be positive': lambda: check(train_share=0.0),
    r'data.train_lengths=\(3,\) must be two numbers': lambda: check(train_lengths=(3,)),
    r'data.test_lengths=\(4, 3\) must be two numbers': lambda: check(test_lengths=(4, 3)),
    r'data.test_lengths=\(0, 3\) must be two numbers': lambda: check(test_lengths=(0, 3)),
    'task=.*sorted.* is unknown': lambda: check(mixture=('source=algorithmic task=sorted',)),
}


def check(**data: object) -> None:
    checks.check_here(Config(data=Data(**data), train=config.Train(num_steps=1)))


@pytest.mark.parametrize('message', MISTAKES)
def test_a_mistake_is_one_line(message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        MISTAKES[message]()
    assert '\n' not in str(error.value)


def test_an_equation_is_four_symbols_between_two_marks_and_one_class() -> None:
    cfg = recipes.load('algorithmic', data__modulus=7, train__batch_size=4)
    made = tokenizers.train_tokenizers(cfg, load('train', 'classification', modulus=7))
    assert made.target.vocab_size - len(vocabulary.SPECIALS) == 7 + 1 and made.labels == tuple('0123456')
    batches = pipeline.Batches(cfg, made, 'train', training=True)
    batch = batches.batch(0)
    marks = made.target.specials
    for row, label in zip(batch['inputs'], batch['labels'], strict=True):
        assert row[0] == marks.bos and row[4] == marks.eos and len(row) == 5
        a, _, b = made.target.decode(row[1:4]).split()
        assert int(label) * int(b) % 7 == int(a)


@pytest.mark.parametrize('task', RULES)
def test_the_longest_sequences_are_evaluated_whole(task: str) -> None:
    cfg = recipes.load(f'algorithmic:{task}')
    records = load('test', modulus=10, task=task)
    made = tokenizers.train_tokenizers(cfg, records)
    (part,) = pipeline.Batches(cfg, made, 'test', training=False, records=records).parts
    assert part.examples.num_truncated == 0 and part.examples.lengths.max() == 2 * 20 + 2 <= cfg.data.length
    assert cfg.decode.max_len > 20


@pytest.mark.slow
def test_a_model_learns_equations_by_heart_before_it_knows_others(tmp_path: pathlib.Path, capsys) -> None:
    sizes = {'model__emb_dim': 32, 'model__mlp_dim': 64, 'model__num_decoder_layers': 1, 'data__modulus': 11}
    length = {'train__num_steps': 200, 'train__batch_size': 64, 'train__eval_every': 200, 'train__log_every': 20}
    cfg = recipes.load('algorithmic', optimizer__learning_rate=1e-2, mesh__data=1, **sizes, **length)
    found = train_command.train_and_evaluate(cfg, str(tmp_path))
    rows = [json.loads(line) for line in (tmp_path / 'metrics.jsonl').read_text().splitlines()]
    losses = [row['train/loss'] for row in rows if 'train/loss' in row]
    assert losses[0] > 1 and losses[-1] < 0.05
    assert found['accuracy'] < 0.6 and found['loss'] > 1
