"""`tformer prepare --output`: its processes, Beam, what a kill leaves, and the mistakes of its flags."""

import json
import os
import pathlib
import subprocess
import sys
import time
import types

import pytest

import beam_python
import tformer
from lives import HANG
from places import ROOT
from tformer import __main__ as command_line
from tformer import config as config_lib
from tformer.data.prepared import prepare
from tformer.data.sources import prepare as tfds_sets
from tformer.errors import UserError
from tformer.training import setup

FLAGS = (f'--config={ROOT}/configs/lm_stdlib.py', '--config.data.source=files', '--config.data.tokenizer=byte',
         '--config.data.deduplicate=exact')  # fmt: skip


def corpus(place: pathlib.Path) -> str:
    place.mkdir()
    for number in range(12):
        rows = [json.dumps({'text': f'text {i % 150} of {number % 7}: ' + 'naïve ' * (i % 40)}) for i in range(200)]
        (place / f'train-{number:05d}-of-00012.jsonl').write_text('\n'.join(rows))
    return f'--config.data.path={place}/train-*.jsonl'


def start(*flags: str, python: str = sys.executable) -> subprocess.Popen[str]:
    environment = {**os.environ, 'PYTHONPATH': str(ROOT), 'JAX_PLATFORMS': 'cpu'}
    command = [python, '-m', 'tformer', 'prepare', *FLAGS, *flags]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def run(*flags: str, python: str = sys.executable) -> str:
    process = start(*flags, python=python)
    out, err = process.communicate(timeout=HANG)
    assert process.returncode == 0, err
    return out


def content(place: pathlib.Path) -> dict[str, bytes]:
    assert not (place / 'unfinished').exists()
    return {file.name: file.read_bytes() for file in sorted(place.iterdir())}


