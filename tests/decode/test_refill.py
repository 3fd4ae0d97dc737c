"""Rows that come free write what batches write, whatever ends when and wherever the rows are, in fewer steps."""

import dataclasses

import jax
import numpy as np
import pytest

from fresh_runs import fresh_run
from small_decoding import LATENT
from tformer import config
from tformer.commands import scoring
from tformer.decode import buckets, halves, refill
from tformer.decode.text import best, make_writer
from tformer.distributed import meshes
from tformer.errors import UserError
from tformer.model import build

LETTERS = 'abcdefgh .'
MOST = 9
GREEDY, DRAWN = {'strategy': 'greedy'}, {'strategy': 'sample', 'temperature': '9.0'}
RULED = {**DRAWN, 'bias': 'ab=30,c=-20', 'regex': '[a-h]{1,8}'}
DRAWS = {**DRAWN, 'num_outputs': '3', 'top_k': '12', 'top_p': '0.99', 'min_p': '0.001'}


def texts_of(count):
    """Texts of unequal lengths, not in their order, some of them empty."""
    rng = np.random.default_rng(0)
    return [''.join(rng.choice(list(LETTERS), rng.integers(0, 20))) for _ in range(count)]


def run_of(kind, **decode):
    """Of two layers, with smaller parameters than a fresh run's, through which rounding would grow."""
    objective, family, *fields = kind
    run = fresh_run(objective, family=family, letters=LETTERS, layers=2, fields=next(iter(fields), {}))
    changes = {'max_len': str(MOST), 'batch_size': '8', **decode}
    made = config.override(run.config, {f'decode.{name}': value for name, value in changes.items()})
    return dataclasses.replace(run, config=made, variables=jax.tree.map(lambda x: 0.7 * x, run.variables))


def made(run, mesh=None):
    mesh = meshes.make_mesh(run.config.mesh) if mesh is None else mesh
    return refill.make_refill(build(run.config.model), run.config, run.tokenizers, cut=False, mesh=mesh)


def in_batches(run, texts, seed):
    return dict(
        make_writer(build(run.config.model), run.config, run.tokenizers, cut=False).write(run.variables, texts, seed)
    )


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for number, outputs in expected.items():
        for output, other in zip(found[number], outputs, strict=True):
            assert (output.text, output.length) == (other.text, other.length), number
            assert output.score == pytest.approx(other.score, abs=2e-4)


def counting(filled, steps):
    """The same, of which every call of the loop notes how many steps it made."""

    def go_on(variables, written, enough):
        before = np.asarray(written.slots.step_B)
        written = filled.programs.go_on(variables, written, enough)
        steps.extend(set((np.asarray(written.slots.step_B) - before).tolist()))
        return written

    return filled._replace(programs=filled.programs._replace(go_on=go_on))


DECODER, PREFIX, BOTH = ('causal_lm', 'decoder'), ('prefix_lm', 'decoder'), ('seq2seq', 'encoder_decoder')
LATENTS = (*PREFIX, {**LATENT, 'query_latent_dim': None})


@pytest.mark.slow
@pytest.mark.parametrize(
    ('kind', 'decode'),
    [
        (DECODER, DRAWS),
        *(
            pytest.param(*case, marks=pytest.mark.proof)
            for case in (
                *((DECODER, GREEDY), (PREFIX, DRAWN), (BOTH, DRAWN)),
                *((DECODER, RULED), (BOTH, RULED), (LATENTS, DRAWN)),
            )
        ),
    ],
    ids=str,
)
def test_texts_and_scores_are_those_of_batches_in_fewer_steps(kind, decode) -> None:
    """Prompts of two padded lengths, texts that end early; a seed of more than 32 bits."""
    run, texts, steps, seed = run_of(kind, **decode), texts_of(37), [], 2**33 + 2**31 + 5
    filled = made(run)
    found = dict(counting(filled, steps).write(run.variables, texts, seed))
    expected = in_batches(run, texts, seed)
    assert_same(found, expected)
    lengths = [[output.length for output in expected[number]] for number in range(37)]
    if decode is not GREEDY and kind is not BOTH:  # of which many end early
        assert len({length for row in lengths for length in row}) > 3
        order = sorted(range(37), key=lambda number: len(texts[number]))
        rounds = [order[start : start + 8] for start in range(0, 37, 8)]
        assert sum(steps) < 0.9 * sum(max(max(lengths[number]) for number in row) for row in rounds)
    assert filled.programs.begin._cache_size() == filled.programs.go_on._cache_size() == 2  # one of each padded length
    some = {3, 17, 30}
    assert_same(
        dict(filled.write(run.variables, texts, seed, done=set(range(37)) - some)),
        {number: expected[number] for number in some},
    )
    assert list(filled.write(run.variables, [], seed)) == []


