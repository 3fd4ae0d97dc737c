"""Commands whose workdir is on a store, and paths that cannot be."""

import pathlib

import pytest

import emulated
from places import ROOT
from tformer import __main__ as command_line
from tformer.commands import generate, import_, inspect
from tformer.commands.run import Run
from tformer.data import store_copies, stores
from tformer.errors import UserError
from tformer.training import trackers

RUN = ROOT / 'tests' / 'stored_run'


@pytest.fixture
def store(monkeypatch) -> stores.Store:
    """A store in memory that holds a run."""
    made = emulated.memory()
    for file in filter(pathlib.Path.is_file, RUN.rglob('*')):
        made.write(file.relative_to(RUN).as_posix(), file.read_bytes())
    monkeypatch.setattr(stores, 'Store', lambda url: made)
    return made


def test_a_copy_is_known_by_its_url(store) -> None:
    """What was written of a run is found again by its next copy, which is at another place."""
    known, places = [], []
    for _ in range(2):
        with store_copies.local(store.url, owns=False) as place:
            run = Run.load(place)
            known.append(generate._weights(run))
            assert store_copies.name_of(run.workdir) == trackers.Tracked(run.workdir, run.config).name == 'run'
            assert inspect.checkpoints(place).splitlines()[0].endswith(f'in {store.url}/checkpoints')
            places.append(place)
    assert places[0] != places[1] and known[0] == known[1] and known[0][0] == store.url


@pytest.mark.parametrize(
    'given',
    [
        ('embed', f'--workdir={RUN}', 'a', '--output=s3://b/x.npy'),
        ('generate', f'--workdir={RUN}', 'a', '--output=s3://b/x.npy'),
        ('generate', f'--workdir={RUN}', '--input=s3://b/x'),
        ('predict', f'--workdir={RUN}', '--input=s3://b/x'),
        ('import', 's3://b/x', '--workdir=new'),
        ('export', f'--workdir={RUN}', 's3://b/x'),
        ('freeze', f'--workdir={RUN}', 's3://b/x'),
        ('prepare', f'--config={ROOT}/configs/lm_stdlib.py:smoke', '--output=s3://b/x'),
    ],
)
def test_a_file_of_a_command_is_no_url(tmp_path, monkeypatch, given) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / 's3:' / 'b').mkdir(parents=True)
    with pytest.raises(UserError, match=r'^(--\w+=)?s3://b/x\S* is a URL, and this takes a path of this machine: copy'):
        command_line.main(['tformer', *given])
    assert not [*(tmp_path / 's3:' / 'b').iterdir()]


def test_a_directory_that_is_made_is_no_url(tmp_path, monkeypatch) -> None:
    """In Python too, where a path has lost a stroke."""
    monkeypatch.chdir(tmp_path)
    with (
        pytest.raises(UserError, match=r'^s3://b/x is a URL, and this takes .* copy it to the store from there$'),
        import_.new_directory(pathlib.Path('s3://b/x')),
    ):
        pass
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize('url', ['https://huggingface.co/a/b', 'hf://a/b'])
def test_a_url_of_the_hub_is_told_to_be_a_name(url) -> None:
    with pytest.raises(UserError, match=f'^{url} is a URL: name the repository, such as openai-community/gpt2$'):
        command_line.main(['tformer', 'import', url, '--workdir=new'])
