"""What is printed or written, what is said of texts that training knows nothing of, and the chats that lines hold."""

import dataclasses
import functools
import json
import pathlib
import signal
import types

import pytest

import halting
import hub_directories
import resuming
from fresh_runs import fresh_run
from lives import Life
from places import TESTS
from tformer import config
from tformer.__main__ import main
from tformer.commands import generate, scoring, streaming
from tformer.commands.import_ import import_hub
from tformer.commands.run import Run, check_draft
from tformer.config import Config, Model
from tformer.data.tokenizers.bytes_and_characters import Char
from tformer.data.tokenizers.tokenizers import Tokenizers
from tformer.decode.text import Output
from tformer.errors import UserError

SOURCE, TARGET = Char('ab'), Char('xy')


def run(monkeypatch, family, tokenizers, write, texts, **flags):
    """Runs the command on a run that writes the text write(text, seed)."""

    def written(texts, seed):
        return [(i, [Output(write(texts[i], seed), -0.5, 3)]) for i in reversed(range(len(texts)))]

    loaded = types.SimpleNamespace(config=Config(Model(family=family)), tokenizers=tokenizers, write=written)
    loaded.for_writing = lambda: loaded
    monkeypatch.setattr(generate.Run, 'load', lambda *given, **_: loaded)
    monkeypatch.setattr(generate.commands, 'needed', lambda flags, name: name)
    given = {'checkpoint': 'best', 'input': None, 'output': None, 'seed': 0, 'n': None}
    given |= {'chat': False, 'scores': False, 'jsonl': False, 'draft': None}
    generate.run(texts, {}, types.SimpleNamespace(**given | flags))


@pytest.mark.parametrize(
    ('family', 'tokenizers', 'unknown'),
    [
        ('decoder', Tokenizers(SOURCE, TARGET), "'a' 'b'"),
        ('encoder_decoder', Tokenizers(SOURCE, TARGET), "'x' 'y'"),
        ('encoder_decoder', Tokenizers(None, TARGET), "'a' 'b'"),
        ('encoder_decoder', Tokenizers(Char('abxy'), TARGET), None),
    ],
)
def test_characters_that_the_side_that_reads_them_lacks_are_named(monkeypatch, capsys, family, tokenizers, unknown):
    run(monkeypatch, family, tokenizers, lambda text, seed: f'{text}{seed}', ['ab', 'xya'], seed=7)
    said = capsys.readouterr()
    assert said.out == 'ab7\nxya7\n'
    line = f'training had none of these, so the output means little: {unknown}\n'
    assert said.err == ('' if unknown is None else line)


CHAT = [{'role': 'system', 'content': 'b'}, {'role': 'user', 'content': 'a'}]


@pytest.mark.parametrize('line', [json.dumps(CHAT), json.dumps({'messages': CHAT, 'id': 1})])
def test_a_chat_in_json_is_read(line: str) -> None:
    assert generate.chat_of(line) == CHAT


@pytest.mark.parametrize('line', ['hello', '', '[1, 2]', '[]', '[a', '{"role": "user"}', '{x}', '"a"', '[' * 10_000])
def test_any_other_line_is_a_users_message(line: str) -> None:
    assert generate.chat_of(line) == [{'role': 'user', 'content': line}]


@pytest.mark.parametrize('line', ['[{"rol": "user", "content": "a"}]', '{"messages": "a"}', '{"messages": []}'])
def test_a_malformed_chat_is_refused(line: str) -> None:
    with pytest.raises(UserError, match='messages'):
        generate.chat_of(line)


@pytest.mark.parametrize(
    'line', ['[{"role": "user", "content": "x"},', '{"messages": [{"role": "user"', '[ {"content": "a}']
)
def test_a_damaged_chat_is_no_users_message(line: str) -> None:
    with pytest.raises(UserError, match=r'begins as a chat in JSON does, and is none: .*column'):
        generate.chat_of(line)


def test_only_the_messages_of_a_chat_are_searched_for_what_training_lacked(monkeypatch, capsys) -> None:
    texts = [json.dumps(CHAT), 'abc']
    run(monkeypatch, 'decoder', Tokenizers(None, Char('ab')), lambda chat, _: str(len(chat)), texts, chat=True)
    said = capsys.readouterr()
    assert said.out == '2\n1\n' and said.err.endswith(": 'c'\n")