@pytest.mark.slow
def test_two_of_half_the_rows_write_each_text_once(monkeypatch) -> None:
    run, texts, numbers = run_of(DECODER, **DRAWN, batch_size='16'), texts_of(37), []
    real = halves.at_once
    monkeypatch.setattr(halves, 'at_once', lambda parts: numbers.append(len(parts)) or real(parts))
    found = list(run.write(texts, 5, done={6}, share=(0, 1)))
    assert numbers == [2] and len(found) == 36
    expected = in_batches(run, texts, 5)
    assert_same(dict(found), {number: expected[number] for number in range(37) if number != 6})


@pytest.mark.slow
def test_generated_metrics_and_the_door_write_in_rows_that_come_free(monkeypatch) -> None:
    """Metrics cut a text that is too long, as batches do."""
    run, texts = run_of(DECODER, **GREEDY), [*texts_of(37), 'a' * 40]
    batches = make_writer(run.model, run.config, run.tokenizers, cut=True)
    expected = best(batches.write(run.variables, texts))
    monkeypatch.setattr(scoring, '_writer', None)
    metrics, records = [], [{'source': text, 'target': ''} for text in texts]
    monkeypatch.setattr(scoring.metrics, 'generation_scores', lambda *given: metrics.append(given[1]) or {})
    scoring.generated_scores(run.config, run.variables, run.tokenizers, records)
    assert metrics == [expected] == [run.generate(texts, cut=True)]
    with pytest.raises(UserError, match='has 40 tokens, the model takes 23 '):
        run.generate(texts)


def test_shares_are_disjoint_and_together_all() -> None:
    run, texts = run_of(DECODER, **GREEDY), texts_of(11)
    filled = made(run)
    shares = [dict(filled.write(run.variables, texts, done={4}, share=(number, 3))) for number in range(3)]
    assert [len(share) for share in shares] == [4, 3, 3]
    assert sorted(number for share in shares for number in share) == [*range(4), *range(5, 11)]
    with pytest.raises(UserError, match='has 40 tokens, the model takes 23 '):
        next(filled.write(run.variables, [*texts, 'a' * 40]))


@pytest.mark.proof
@pytest.mark.parametrize('kind', [DECODER, BOTH], ids=str)
@pytest.mark.parametrize('mesh', [{'data': '4', 'tensor': '2'}, {'data': '2', 'fsdp': '4'}], ids=str)
def test_rows_on_eight_devices_write_what_one_device_writes(kind, mesh) -> None:
    run, texts = run_of(kind, **DRAWS), texts_of(37)
    expected = in_batches(run, texts, 5)
    spread = config.override(run.config, {f'mesh.{axis}': size for axis, size in mesh.items()})
    devices = meshes.make_mesh(spread.mesh)
    placed = jax.device_put(run.variables, scoring.shardings(spread, devices))
    found = dict(dataclasses.replace(run, config=spread, variables=placed).write(texts, 5))
    assert found.keys() == expected.keys() and devices.size == 8
    for number, outputs in expected.items():
        assert [output.text for output in found[number]] == [output.text for output in outputs]
        assert [output.score for output in found[number]] == pytest.approx([x.score for x in outputs], abs=2e-3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ('changes', 'served'),
    [
        ({}, True),
        ({'decode.strategy': 'sample', 'decode.num_outputs': '2', 'decode.top_k': '3'}, True),
        ({'decode.bias': 'ab=2', 'decode.begin': 'a'}, True),
        ({'decode.strategy': 'beam'}, False),
        ({'decode.strategy': 'mbr'}, False),
        ({'decode.repetition_penalty': '1.5'}, False),
        ({'decode.draft': 'prompt'}, False),
        ({'decode.guidance': '2.0'}, False),
        ({'decode.batch_size': '9'}, False),
        ({'model.recurrence': 'lstm'}, False),
    ],
    ids=str,
)
def test_what_an_engine_does_not_know_and_few_texts_stay_in_batches(changes, served) -> None:
    run = run_of(DECODER)
    assert refill.serves(config.override(run.config, changes), 9) is served


def test_prompts_are_padded_in_front_and_sources_behind_to_one_of_few_lengths() -> None:
    assert [buckets.length(size, 100) for size in (1, 16, 17, 33, 64, 65, 97, 100)] == [
        16,
        16,
        32,
        48,
        64,
        96,
        100,
        100,
    ]
    batch = {'inputs': np.array([[7, 8]]), 'positions': np.array([[0, 1]]), 'prefix': np.array([[True, True]])}
    wide = buckets.padded(batch, 4, 3)
    assert wide['inputs'].tolist() == [[3, 3, 7, 8]] and wide['positions'].tolist() == [[-1, -1, 0, 1]]
    assert wide['prefix'].tolist() == [[False, False, True, True]]
    paired = buckets.padded(
        {**batch, 'encoder_inputs': np.array([[7, 8]]), 'encoder_positions': np.array([[0, 1]])}, 4, 3
    )
    assert paired['inputs'] is batch['inputs'] and paired['encoder_inputs'].tolist() == [[7, 8, 3, 3]]
    assert paired['encoder_positions'].tolist() == [[0, 1, -1, -1]]
