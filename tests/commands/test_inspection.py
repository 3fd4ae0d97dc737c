"""What `inspect --data` says: its numbers against counts by hand, its rows against rows made by hand."""

import dataclasses
import itertools
import pathlib
import re
import unicodedata

import numpy as np
import pytest
from rich.cells import cell_len

import toy_data
from places import ROOT
from tformer import __main__ as command_line
from tformer import config as config_lib
from tformer import errors
from tformer.config.run import Config, Data, Evaluate, Train
from tformer.data.batches import mixture
from tformer.data.batches.pipeline import Batches
from tformer.data.inspection import amounts, duplicates, padding, rendering, report
from tformer.data.tokenizers import bytes_and_characters, tokenizers
from tformer.data.tokenizers.vocabulary import BOS, CLS, EOS, MASK, PAD, SEP
from tformer.training import dummy_batch, workdir

BYTE = tokenizers.Tokenizers(bytes_and_characters.Byte(), bytes_and_characters.Byte(), ('yes', 'n\x1b[2Jo'))


@pytest.fixture(autouse=True)
def own_cache(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv('TFORMER_CACHE', str(tmp_path / 'cache'))


def made(path: pathlib.Path, objective: str = 'seq2seq', batch_size: int = 1, **data: object) -> Config:
    fields = {'tokenizer': 'byte', 'path': (str(path),), 'length': 40, 'num_buckets': 3, **data}
    if 'mixture' in fields:
        fields['path'] = ()
    train = Train(objective=objective, batch_size=batch_size)
    return Config(model=toy_data.reader_of(objective), data=Data(**fields), train=train)


def opened(config: Config, split: str = 'train') -> tuple[mixture.Concatenation, tokenizers.Tokenizers, Batches]:
    train = mixture.load(config, 'train')
    tokens = tokenizers.train_tokenizers(config, train)
    records = mixture.load(config, split)
    return records, tokens, Batches(config, tokens, split, training=split == 'train', records=records)


# -------------------------------------------------------------------------------------------------------------- padding


def counted(batches: Batches, epochs: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """(positions, those not padding) of each stack in all batches of some epochs."""
    slots, tokens = np.zeros(2), np.zeros(2)
    for step in range(round(batches.steps_per_epoch * epochs)):
        batch = batches.batch(step)
        for stack, name in enumerate(('positions', 'encoder_positions')):
            if name in batch:
                slots[stack] += batch[name].size
                tokens[stack] += (batch[name] >= 0).sum()
    return slots[: len(batches.shapes[0])], tokens[: len(batches.shapes[0])]


DIRECTORIES = {'seq2seq': toy_data.parallel, 'classification': toy_data.labelled}
CASES = [
    case
    for case in itertools.product(('seq2seq', 'classification', 'masked_lm'), ('pad', 'bucket', 'pack'))
    if case != ('classification', 'pack')
]


@pytest.mark.parametrize(('objective', 'batching'), CASES)
def test_padding_is_that_of_all_batches_of_an_epoch(objective: str, batching: str, tmp_path: pathlib.Path) -> None:
    path = DIRECTORIES.get(objective, toy_data.running)(tmp_path)
    config = made(path, objective, batching=batching, encoder_length=48 if objective == 'seq2seq' else None)
    _, _, batches = opened(config)
    found, (slots, tokens) = padding.filled(batches), counted(batches)
    np.testing.assert_allclose(found.slots.sum(axis=0), slots)
    np.testing.assert_allclose(found.tokens.sum(axis=0), tokens)
    assert found.padding == pytest.approx(1 - tokens.sum() / slots.sum())
    np.testing.assert_allclose(found.paddings, 1 - tokens / slots)
    # The same from the lengths alone, as other batchings are computed.
    limits = np.array([40, 48][: len(slots)])
    again = padding.laid([batches.parts[0].examples.lengths], [1], limits, batching, 3)
    assert again.shapes == batches.shapes and again.padding == pytest.approx(found.padding)
    ways = padding.compared(config, batches)
    own = [one for name, one in ways.items() if name.endswith('<- this run')]
    assert len(own) == 1 and own[0].padding == pytest.approx(found.padding)
    assert any(name.startswith('pack') for name in ways) == (objective != 'classification')
    # Evaluation fills its last batches up with empty rows.
    _, _, valid = opened(made(path, objective, batch_size=5, batching=batching), 'valid')
    np.testing.assert_allclose(padding.filled(valid).slots.sum(axis=0), counted(valid)[0])
    np.testing.assert_allclose(padding.filled(valid).tokens.sum(axis=0), counted(valid)[1])


def test_padding_of_a_mixture_counts_the_passes_over_its_parts(tmp_path: pathlib.Path) -> None:
    for name, train in (('a', 64), ('b', 23)):
        toy_data.parallel(tmp_path / name, train)
    short = tmp_path / 'b' / 'train.tsv'
    toy_data.write(short, [line[:9] + '\t' + line[:5] for line in short.read_text().splitlines()])
    config = made(tmp_path, batching='pad', mixture=(f'path={tmp_path}/a weight=1', f'path={tmp_path}/b weight=2'))
    _, _, batches = opened(config)
    slots, tokens = counted(batches, epochs=20)
    np.testing.assert_allclose(padding.filled(batches).paddings, 1 - tokens / slots, atol=0.01)


def test_packing_on_a_sample_is_near_packing_all(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = made(toy_data.parallel(tmp_path, 900), batching='pad')
    _, _, batches = opened(config)
    whole = padding.compared(config, batches)
    monkeypatch.setattr(padding, 'MOST_SAMPLED', 400)
    sampled = padding.compared(config, batches)
    (balanced,) = [name for name in sampled if 'encoder_length' in name]
    assert re.fullmatch(r'pack, data.encoder_length=\d+ \(400 examples\)', balanced)
    assert sampled['pack (400 examples)'].padding == pytest.approx(whole['pack'].padding, abs=0.05)
    assert sampled['bucket, 8'].padding == whole['bucket, 8'].padding


def test_a_sample_of_a_small_part_is_passed_over_as_its_examples_are(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    toy_data.write(tmp_path / 'a' / 'train.tsv', ['ab\tab'] * 400)
    toy_data.write(tmp_path / 'b' / 'train.tsv', [f'{"x" * 22}\t{"x" * 22}'] * 4)  # no two of them in a row
    config = made(tmp_path, batching='pad', mixture=(f'path={tmp_path}/a weight=9', f'path={tmp_path}/b weight=1'))
    _, _, batches = opened(config)
    whole = padding.compared(config, batches)['pack'].padding
    monkeypatch.setattr(padding, 'MOST_SAMPLED', 40)
    assert padding.compared(config, batches)['pack (40 examples)'].padding == pytest.approx(whole, abs=0.02)


def test_the_balanced_length_is_in_the_ratio_of_the_sides() -> None:
    assert padding.balanced(np.array([[10, 15], [30, 45]]), 64) == 96
    assert padding.balanced(np.array([[10, 7]]), 64) == 44  # 44.8 to a multiple of 4
    assert padding.balanced(np.array([[100, 1]]), 16) == 4


# -------------------------------------------------------------------------------------------------------------- amounts


def cells(lines: list[str], first: str) -> list[str]:
    """The cells of the first line that begins with `first`."""
    line = next(line for line in lines if line.startswith(first))
    return re.split(r'  +', line.strip())


def test_amounts_are_those_of_the_records(tmp_path: pathlib.Path) -> None:
    texts = ['abc', 'abcd', 'a' * 50, 'bb', 'c' * 39, 'd' * 38]
    toy_data.write(tmp_path / 'train.tsv', [*(f'{"yes" if i % 3 else "no"}\t{t}' for i, t in enumerate(texts)), 'bad'])
    toy_data.write(tmp_path / 'valid.tsv', ['yes\taéxb', 'no\txx', 'yes\ta' + 'b' * 60])
    config = made(
        tmp_path, 'classification', tokenizer='char', byte_fallback=False, length=40, bad_lines='skip', overlong='drop'
    )
    train, tokens, batches = opened(config)
    valid, _, other = opened(config, 'valid')
    splits, joined = {'train': batches, 'valid': other}, {'train': train, 'valid': valid}
    lines = amounts.records(config, splits, joined)
    assert cells(lines, 'train') == ['train', '6', '4', '1', '2 dropped', '33.3%']
    assert cells(lines, 'valid') == ['valid', '3', '3', '0', '1 cut', '33.3%']
    read = {split: [duplicates.read(part, ('text',), print) for part in some.splits] for split, some in joined.items()}
    lines = amounts.vocabulary(config, tokens, splits, read)
    total = sum(map(len, texts))
    assert cells(lines, 'train') == ['train text', str(total), str(total), '1.00', f'{total / 6:.1f}', '0', '0']
    # é is two bytes and one unknown token, x is unknown three times.
    assert cells(lines, 'valid') == ['valid text', '68', '67', '1.01', '22.3', '4', '6.0%']
    lines = amounts.labels(tokens.labels, splits)
    assert cells(lines, 'yes') == ['yes', '4', '66.7%', '2', '66.7%']
    assert cells(lines, 'no') == ['no', '2', '33.3%', '1', '33.3%']
    lines = report.lengths(config, splits)
    sizes = np.array([len(text) + 2 for text in texts])
    percentiles = [f'{value:.0f}' for value in np.percentile(sizes, (50, 90, 99))]
    assert cells(lines, 'train') == ['train text', f'{sizes.mean():.1f}', *percentiles, '52', '40', '33.3%']
    assert f'train text, longest: record 3: {"a" * 50}' in lines


def test_amounts_of_a_mixture_are_those_of_its_parts_together(tmp_path: pathlib.Path) -> None:
    toy_data.write(tmp_path / 'a' / 'train.tsv', ['abc\tx', 'abcde\tyz'])
    toy_data.write(tmp_path / 'b' / 'train.tsv', ['ab\txyz'])
    config = made(tmp_path, batching='pad', mixture=(f'path={tmp_path}/a weight=1', f'path={tmp_path}/b weight=3'))
    train, tokens, batches = opened(config)
    read = {'train': [duplicates.read(part, ('source', 'target'), print) for part in train.splits]}
    lines = amounts.vocabulary(config, tokens, {'train': batches}, read)
    assert cells(lines, 'train source')[:5] == ['train source', '10', '10', '1.00', '3.3']
    assert cells(lines, 'train target')[:5] == ['train target', '6', '6', '1.00', '2.0']
    assert cells(lines, '- target of')[1:5] == ['3', '3', '1.00', '1.5']  # of the first part
    lines = amounts.records(config, {'train': batches}, {'train': train})
    assert cells(lines, 'train')[:3] == ['train', '3', '3']


def test_labels_beyond_the_most_frequent_are_added_up(tmp_path: pathlib.Path) -> None:
    rows = [f'label{i:02d}\ttext' for i in range(14) for _ in range(i + 1)]
    toy_data.write(tmp_path / 'train.tsv', rows)
    _, tokens, batches = opened(made(tmp_path, 'classification'))
    lines = amounts.labels(tokens.labels, {'train': batches})
    assert cells(lines, 'label13') == ['label13', '14', f'{14 / 105:.1%}']
    assert cells(lines, '4 more') == ['4 more', '10', f'{10 / 105:.1%}']
    assert lines[-1] == '14 classes; the rarest is label00 with 1 in train'


def test_a_histogram_counts_every_record_and_marks_the_limit() -> None:
    rng = np.random.default_rng(0)
    for sizes, limit in (
        (rng.integers(0, 300, 500), 64), (rng.geometric(0.01, 500), 100), (np.array([3]), 64), (np.arange(1, 65), 64),
        (np.array([0, 1, 100_000]), 7), (np.zeros(3, int), 5), (np.array([9_000_000]), 7),
    ):  # fmt: skip
        lines = report.histogram(sizes, limit, 'data.length')
        bars = [re.fullmatch(r' *([\d,]+) - *([\d,]+) +([\d,]+) .*', line) for line in lines]
        found = [[int(cell.replace(',', '')) for cell in bar.groups()] for bar in bars if bar]
        assert sum(count for _, _, count in found) == len(sizes) and found[0][2]
        for low, high, count in found:
            assert count == ((sizes >= low) & (sizes <= high)).sum() + (low == 1) * (sizes == 0).sum()
        marks = [i for i, bar in enumerate(bars) if not bar]
        assert len(marks) == any(high == limit for _, high, _ in found)
        assert marks or not sizes.min() <= limit < sizes.max()
        assert all(found[place - 1][1] == limit for place in marks)


# ----------------------------------------------------------------------------------------------------------- duplicates


def test_duplicates_are_those_that_were_planted() -> None:
    train = ['a b', 'c', ' a b ', 'A  B', 'cafe\u0301', 'caf\u00e9', 'd', 'c']
    valid = ['x', 'C', 'd ', 'caf\u00e9', 'y']
    one, other = (duplicates.read([{'text': text} for text in texts], ('text',), print) for texts in (train, valid))
    assert duplicates.within(one.hashes['exact', 'text']).tolist() == [2, 5, 7]
    assert duplicates.within(one.hashes['near', 'text']).tolist() == [2, 3, 5, 7]
    across = [duplicates.across(other.hashes[alike, 'text'], one.hashes[alike, 'text']) for alike in duplicates.ALIKE]
    assert [found.tolist() for found in across] == [[2, 3], [1, 2, 3]]
    assert one.num_bytes == {'text': sum(len(text.encode()) for text in train)}


def test_duplicates_of_pairs_by_side_and_whole_against_brute_force() -> None:
    rng = np.random.default_rng(0)

    def some(count: int) -> list[dict[str, str]]:
        return [{side: ''.join(rng.choice(list('aA b'), 3)) for side in ('source', 'target')} for _ in range(count)]

    train, valid = some(60), some(40)
    own, other = (duplicates.read(records, ('source', 'target'), print) for records in (train, valid))
    normal = {
        'exact': lambda text: unicodedata.normalize('NFC', text).strip(),
        'near': lambda text: ' '.join(text.lower().split()),
    }
    for alike, key in itertools.product(normal, ('source', 'target', 'whole')):
        sides = ('source', 'target') if key == 'whole' else (key,)
        keys = [[tuple(normal[alike](r[side]) for side in sides) for r in records] for records in (train, valid)]
        before = [i for i, k in enumerate(keys[0]) if k in keys[0][:i]]
        assert duplicates.within(own.hashes[alike, key]).tolist() == before
        there = [i for i, k in enumerate(keys[1]) if k in keys[0]]
        assert duplicates.across(other.hashes[alike, key], own.hashes[alike, key]).tolist() == there
    halves = [duplicates.read(train[part], ('source', 'target'), print) for part in (slice(25), slice(25, None))]
    joined = duplicates.joined(halves)
    assert joined.num_bytes == own.num_bytes
    for name, values in own.hashes.items():
        np.testing.assert_array_equal(joined.hashes[name], values)


# ------------------------------------------------------------------------------------------------------------ rendering


def ids(text: str) -> list[int]:
    return bytes_and_characters.Byte().encode(text)


def shown(**rows: object) -> list[str]:
    """A row as plain lines, joined where they were wrapped."""
    batch = {name: np.array([values]) for name, values in rows.items()}
    for side in ('', 'encoder_'):
        if f'{side}inputs' in batch and f'{side}positions' not in batch:
            batch[f'{side}positions'] = np.where(batch[f'{side}inputs'] == PAD, -1, 0)
    return [rendering.plain(line) for line in rendering.row(batch, 0, BYTE)]


def test_a_masked_row_marks_what_became_of_each_selected_token() -> None:
    targets = [CLS, *ids('abcd'), SEP, PAD]
    inputs = [CLS, *ids('a'), MASK, *ids('xd'), SEP, PAD]
    lines = shown(inputs=inputs, targets=targets, weights=[0, 0, 1, 1, 1, 0, 0])
    assert lines == ['    text    <cls>|a|[mask:b]|{x→c}|[keep:d]|<sep>']


def test_a_row_of_next_tokens_is_shown_once_and_what_is_not_scored_is_marked() -> None:
    lines = shown(inputs=[BOS, *ids('ab')], targets=[*ids('ab'), EOS], weights=[0, 1, 1])
    assert lines == ['    text    <bos>|(a)|b|<eos>']
    pair = shown(
        encoder_inputs=[*ids('x'), EOS], inputs=[BOS, *ids('a')], targets=[*ids('a'), EOS], weights=[1, 1]
    )  # fmt: skip
    assert pair == ['    source  x|<eos>', '    target  <bos>|a|<eos>']


def test_sentinels_are_special() -> None:
    more = BYTE.target.extended(2)
    batch = {'encoder_inputs': [*ids('a'), more.sentinels[1], EOS], 'encoder_positions': [0, 1, 2]}
    batch |= {'inputs': [BOS], 'targets': [EOS], 'weights': [1], 'positions': [0]}
    rows = {name: np.array([values]) for name, values in batch.items()}
    source, _ = rendering.row(rows, 0, tokenizers.Tokenizers(more, more))
    assert ('<sentinel_1>', 'special') in source and ('a', 'text') in source


def test_packed_segments_stand_apart() -> None:
    lines = shown(
        inputs=[BOS, *ids('a'), BOS, *ids('b'), PAD], targets=[*ids('a'), EOS, *ids('b'), EOS, PAD],
        weights=[1, 1, 1, 1, 0], segment_ids=[1, 1, 2, 2, 0],
    )  # fmt: skip
    assert lines == ['  segment 1 of 2', '    text    <bos>|a|<eos>', '  segment 2 of 2', '    text    <bos>|b|<eos>']


def test_any_other_objective_is_shown_as_inputs_above_targets() -> None:
    lines = shown(inputs=ids('abc'), targets=ids('xbz'), weights=[1, 1, 0])
    assert lines == ['    inputs  [a]|b|[c]', '    targets x|b|(z)']


def test_a_label_and_a_hostile_text_cannot_reach_the_terminal() -> None:
    lines = shown(inputs=[CLS, *ids('a\x1b[31m\n\x07'), SEP], labels=1, label_weights=1)
    assert lines[0] == '    label   n\\x1b[2Jo'
    assert lines[1] == '    text    <cls>|a|\\x1b|[|3|1|m|\\n|\\x07|<sep>'
    assert rendering.harmless('a\u202eb\u2028\ud800\x9b\r\t') == 'a\\u202eb\\u2028\\ud800\\x9b\\r\\t'
    assert rendering.harmless('x' * 100) == 'x' * 60 + '…'
    markup = rendering.coloured([('[red]x[/red]', 'text'), ('y', 'masked')])
    assert markup.plain == '[red]x[/red]y' and str(markup.spans[-1].style) == 'bold red'


def test_tags_stand_behind_the_words_that_are_scored_and_numbers_and_places_are_labels() -> None:
    rows = {'inputs': [CLS, *ids('abc'), SEP], 'targets': [0, 1, 0, 0, 0], 'weights': [0, 1, 0, 1, 0]}
    batch = {name: np.array([values]) for name, values in {**rows, 'positions': range(5)}.items()}
    (line,) = map(rendering.plain, rendering.row(batch, 0, BYTE, tags=True))
    assert line == '    tags    <cls>|a|/n\\x1b[2Jo|b|c|/yes|<sep>'
    for label, told in ((0.25, '0.25'), ([3, 5], '3 to 5')):
        assert shown(inputs=[CLS, SEP], labels=label)[0] == f'    label   {told}'


def test_text_without_a_token_is_refused(tmp_path: pathlib.Path) -> None:
    config = made(toy_data.parallel(tmp_path))
    _, tokens, batches = opened(config)
    for part in batches.parts:
        for name, column in part.examples.columns.items():
            part.examples.columns[name] = dataclasses.replace(column, flat=column.flat[:0], offsets=0 * column.offsets)
    with pytest.raises(errors.UserError, match=r'^every text of the training split is empty$'):
        amounts.vocabulary(config, tokens, {'train': batches}, {})


def test_long_rows_are_wrapped_and_cut() -> None:
    lines = shown(inputs=[BOS, *ids('字' * 100)], targets=[*ids('字' * 100), EOS], weights=[1] * 301)
    assert all(cell_len(line) <= rendering.WIDTH for line in lines)
    assert len(lines) > 1 and lines[-1].endswith('… 182 more tokens')


# ---------------------------------------------------------------------------------------------------------- the command


def looked(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    command_line.main(['tformer', 'inspect', '--data', *map(str, arguments)])
    said = capsys.readouterr().out
    without_path = re.sub(r'\S+/(?=cache: )', '', said)  # a path is as long as it is
    assert all(cell_len(line) <= rendering.WIDTH for line in without_path.splitlines())
    return said


def recipe(name: str, path: pathlib.Path, *more: str) -> list[str]:
    size = 'smoke' if ':' not in name else 'pretrain,smoke'
    file = f'{ROOT}/configs/{name.split(":")[0]}.py:{size}'
    return [f'--config={file}', f'--config.data.path={path}', '--config.mesh.data=1', *more]


def test_the_command_shows_translations(tmp_path: pathlib.Path, capsys) -> None:
    path = toy_data.parallel(tmp_path / 'data')
    train = (path / 'train.tsv').read_text().splitlines()
    toy_data.write(path / 'test.tsv', [train[0], train[1].upper(), train[2].split('\t')[0] + '\tother'])
    (path / 'valid.tsv').unlink()
    said = looked(capsys, *recipe('translate', path, '--config.data.batching=pack', '--config.evaluate.samples=3'))
    lines = [line.strip() for line in said.splitlines()]
    assert cells(lines, 'test: source in train') == ['test: source in train', '2', '66.7%', '3', '100.0%']
    assert cells(lines, 'test: whole in train') == ['test: whole in train', '1', '33.3%', '2', '66.7%']
    assert any(line.startswith('no valid split:') for line in lines)
    assert '<bos>|' in said and '|<eos>' in said and 'segment 1 of' in said and '3 rows of the first epoch' in said
    # The cache is new: all in it is of this run, tokens, layouts and the tokenizer.
    entries = [entry for entry in (tmp_path / 'cache').iterdir() if entry.is_dir()]
    files = [file for entry in entries if not (entry / 'tokenizer.json').exists() for file in entry.iterdir()]
    assert f'{sum(file.stat().st_size for file in files):,} bytes' in lines[-1] and str(tmp_path / 'cache') in lines[-1]


def test_the_command_uses_the_tokenizers_of_a_workdir(tmp_path: pathlib.Path, capsys) -> None:
    path = toy_data.labelled(tmp_path / 'data')
    arguments = recipe('classify', path, '--config.data.tokenizer=char')
    config = config_lib.load(arguments[0].removeprefix('--config='), {'data.path': str(path), 'mesh.data': '1'})
    home = tmp_path / 'run'
    home.mkdir()
    tokenizers.Tokenizers(None, bytes_and_characters.Byte(), ('bird', 'none')).save(home)
    workdir.save_config(home, dummy_batch.assumed(config))
    said = looked(capsys, f'--workdir={home}', '--config.evaluate.samples=1')
    assert 'vocabulary: 263 (text)' in said and 'label   ' in said
    (home / 'tokenizer.json').unlink()
    with pytest.raises(errors.UserError, match=r'tokenizer\.json'):
        looked(capsys, f'--workdir={home}')


def test_the_command_shows_a_mixture_and_masks(tmp_path: pathlib.Path, capsys) -> None:
    for name in ('one', 'two'):
        toy_data.labelled(tmp_path / name)
    parts = f'--config.data.mixture=path={tmp_path}/one weight=3,path={tmp_path}/two weight=1'
    arguments = recipe('classify:pretrain', tmp_path, '--config.data.path=', parts)
    said = looked(capsys, *arguments)
    weights = [re.split(r'  +', line.strip())[1:5] for line in said.splitlines() if re.match(r'  - \S+ weight', line)]
    assert weights == [['64', '64', '1.5', '3'], ['64', '64', '0.5', '1']]
    assert '[mask:' in said and '<cls>' in said


def test_the_command_shows_running_text_in_colour_where_there_is_a_terminal(
    tmp_path: pathlib.Path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = toy_data.running(tmp_path / 'data')
    (path / 'train.txt').write_text((path / 'train.txt').read_text() + '\x1b[2J' * 9)
    arguments = [f'--config={ROOT}/configs/lm_stdlib.py:smoke', '--config.data.source=files', '--config.mesh.data=1']
    arguments += [f'--config.data.path={path}', '--config.data.tokenizer=byte']
    said = looked(capsys, *arguments)
    assert '\x1b' not in said and 'pack <- this run' in said
    monkeypatch.setenv('FORCE_COLOR', '1')
    monkeypatch.setenv('TERM', 'xterm-256color')
    monkeypatch.delenv('NO_COLOR', raising=False)
    command_line.main(['tformer', 'inspect', '--data', *arguments])
    colours = capsys.readouterr().out
    assert '\x1b[1m' in colours and '\x1b[2J' not in colours
    monkeypatch.setenv('NO_COLOR', '1')
    assert '\x1b' not in looked(capsys, *arguments)


def test_no_rows_are_shown_where_none_are_asked_for(tmp_path: pathlib.Path) -> None:
    config = made(toy_data.parallel(tmp_path))
    records, tokens, _ = opened(config)
    quiet = Config(config.model, config.data, config.optimizer, config.train, evaluate=Evaluate(samples=0))
    lines = [rendering.plain(line) for line in report.report(quiet, tokens, records, lambda line: None)]
    assert not any('rows of the first epoch' in line for line in lines)
    assert lines[-2] == 'token cache'