STORED = TESTS / 'stored_run'
FEW = ['--config.decode.max_len=4', '--config.decode.batch_size=2']
BEAM = [*FEW, '--config.decode.strategy=beam', '--config.decode.beam_size=3', '--n=2']


@pytest.mark.slow
def test_scores_and_lines_of_json_hold_the_same_outputs(tmp_path: pathlib.Path, capsys) -> None:
    """Texts of unequal lengths, two in a batch, come out in their order."""
    texts = ['the small bird', 'a', 'a green tree sees the river']
    fields = dict(flag.removeprefix('--config.').split('=') for flag in BEAM[:-1]) | {'decode.num_outputs': '2'}
    found = dict(Run.load(STORED, fields, placed=True).write(texts))
    assert all(outputs[0].score > outputs[1].score for outputs in found.values())
    outputs = [output for index in range(3) for output in found[index]]

    def said(*flags: str) -> list[str]:
        main(['tformer', 'generate', f'--workdir={STORED}', *texts, *BEAM, *flags])
        return capsys.readouterr().out.split('\n')[:-1]

    assert said() == [output.text for output in outputs]
    assert all('\n' not in output.text for output in outputs)
    assert said('--scores') == [f'{output.score:.4f}\t{output.text}' for output in outputs]
    rows = list(map(json.loads, said('--jsonl')))
    assert [row['text'] for row in rows] == texts
    assert [output for row in rows for output in row['outputs']] == [output._asdict() for output in outputs]
    assert said('--jsonl', f'--output={tmp_path}/out') == []
    assert list(map(json.loads, (tmp_path / 'out').read_text().split('\n')[:-1])) == rows
    with pytest.raises(UserError, match='tokens, the model takes'):
        said(' '.join(texts * 9), f'--output={tmp_path}/long')
    assert [path.name for path in tmp_path.iterdir()] == ['out']
    with pytest.raises(UserError, match=r'^--scores and --jsonl: choose one; --jsonl has the scores$'):
        said('--scores', '--jsonl')
    with pytest.raises(UserError, match=r'^decode\.num_outputs=4 is above decode\.beam_size=3$'):
        said('--n=4')


def assert_same(one: pathlib.Path, other: pathlib.Path) -> None:
    """Two files of lines of JSON have the same texts and outputs, and scores to rounding."""
    rows, others = ([json.loads(line) for line in file.read_text().split('\n')[:-1]] for file in (one, other))
    for row, expected in zip(rows, others, strict=True):
        for output, expected_output in zip(row['outputs'], expected['outputs'], strict=True):
            assert output.pop('score') == pytest.approx(expected_output.pop('score'), abs=1e-4)
        assert row == expected


SAMPLED = ['--config.decode.strategy=sample', '--config.decode.temperature=2.0', '--n=3', '--jsonl', *FEW]


@pytest.mark.signals
@pytest.mark.parametrize('how', [SAMPLED, [*BEAM, '--jsonl']], ids=['rows', 'batches'])
@pytest.mark.proof_cases('batches')
def test_a_command_that_is_killed_goes_on_where_it_was(tmp_path: pathlib.Path, how) -> None:
    """Seven texts, two in a batch: it dies with five rows kept; of beams the fifth has its batch's other one ahead."""
    (tmp_path / 'texts').write_text(''.join(f'{"the small bird " * n}\n' for n in (1, 5, 2, 4, 3, 2, 1)))
    command = ['generate', f'--workdir={STORED}', f'--input={tmp_path}/texts', *how]
    parts, whole = tmp_path / 'parts', tmp_path / 'whole'
    dying = functools.partial(halting.die_at, 'a row', 6)
    assert Life(tmp_path, *command, f'--output={parts}', before=dying).wait() == -signal.SIGKILL
    kept = (tmp_path / 'parts.part').read_text().splitlines()
    assert len(kept) == 1 + 5 and not parts.exists()
    other = Life(tmp_path, *command, '--seed=1', f'--output={parts}')
    assert other.wait() == 2 and 'seed=0 there, 1 here' in other.said, other.said
    (tmp_path / 'parts.part').write_text('\n'.join(kept) + '\n[5, [["torn')
    assert Life(tmp_path, *command, f'--output={parts}').wait() == 0
    assert Life(tmp_path, *command, f'--output={whole}').wait() == 0
    assert len(whole.read_text().splitlines()) == 7
    assert_same(parts, whole)
    assert how is SAMPLED or parts.read_text() == whole.read_text()  # batches are those of a command that went on
    assert sorted(path.suffix for path in tmp_path.iterdir() if path.stem in ('parts', 'whole')) == ['', '']


