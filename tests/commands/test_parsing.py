"""The command line of every command: any flags are parsed, helped or refused in a line that names the nearest flag."""

import os
import types

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tformer import __main__ as command_line
from tformer import commands, config, errors

COMMANDS = sorted(commands.COMMANDS)
FLAGS = sorted({flag for command in commands.COMMANDS.values() for flag in command.flags})
FIELDS = sorted(config.field_types())
VALUES = {'string': ['a', 'x/y', ''], 'int': ['0', '-3', '12'], 'float': ['0.5', '1e-3'], 'bool': ['true', 'false']}
HOSTILE = st.text(st.characters(codec='utf-8'), max_size=12) | st.sampled_from(
    ['', 'nan', '1e999', '9' * 400, '--', '=', '-']
)

flag_like = st.builds(
    lambda dashes, name, value: dashes + name + value,
    st.sampled_from(['-', '--', '--no', '---']),
    st.sampled_from(FLAGS) | HOSTILE,
    st.just('') | HOSTILE.map(lambda value: f'={value}'),
)
override_like = st.builds('--config.{}={}'.format, st.sampled_from(FIELDS) | HOSTILE, HOSTILE)
# --extensions would import the files that it names.
arguments = st.lists(flag_like | override_like | HOSTILE, max_size=4).filter(
    lambda given_: not any(x.lstrip('-').startswith('ext') for x in given_)
)


@settings(max_examples=150)
@given(name=st.sampled_from([*COMMANDS, 'help', 'trian', '']), given_=arguments)
def test_any_command_line_is_parsed_or_helped_or_refused_in_one_line(name: str, given_: list[str]) -> None:
    try:
        command, positional, overrides, _ = command_line.parse(['tformer', name, *given_])
    except errors.UserError as error:
        assert str(error) and '\n' not in str(error)
    except SystemExit as ended:
        assert ended.code == 0 and (name not in COMMANDS or {'-h', '--help'} & set(given_))
    else:
        assert command is commands.COMMANDS[name] and (not positional or command.arguments is not None)
        assert all(isinstance(value, str) for value in overrides.values())


def samples(kind: object, default: object) -> list[str]:
    return list(kind) if isinstance(kind, tuple) else VALUES.get(str(kind), [])


def beside(name: str, flag: str) -> list[str]:
    """More flags that the check of several processes needs beside this one."""
    needed = flag in ('num_processes', 'process_id')
    return ['--coordinator=auto'] if needed else []


@pytest.mark.parametrize('name', COMMANDS)
def test_every_flag_reads_its_values_and_keeps_the_others_defaults(name: str) -> None:
    command = commands.COMMANDS[name]
    for flag, (kind, default, _) in command.flags.items():
        for text in samples(kind, default):
            if kind == 'list':
                continue
            _, positional, _, found = command_line.parse(['tformer', name, *beside(name, flag), f'--{flag}={text}'])
            expected = {'int': int, 'float': float, 'bool': lambda x: x == 'true'}.get(str(kind), str)(text)
            assert found[flag].value == expected and positional == []
            for other, (_, value, _) in command.flags.items():
                assert other in (flag, 'coordinator') or found[other].value == value
        if kind == 'bool':
            assert command_line.parse(['tformer', name, f'--{flag}'])[3][flag].value is True
            assert command_line.parse(['tformer', name, f'--no{flag}'])[3][flag].value is False


@pytest.mark.parametrize('name', COMMANDS)
def test_a_misspelt_flag_names_the_flag_that_is_meant(name: str) -> None:
    for flag in (flag for flag in commands.COMMANDS[name].flags if len(flag) >= 6):
        wrong = flag[:-2] + flag[-1] + flag[-2]
        if wrong in FLAGS or wrong == flag:
            continue
        with pytest.raises(errors.UserError) as error:
            command_line.parse(['tformer', name, f'--{wrong}=1'])
        assert wrong in str(error.value) and flag in str(error.value).partition(wrong)[2], str(error.value)


@pytest.mark.parametrize('name', COMMANDS)
def test_a_flag_of_other_commands_is_refused_and_names_them(name: str) -> None:
    for flag in set(FLAGS) - set(commands.COMMANDS[name].flags):
        with pytest.raises(errors.UserError) as error:
            command_line.parse(['tformer', name, f'--{flag}=1'])
        takers = [other for other in COMMANDS if flag in commands.COMMANDS[other].flags]
        assert f'--{flag}' in str(error.value) and all(other in str(error.value) for other in takers)


@pytest.mark.parametrize('number', [2**63, -(2**63), 10**400])
def test_a_number_of_more_than_64_bits_is_refused_by_its_flag(number: int) -> None:
    for name, command in commands.COMMANDS.items():
        for flag in (flag for flag, (kind, _, _) in command.flags.items() if kind == 'int'):
            with pytest.raises(errors.UserError, match=f'^--{flag} is a number of more than 64 bits$'):
                command_line.parse(['tformer', name, *beside(name, flag), f'--{flag}={number}'])


@settings(max_examples=60)
@given(fields=st.dictionaries(st.sampled_from(FIELDS), st.text('ab,=1. ', min_size=1, max_size=6), max_size=4))
def test_overrides_are_taken_as_they_stand_before_after_and_apart(fields: dict[str, str]) -> None:
    together = [f'--config.{field}={value}' for field, value in fields.items()]
    apart = [text for field, value in fields.items() for text in (f'--config.{field}', value)]
    for argv in (['train', *together], [*together, 'train'], ['train', *apart], ['train', '--workdir=w', *together]):
        assert command_line.parse(['tformer', *argv])[2] == fields


@pytest.mark.parametrize('name', COMMANDS)
def test_help_prints_every_flag(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        command_line.parse(['tformer', name, '--help'])
    said = capsys.readouterr().out
    assert ended.value.code == 0 and all(f'--{flag}' in said for flag in commands.COMMANDS[name].flags)


@pytest.mark.parametrize(
    ('name', 'told', 'taken'),
    [
        ('train', {}, '0.95'),
        ('train', {'XLA_PYTHON_CLIENT_MEM_FRACTION': '0.5'}, None),
        ('train', {'XLA_CLIENT_MEM_FRACTION': '0.5'}, '0.5'),
        ('sweep', {}, None),  # its trials share GPUs, each with its part
    ],
)
def test_a_process_takes_a_gpu_unless_it_is_told_how_much(monkeypatch, name, told, taken) -> None:
    for variable in ('XLA_PYTHON_CLIENT_MEM_FRACTION', 'XLA_CLIENT_MEM_FRACTION'):
        monkeypatch.setenv(variable, '')
        monkeypatch.delenv(variable)
    for variable, value in told.items():
        monkeypatch.setenv(variable, value)
    monkeypatch.setattr(commands.importlib, 'import_module', lambda _: types.SimpleNamespace(run=lambda *_: None))
    flags = commands.COMMANDS[name].flag_values()
    flags(['tformer'])
    commands.COMMANDS[name].run([], {}, flags)
    assert os.environ.get('XLA_CLIENT_MEM_FRACTION') == taken
