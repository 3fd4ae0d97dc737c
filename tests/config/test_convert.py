"""The names of config files, and the words of the command line."""

import errno
import os
import pathlib

import pytest

from tformer.config import convert, json_files
from tformer.config.hashing import digest_json
from tformer.errors import UserError


@pytest.mark.parametrize(
    ('spec', 'file', 'argument'),
    [
        ('configs/g2p.py', 'configs/g2p.py', ''),
        ('configs/g2p.py:demo,small', 'configs/g2p.py', 'demo,small'),
        ('C:/runs/config.json:x', 'C:/runs/config.json', 'x'),
        ('a:b/recipe.py', 'a:b/recipe.py', ''),
        ('recipe.py:of.py:x', 'recipe.py', 'of.py:x'),
        ('recipe.json:of.py:x', 'recipe.json', 'of.py:x'),
        ('recipe:small', 'recipe', 'small'),
        ('recipe', 'recipe', ''),
    ],
)
def test_the_argument_stands_behind_the_first_ending(spec, file, argument):
    assert convert.split(spec) == (file, argument)


@pytest.mark.parametrize('yes', ['true', 'True', '1', 'yes', 'YES'])
@pytest.mark.parametrize('no', ['false', 'FALSE', '0', 'no'])
def test_yes_and_no(yes, no):
    assert convert.parse(bool, yes, 'f') is True
    assert convert.parse(bool, no, 'f') is False


@pytest.mark.parametrize(('text', 'value'), [('1e3', 1000), ('2.0', 2), ('-7', -7), ('12', 12)])
def test_whole_numbers_in_any_notation(text, value):
    assert convert.parse(int, text, 'f') == value
    with pytest.raises(UserError, match=r"config\.f='1e-1' is not int"):
        convert.parse(int, '1e-1', 'f')
    with pytest.raises(UserError, match=r"config\.f='2\.5' is not int"):
        convert.parse(int, '2.5', 'f')


def test_a_number_is_neither_yes_nor_no():
    assert convert.coerce(float, 2, 'f') == 2.0
    for kind in (int, float):
        with pytest.raises(UserError, match=r'config\.f=True is not'):
            convert.coerce(kind, True, 'f')
    with pytest.raises(UserError, match=r'config\.f=1 is not bool'):
        convert.coerce(bool, 1, 'f')


def test_a_key_that_is_given_twice_is_named():
    assert json_files.parse('{"a": 1, "b": {"a": 2}}') == {'a': 1, 'b': {'a': 2}}
    with pytest.raises(ValueError, match="the key 'b' is given twice"):
        json_files.parse('{"a": 1, "b": 2, "b": 3}')


def test_a_last_line_without_an_end_is_read_unless_the_file_is_unfinished(tmp_path):
    file = tmp_path / 'rows.jsonl'
    file.write_text('{"a": 1}\n{"a": 2}')
    assert json_files.read_rows(file) == [{'a': 1}, {'a': 2}]
    assert json_files.read_rows(file, unfinished=True) == [{'a': 1}]
    file.write_text('{"a": 1}\n{"a":')
    assert json_files.read_rows(file, unfinished=True) == [{'a': 1}]
    with pytest.raises(UserError, match=r'rows\.jsonl:2: '):
        json_files.read_rows(file)


def test_a_digest_does_not_depend_on_the_order_of_keys():
    assert digest_json({'a': 1, 'b': {'c': 2, 'd': 3}}) == digest_json({'b': {'d': 3, 'c': 2}, 'a': 1})
    assert digest_json({'a': 1}) != digest_json({'a': 2})
    assert len(digest_json({}, size=4)) == 8


def test_a_file_that_the_system_cannot_read_is_named(tmp_path, monkeypatch):
    def fail(path):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    (tmp_path / 'a.json').write_text('{}')
    assert json_files.read(tmp_path / 'a.json') == {}
    monkeypatch.setattr(pathlib.Path, 'read_bytes', fail)
    with pytest.raises(UserError, match=rf'^{tmp_path}/a\.json: Input/output error$'):
        json_files.read(tmp_path / 'a.json')