@pytest.mark.proof
@pytest.mark.signals
@pytest.mark.parametrize(
    ('victim', 'how'),
    [(1, SAMPLED), (0, SAMPLED), (1, [*BEAM, '--jsonl']), (0, [*BEAM, '--jsonl'])],
    ids=['second, rows', 'first, rows', 'second, batches', 'first, batches'],
)
def test_what_two_processes_left_one_finishes(tmp_path: pathlib.Path, victim, how) -> None:
    """One dies with two rows kept, the other ends; then one and two write the same file.

    The first one ends with a line; so may the second one, unless jax, which misses the first one, ends it before.
    """
    (tmp_path / 'texts').write_text(''.join(f'{"the small bird " * (1 + n % 5)}\n' for n in range(14)))
    command = ['generate', f'--input={tmp_path}/texts', *how]
    files = [tmp_path / name for name in ('left', 'together', 'alone')]
    commands = [[*command, f'--output={file}'] for file in files]
    parts = [tmp_path / 'left.part', tmp_path / 'left.part.1']
    dying = functools.partial(halting.die_behind, parts[1 - victim], 1 + 4, 3)
    lives = resuming.begin(tmp_path, commands[0], STORED, 2, before=dying, victim=victim)
    other = lives[1 - victim]
    assert lives[victim].wait() == -signal.SIGKILL
    code = other.wait()
    said = {1: 'tformer: another process of the run has ended; the same command resumes from what is saved ('}
    said |= {} if victim else {-signal.SIGABRT: 'another task died'}
    assert other.said.count(said[code]) == 1 and 'Traceback' not in other.said
    assert len(parts[victim].read_text().splitlines()) == 1 + 2
    assert len(parts[1 - victim].read_text().splitlines()) > 4 and not files[0].exists()
    resuming.end(resuming.begin(tmp_path, commands[0], STORED))
    resuming.end(resuming.begin(tmp_path, commands[1], STORED, 2))
    resuming.end(resuming.begin(tmp_path, commands[2], STORED))
    assert len(files[2].read_text().splitlines()) == 14
    for file in files[:2]:
        assert_same(file, files[2])
    assert not list(tmp_path.glob('*.part*'))


def test_several_processes_need_a_file(monkeypatch) -> None:
    monkeypatch.setattr(generate.jax, 'process_count', lambda: 2)
    with pytest.raises(UserError, match=r'^--coordinator: several processes need --output=FILE$'):
        main(['tformer', 'generate', f'--workdir={STORED}', 'a'])


@pytest.mark.slow
def test_a_smaller_run_drafts_what_is_written(monkeypatch, capsys) -> None:
    """The stored run drafts for itself; the texts are those without a draft. Runs that do not fit are named."""
    texts = ['the small bird', 'a green tree sees the river']
    flags = ['tformer', 'generate', f'--workdir={STORED}', *texts, '--scores', '--config.decode.max_len=7']
    beams, flags = [*flags, '--config.decode.strategy=beam'], [*flags, '--config.decode.strategy=greedy']
    main(flags)
    plain = capsys.readouterr().out
    main([*flags, f'--draft={STORED}', '--config.decode.draft_len=3'])
    drafted = capsys.readouterr().out
    main([*flags, '--config.decode.draft=prompt'])
    looked_up = capsys.readouterr().out
    for found in (drafted, looked_up):
        for line, other in zip(plain.splitlines(), found.splitlines(), strict=True):
            (score, text), (other_score, other_text) = line.split('\t'), other.split('\t')
            assert text == other_text and float(score) == pytest.approx(float(other_score), abs=2e-4)
    drafts, make = [], scoring._writer
    monkeypatch.setattr(
        scoring, '_writer', lambda *given, draft, cut: drafts.append(draft) or make(*given, draft=draft, cut=cut)
    )
    run = Run.load(STORED, {'decode.max_len': '7', 'decode.strategy': 'greedy', 'decode.draft_len': '3'}, draft=STORED)
    assert run.generate(texts) == [line.split('\t')[1] for line in plain.splitlines()] and drafts == [run.draft.model]
    with pytest.raises(UserError, match=r'decode\.draft.*here: it applies where decode\.strategy is greedy or sample'):
        main([*beams, '--config.decode.draft=prompt'])
    with pytest.raises(
        UserError, match=r'^--draft: decode\.strategy=beam reads no drafts; valid: greedy, sample, mbr$'
    ):
        main([*beams, f'--draft={STORED}'])


