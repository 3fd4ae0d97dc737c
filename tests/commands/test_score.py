"""The log-likelihoods of texts: what the model's logits say, in windows too, and of what it writes itself."""

import json
import math
import os

import numpy as np
import pytest
import scipy.special

from fresh_runs import fresh_run
from places import TESTS
from tformer import __main__ as command_line
from tformer.commands.run import Run
from tformer.commands.score import Score, score
from tformer.errors import UserError

RUNS = {
    'decoder': ('causal_lm', 'decoder', {}),
    'without a start': ('causal_lm', 'decoder', {'start': ()}),
    'prefix': ('prefix_lm', 'decoder', {}),
    'prefix from left to right': ('prefix_lm', 'decoder', {'bidirectional_prefix': False}),
    'decoder of pairs': ('seq2seq', 'decoder', {}),
    'encoder_decoder': ('seq2seq', 'encoder_decoder', {}),
    'encoder_decoder that goes on': ('prefix_lm', 'encoder_decoder', {}),
}
QUICK = ('decoder', 'without a start', 'prefix', 'encoder_decoder')
EVERY = [name if name in QUICK else pytest.param(name, marks=pytest.mark.proof) for name in RUNS]
NEAR = 2e-5  # logits of 30 and large parameters: products of another batch round by 2e-4
PAIRS = [
    ('ab', 'cde'),
    ('', 'a'),
    ('eed .a', 'bb'),
    ('abc', ''),
    *((source, end) for source in 'abc' for end in 'abcde .f'),
]


@pytest.fixture(scope='module')
def runs():
    return {
        name: fresh_run(objective, family=family, letters='abcde .f', layers=2, **data)
        for name, (objective, family, data) in RUNS.items()
    }


def by_hand(run: Run, source: str, target: str, ended: bool) -> tuple[list[float], bool]:
    """Returns the log-probability of each token of the target, from the logits of a row of its own, and whether each is
    the likeliest."""
    tokenizer = run.tokenizers.target
    given, wanted = tokenizer.encode(source), [*tokenizer.encode(target), *([tokenizer.specials.eos] if ended else [])]
    start = tokenizer.specials.of(run.config.data.start)
    if run.config.model.family == 'encoder_decoder':
        batch = run.batch([source], [''])
        before, inputs = len(start), [*start, *wanted]
    else:
        separator = [tokenizer.specials.sep] if run.config.train.objective == 'seq2seq' else []
        front = [*start, *given, *separator] or [tokenizer.specials.bos]
        before, inputs = len(front), [*front, *wanted]
        seen = run.config.train.objective != 'causal_lm' and run.config.data.bidirectional_prefix
        batch = {'prefix': np.arange(len(inputs))[None] < before} if seen else {}
    batch |= {'inputs': np.array([inputs]), 'positions': np.arange(len(inputs))[None]}
    logits_TV = np.asarray(run.apply(batch), np.float64)[0]
    logprobs_TV = scipy.special.log_softmax(logits_TV, -1)
    rows = logprobs_TV[before - 1 : before - 1 + len(wanted)]
    return [row[token] for row, token in zip(rows, wanted, strict=True)], rows.argmax(-1).tolist() == wanted


@pytest.mark.slow
@pytest.mark.parametrize('ended', [None, *(pytest.param(each, marks=pytest.mark.proof) for each in (False, True))])
@pytest.mark.parametrize('name', EVERY)
@pytest.mark.proof_cases('prefix-None', 'without a start-None', 'encoder_decoder-None')
def test_a_score_is_the_sum_of_what_the_logits_say(runs, name, ended) -> None:
    run = runs[name]
    found = score(run, [{'source': source, 'target': target} for source, target in PAIRS], ended=ended)
    if ended is None:
        ended = 'pairs' in name or 'encoder' in name
    for each, (source, target) in zip(found, PAIRS, strict=True):
        expected, greedy = by_hand(run, source, target, ended)
        assert each.greedy == greedy
        np.testing.assert_allclose([logprob for _, logprob in each.pieces], expected, rtol=NEAR, atol=2e-5)
        assert [piece for piece, _ in each.pieces] == [*target, *(['<eos>'] if ended else [])]
        assert each.log_likelihood == pytest.approx(sum(expected), rel=NEAR, abs=1e-4)
        assert each.perplexity == pytest.approx(math.exp(-sum(expected) / max(len(expected), 1)), rel=1e-3)
        assert each.bytes == len(target)
    assert ended or len({each.greedy for each in found}) == 2