@pytest.mark.parametrize('more', [(), ('--workdir=run',)])
def test_own_texts_are_not_written_under_the_name_of_a_recipes_set(tmp_path, monkeypatch, more) -> None:
    """With data.source=files the name of the set that the recipe reads by itself says nothing."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tfds_sets, 'write', lambda data, *given: str(data.tfds_name))
    found = setup.RunData(
        tformer.load_config(f'{ROOT}/configs/lm_stdlib.py:smoke'), *[types.SimpleNamespace(summary='')] * 4
    )
    monkeypatch.setattr(setup, 'load_data', lambda *given: found)
    rows = ''.join(json.dumps({'text': f'a text {i}'}) + '\n' for i in range(300))
    (tmp_path / 'own.jsonl').write_text(rows)
    command = ['tformer', 'prepare', f'--config={ROOT}/configs/gpt2.py:files', '--config.data.path=own.jsonl', *more]
    said: list[str] = []
    monkeypatch.setattr('builtins.print', lambda text, **_: said.append(text))
    command_line.main(command)
    assert 'c4' not in str(said[-1])
    with pytest.raises(UserError, match=r'^data\.tfds_dir=sets has no effect here'):
        command_line.main([*command, '--config.data.tfds_dir=sets'])
    command_line.main([*command, '--config.data.tfds_name=mine'])
    assert str(said[-1]).startswith('mine')


@pytest.mark.proof
@pytest.mark.signals
def test_the_bytes_of_a_set_do_not_depend_on_processes_nor_on_a_kill(tmp_path: pathlib.Path) -> None:
    path = corpus(tmp_path / 'files')
    said = run(path, f'--output={tmp_path}/one', '--processes=1')
    assert 'one is written: of 2,400 texts, 1,000 duplicates' in said
    assert f'--config.data.path={tmp_path}/one --config.data.tokenizer_from={tmp_path}/one' in said

    process = start(path, f'--output={tmp_path}/two', '--processes=2')
    while process.poll() is None and not list((tmp_path / 'two').glob('unfinished/*/manifest.json')):
        time.sleep(0.01)
    children = pathlib.Path(f'/proc/{process.pid}/task/{process.pid}/children').read_text().split()
    process.kill()
    process.communicate(timeout=HANG)
    end = time.monotonic() + HANG
    while any(pathlib.Path('/proc', child).exists() for child in children):
        assert time.monotonic() < end, 'a process of a killed preparation goes on'
        time.sleep(0.1)
    run(path, f'--output={tmp_path}/two', '--processes=2')
    assert content(tmp_path / 'one') == content(tmp_path / 'two')


def test_a_set_names_the_flags_by_which_another_source_is_left(tmp_path: pathlib.Path) -> None:
    config = config_lib.load(f'{ROOT}/configs/algorithmic.py:smoke')
    assert config.data.source != 'files'
    index = {'counts': {'records': 1}, 'splits': {}}
    said = prepare._summary(config, 'SET', index, 'is written').split('\n')[-1]
    flags = dict(flag.removeprefix('--config.').split('=', 1) for flag in said.split() if flag.startswith('--'))
    assert config_lib.override(config, flags).data.source == 'files'
    assert flags == {'data.source': 'files', 'data.path': 'SET', 'data.tokenizer_from': 'SET'}


@pytest.mark.proof
def test_beam_makes_the_same_bytes(tmp_path: pathlib.Path) -> None:
    python, path = beam_python.interpreter(), corpus(tmp_path / 'files')
    run(path, f'--output={tmp_path}/here', '--processes=1')
    flags = '--beam=--runner=DirectRunner --direct_num_workers=1'
    assert 'is written' in run(path, f'--output={tmp_path}/beam', flags, python=python)
    assert content(tmp_path / 'here') == content(tmp_path / 'beam')


def test_the_files_of_another_directory_stay_as_they_are(tmp_path: pathlib.Path) -> None:
    hub = tmp_path / 'hub'
    (hub / 'unfinished').mkdir(parents=True)
    (hub / 'unfinished' / 'notes').write_text('mine')
    (hub / 'tokenizer.json').write_text("the hub's")
    config = config_lib.load(f'{ROOT}/configs/lm_stdlib.py')
    with pytest.raises(UserError, match='hub holds other files, and no prepared set'):
        tformer.prepare_set(config, hub)
    assert (hub / 'unfinished' / 'notes').read_text() == 'mine' and (hub / 'tokenizer.json').read_text() == "the hub's"
    for place in (tmp_path / 'new', hub / 'unfinished' / 'empty'):
        prepare.check_output(str(place))


@pytest.mark.parametrize(
    ('flags', 'message'),
    [
        (('--processes=2',), '--processes is of a prepared set: give --output=DIR'),
        (('--output=a', '--workdir=b'), '--output and --workdir are two preparations'),
        (('--output=a', '--processes=1', '--beam=--runner=x'), '--processes and --beam are two ways'),
        (('--output=',), '--output is empty: name the directory of the set'),
        (('--output=s3://a/b',), '--output=s3://a/b is a URL, and this takes a path of this machine'),
        (('--output=.',), '--output=. holds other files, and no prepared set: name a new or an empty directory'),
        (('--output=a', '--processes=0'), '--processes=0 must be positive'),
        (('--output=a', '--config.data.deduplicate=same'), "data.deduplicate='same' is unknown"),
        (('--output=a', '--config.data.cleaning=spces'), "data.cleaning='spces' is unknown; did you mean 'spaces'"),
        (('--workdir=a',), 'are of `tformer prepare --output`: set data.path to what it has written'),
    ],
)
def test_mistakes_of_flags(tmp_path: pathlib.Path, flags, message, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'a.jsonl').write_text('{"text": "a"}\n')
    with pytest.raises(UserError) as error:
        command_line.main(['tformer', 'prepare', *FLAGS, '--config.data.path=a.jsonl', *flags])
    assert message in str(error.value)
    assert not (tmp_path / 'a').exists()