@pytest.mark.slow
@pytest.mark.parametrize(
    ('changes', 'line'),
    [
        ({'letters': 'abcde'}, 'has other tokenizers: '),
        ({'model.max_len': 16}, 'has model.max_len=16, below 32 here'),
        ({'model.vocab_size': 64}, 'has other model.vocab_size: 64 there, '),
        ({'start': ()}, "has other data.start: () there, ('bos',) here"),
        ({'model.recurrence': 'lstm'}, ': model.recurrence=lstm of nowhere cannot forget a token'),
    ],
)
def test_a_run_that_does_not_fit_drafts_nothing(changes, line) -> None:
    run = fresh_run('causal_lm', family='decoder', letters='abcdef')
    model = {name: value for name, value in changes.items() if name.startswith('model.')}
    fresh = {'letters': 'abcdef', **{name: value for name, value in changes.items() if name not in model}}
    other = fresh_run('causal_lm', family='decoder', **fresh)
    other = dataclasses.replace(other, config=config.override(other.config, model))
    check_draft(run, run)
    experts = {'model.num_experts': 2, 'model.expert_dispatch': 'capacity'}
    with pytest.raises(
        UserError, match=r'^--draft=nowhere: model\.expert_dispatch=capacity of nowhere needs the tokens'
    ):
        check_draft(run, dataclasses.replace(run, config=config.override(run.config, experts)))
    with pytest.raises(UserError) as error:
        check_draft(other, run)
    assert str(error.value).startswith('--draft=nowhere') and line in str(error.value)


DRAWN = {'strategy': 'sample', 'temperature': '1.5', 'top_k': '9'}


@pytest.mark.parametrize('fields', [pytest.param({}, marks=pytest.mark.proof), DRAWN], ids=str)
@pytest.mark.proof
def test_a_terminal_shows_texts_as_they_grow(tmp_path: pathlib.Path, capsys, monkeypatch, fields) -> None:
    """In pieces, which are the lines that are printed elsewhere."""
    hub_directories.write(tmp_path / 'hub', 'llama', max_position_embeddings=64)
    import_hub(str(tmp_path / 'hub'), tmp_path / 'run')
    given = {'max_len': '9', **fields}
    flags = [f'--config.decode.{name}={value}' for name, value in given.items()]
    command = ['tformer', 'generate', f'--workdir={tmp_path}/run', 'a b c', 'd', '--seed=3', *flags]
    main(command)
    plain = capsys.readouterr().out
    pieces = []
    monkeypatch.setattr(generate.sys.stdout, 'isatty', lambda: True, raising=False)
    monkeypatch.setattr(generate, 'print', lambda text='', **_: pieces.append(text), raising=False)
    main(command)
    assert ''.join(pieces) == ''.join(plain.splitlines()) and len([piece for piece in pieces if piece]) > 8
    run = Run.load(tmp_path / 'run', {f'decode.{name}': value for name, value in given.items()}, placed=True)
    assert [''.join(each) for each in streaming.stream(run, ['a b c', 'd'], 3)] == plain.splitlines()
    with pytest.raises(UserError, match='has 61 tokens, the model takes 55'):
        next(streaming.stream(run, ['a ' * 61], 3))


@pytest.mark.parametrize(
    'fields', [{'strategy': 'beam'}, {'repetition_penalty': '1.5'}, {'guidance': '2.0'}, {'min_len': '2'}], ids=str
)
def test_what_an_engine_does_not_know_is_not_shown_as_it_grows(fields) -> None:
    run = fresh_run('causal_lm', family='decoder')
    assert streaming.streams(run)
    changes = {f'decode.{name}': value for name, value in fields.items()}
    assert not streaming.streams(dataclasses.replace(run, config=config.override(run.config, changes)))