@pytest.mark.slow
def test_the_score_of_a_text_is_that_of_its_beginning_and_of_its_rest(runs) -> None:
    text, run = 'abc de. fa', runs['decoder']
    whole, *parts = score(run, [text, 'abc de', {'source': 'abc de', 'target': '. fa'}])
    assert whole.log_likelihood == pytest.approx(sum(part.log_likelihood for part in parts), rel=NEAR, abs=1e-4)
    spaced = score(run, [{'source': 'abc ', 'target': 'de'}, {'source': 'abc', 'target': ' de'}])
    assert spaced[0].pieces == spaced[1].pieces and len(spaced[0].pieces) == 3


@pytest.mark.slow
@pytest.mark.parametrize(
    'stride', [5, None, *(pytest.param(each, marks=pytest.mark.proof) for each in (1, 16, 31, 32))]
)
def test_a_long_text_is_read_in_windows_that_score_each_token_once(runs, stride) -> None:
    """Token p of window [b, e) is what the model says of it after the tokens from b on."""
    run, tokenizer, longest = runs['decoder'], runs['decoder'].tokenizers.target, 32
    text = 'ab cd. effe' * 9
    tokens = [tokenizer.specials.bos, *tokenizer.encode(text)]
    (found,) = score(run, [text], stride=stride)
    step, start, expected, contexts = stride or 16, 1, [], []
    while start < len(tokens):
        end = min(len(tokens), max(start + step, longest + 1))
        begin = max(0, end - 1 - longest)
        inputs = np.array([tokens[begin : end - 1]])
        logits_TV = np.asarray(run.apply({'inputs': inputs, 'positions': np.arange(inputs.size)[None]}))[0]
        for place in range(start, end):
            expected.append(scipy.special.log_softmax(logits_TV[place - 1 - begin])[tokens[place]])
            contexts.append(place - begin)
        start = end
    assert len(expected) == len(found.pieces) == len(tokens) - 1
    assert min(contexts[longest:]) >= longest + 1 - step
    np.testing.assert_allclose([logprob for _, logprob in found.pieces], expected, rtol=NEAR, atol=2e-5)


@pytest.mark.parametrize(
    'name',
    ['decoder', *(pytest.param(each, marks=pytest.mark.proof) for each in ('decoder of pairs', 'encoder_decoder'))],
)
def test_what_a_run_writes_has_its_score(runs, name) -> None:
    run, sources = runs[name], ['ab', 'e', 'c. d']
    written = dict(run.write(sources))
    texts = [written[index][0] for index in range(3)]
    pairs = [{'source': source, 'target': output.text} for source, output in zip(sources, texts, strict=True)]
    for output, pair in zip(texts, pairs, strict=True):
        ended = output.length > len(output.text)
        (found,) = score(run, [pair], ended=ended)
        assert len(found.pieces) == output.length
        assert found.log_likelihood == pytest.approx(output.score, rel=NEAR, abs=1e-4)


def test_the_perplexity_is_of_a_token_and_of_no_token_1() -> None:
    assert Score([('a', math.log(0.5)), ('b', math.log(0.125))], False, 2).perplexity == pytest.approx(4.0)
    assert Score([], True, 0).perplexity == 1.0


def test_the_command_prints_a_line_of_json_for_each_text(tmp_path, capsys) -> None:
    stored, pairs = TESTS / 'stored_run', [{'source': 'the small bird', 'target': 'a'}, {'source': 'a', 'target': 'b'}]
    file = tmp_path / 'pairs'
    file.write_text(''.join(json.dumps(pair) + '\n' for pair in pairs))
    command_line.main(['tformer', 'score', f'--workdir={stored}', f'--input={file}', '--tokens'])
    said = capsys.readouterr()
    found = score(Run.load(stored), pairs)
    for row, each in zip(map(json.loads, said.out.splitlines()), found, strict=True):
        assert row['pieces'] == [list(piece) for piece in each.pieces]
        assert (row['log_likelihood'], row['tokens']) == (each.log_likelihood, len(each.pieces))
        assert (row['perplexity'], row['greedy']) == (each.perplexity, each.greedy)
    nats = -sum(each.log_likelihood for each in found)
    count = sum(len(each.pieces) for each in found)
    line = f'2 texts, {count} tokens: perplexity {math.exp(nats / count):.4f}, {nats / math.log(2) / 2:.4f} bits a byte'
    assert said.err.splitlines()[-1] == line


