"""Files that are written whole or not at all."""

import concurrent.futures
import os
import pathlib

import pytest

from tformer import atomic


def test_of_several_writers_of_a_file_none_fails_and_none_leaves_a_part(tmp_path: pathlib.Path) -> None:
    file, texts = tmp_path / 'x.json', [letter * 100_000 for letter in 'abcdefgh']
    with concurrent.futures.ThreadPoolExecutor(len(texts)) as threads:
        for written in [threads.submit(atomic.write, file, text) for text in texts * 10]:
            written.result()
            assert file.read_text() in texts
    assert [*tmp_path.iterdir()] == [file]


def test_text_is_utf_8_and_bytes_stay_what_they_are(tmp_path: pathlib.Path) -> None:
    for contents in ('é\n', 'é\n'.encode(), b'\xff\r\n'):
        atomic.write(tmp_path / 'x', contents)
        assert (tmp_path / 'x').read_bytes() == (contents.encode() if isinstance(contents, str) else contents)


def test_a_write_that_fails_leaves_what_was_there(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / 'x'
    file.write_text('old')

    def full(*places: object) -> None:
        raise OSError(28, 'No space left on device')

    monkeypatch.setattr(os, 'replace', full)
    with pytest.raises(OSError, match='No space left') as error:
        atomic.write(file, 'new')
    assert error.value.filename == str(file)
    with pytest.raises(UnicodeEncodeError):
        atomic.write(file, '\ud800')
    assert [*tmp_path.iterdir()] == [file] and file.read_text() == 'old'