@pytest.mark.parametrize(
    ('name', 'text', 'flags', 'line'),
    [
        ('decoder', '{a}', {}, 'in.txt:1: it begins with { and is not a JSON object; a text that does is {"target": T'),
        ('decoder', '{"target": "a", "sauce": "b"}', {}, "in.txt:1: 'sauce' is unknown; valid: source, target"),
        ('decoder', '{"source": "a"}', {}, "in.txt:1: it has no 'target'"),
        ('decoder', '{"target": ["a"]}', {}, "in.txt:1: 'target' is not a string"),
        ('decoder', '{"target": "\\ud800"}', {}, "in.txt:1: 'target' has half of a surrogate pair"),
        ('decoder', '{"target": ' + '[' * 100_000, {}, 'in.txt:1: it begins with { and is not a JSON object'),
        ('decoder', '{"target": ' + '1' * 5_000 + '}', {}, 'in.txt:1: it begins with { and is not a JSON object'),
        ('decoder', 'a', {'stride': 33}, '--stride=33 must be from 1 to model.max_len=32'),
        ('decoder', 'a', {'stride': 0}, '--stride=0 must be from 1'),
        ('encoder_decoder', 'a', {}, 'in.txt:1: the run writes targets for sources: {"source": ..., "target": ...}'),
        ('encoder_decoder', '{"target": "a"}', {}, "in.txt:1: it has no 'source'"),
        (
            'encoder_decoder',
            {'source': 'a' * 40, 'target': 'b'},
            {},
            'in.txt:1: it has 41 tokens, the model takes 24 (data.encoder_length)',
        ),
        ('prefix', 'a' * 40, {}, 'in.txt:1: it has 40 tokens, the model takes 32'),
    ],
)
def test_what_cannot_be_scored_is_named(runs, name, text, flags, line) -> None:
    with pytest.raises(UserError) as error:
        score(runs[name], [text], source='in.txt', **flags)
    assert str(error.value).startswith(line)


def test_an_encoder_writes_nothing_to_score() -> None:
    with pytest.raises(UserError, match=r'^score: model\.family=encoder does not write text; valid: decoder, '):
        score(fresh_run('masked_lm'), ['a'])


def test_a_token_of_both_source_and_target_is_scored(monkeypatch, runs) -> None:
    """Where a vocabulary joins the end of the source with the beginning of the target, as one token."""
    run, tokenizer = runs['decoder'], runs['decoder'].tokenizers.target
    joined, plain = tokenizer.encode('c')[0], tokenizer.encode_batch
    monkeypatch.setattr(tokenizer, 'encode_batch', lambda texts: plain([text.replace('ab', 'c') for text in texts]))
    both, alone = score(run, [{'source': 'ea', 'target': 'bd'}, {'source': 'e', 'target': 'cd'}])
    assert both.pieces == alone.pieces and both.pieces[0][0] == tokenizer.piece(joined)


def test_nothing_to_score_is_said(capsys) -> None:
    nothing = '{"source": "a", "target": ""}'
    command_line.main(['tformer', 'score', f'--workdir={TESTS}/stored_run', nothing, '--ended=false'])
    said = capsys.readouterr()
    assert json.loads(said.out)['perplexity'] is None and said.err.endswith('1 texts, 0 tokens: nothing to score\n')
    assert Score([('a', -800.0)], False, 1).perplexity == math.inf


@pytest.mark.parametrize('name', ['score', 'generate', 'fill', 'predict'])
def test_an_output_that_cannot_be_written_is_told_before_anything_is_computed(name, tmp_path) -> None:
    os.mkfifo(tmp_path / 'pipe')
    cases = {
        f'{tmp_path}/no/x': 'the directory .*no does not exist',
        f'{tmp_path}/pipe': 'is not a regular file',
        str(tmp_path): 'is a directory',
        '/': 'is a directory',
    }
    for file, line in cases.items():
        with pytest.raises(UserError, match=f'^--output={file}:? {line}'):
            command_line.main(['tformer', name, '--workdir=nowhere', f'--output={file}', 'a'])


@pytest.mark.parametrize('name', ['score', 'generate', 'fill', 'predict'])
def test_the_file_of_the_texts_is_not_written_over(name, tmp_path) -> None:
    texts, link = tmp_path / 'texts', tmp_path / 'link'
    texts.write_text('a\nb\n')
    link.symlink_to(texts)
    for output in (texts, link, f'{tmp_path}/../{tmp_path.name}/texts'):
        with pytest.raises(UserError, match=f'^--output={output} is the file of the texts, which would be lost'):
            command_line.main(
                ['tformer', name, f'--workdir={TESTS}/stored_run', f'--input={texts}', f'--output={output}']
            )
    assert texts.read_text() == 'a\nb\n' and link.is_symlink()
