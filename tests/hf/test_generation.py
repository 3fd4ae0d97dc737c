"""generation_config.json as fields of decoding, with the defaults of the hub's library, and back."""

import importlib.util
import json
import pathlib
from typing import Any

import pytest

import hub_directories
import hub_files
from tformer import checks, config
from tformer.commands.export import export
from tformer.commands.import_ import import_hub
from tformer.commands.run import Run
from tformer.config import Config, Model, Train
from tformer.data.tokenizers.hub_tokenizer import HubTokenizer
from tformer.data.tokenizers.tokenizers import Tokenizers
from tformer.errors import UserError
from tformer.hf import generation
from tformer.hf.directory import open_hub

DECODER, PAIRED = Model(family='decoder', max_len=400), Model(family='encoder_decoder', max_len=400)
TOKENIZER = HubTokenizer(hub_files.roberta().to_str().encode())  # <s> 0, <pad> 1, </s> 2, <unk> 3, <mask> 4


def read(settings: dict[str, Any], model: Model = DECODER, start: int = 1, **hub: Any) -> tuple[dict[str, Any], str]:
    """Returns the fields of `decode` by their own names, and what is lost."""
    fields, lost = generation.decode_fields(settings, hub, model, start, TOKENIZER)
    return {name.removeprefix('decode.'): value for name, value in fields.items()}, ', '.join(lost)


PLAIN = {
    'ends': (),
    'bias': (),
    'max_len': 64,
    'min_len': 0,
    'repetition_penalty': 1.0,
    'no_repeat_ngram': None,
    'guidance': 1.0,
}
CUTS = dict.fromkeys(('top_p', 'typical_p', 'min_p', 'epsilon_cutoff', 'eta_cutoff'))
SAMPLE = {**PLAIN, **CUTS, 'strategy': 'sample', 'temperature': 1.0, 'top_k': 50}
ENDING = {'early_stopping': 'likely', 'count_cut': True}
BEAM = {**PLAIN, **ENDING, 'strategy': 'beam', 'beam_size': 4, 'length_penalty': 1.0, 'length_offset': 0.0}
NEVER = BEAM | {'early_stopping': 'never'}


@pytest.mark.parametrize(
    ('settings', 'fields', 'lost'),
    [
        ({}, {}, ''),
        ({'temperature': 0.7, 'top_p': 0.8, 'top_k': 20, 'length_penalty': 2.0}, {}, ''),  # without do_sample: greedy
        ({'do_sample': True}, SAMPLE, ''),
        ({'do_sample': True, 'top_k': 0, 'top_p': 0.9, 'temperature': 0.6},
         SAMPLE | {'top_k': None, 'top_p': 0.9, 'temperature': 0.6}, ''),
        ({'do_sample': True, 'temperature': 0.0}, {}, ''),
        ({'do_sample': True, 'num_beams': 4}, SAMPLE, 'num_beams=4 with do_sample'),
        ({'num_beams': 4}, BEAM, ''),
        ({'num_beams': 4, 'early_stopping': 'never', 'length_penalty': 2.0}, NEVER | {'length_penalty': 2.0}, ''),
        ({'num_beams': 4, 'early_stopping': True, 'length_penalty': -1},
         BEAM | {'length_penalty': 0.0, 'early_stopping': 'full'}, 'length_penalty=-1'),
        ({'num_beams': 4, 'num_beam_groups': 2, 'diversity_penalty': 0.3},
         BEAM | {'beam_groups': 2, 'diversity_penalty': 0.3}, ''),
        ({'do_sample': True, 'min_p': 0.1, 'typical_p': 0.9, 'epsilon_cutoff': 3e-4, 'eta_cutoff': 2e-3},
         SAMPLE | {'min_p': 0.1, 'typical_p': 0.9, 'epsilon_cutoff': 3e-4, 'eta_cutoff': 2e-3}, ''),
        ({'do_sample': True, 'typical_p': 1.0, 'epsilon_cutoff': 0.0, 'min_p': None}, SAMPLE, ''),
        ({'typical_p': 0.5, 'min_p': 0.1}, {}, ''),  # without do_sample
        ({'guidance_scale': 1.5, 'encoder_repetition_penalty': 1}, {'guidance': 1.5}, ''),
        ({'do_sample': True, 'num_return_sequences': 3}, SAMPLE | {'num_outputs': 3}, ''),
        ({'num_beams': 4, 'early_stopping': 'never', 'num_return_sequences': 4}, NEVER | {'num_outputs': 4}, ''),
        ({'no_repeat_ngram_size': 3, 'min_length': 0, 'repetition_penalty': 1.2, 'min_new_tokens': 5},
         {'no_repeat_ngram': 3, 'repetition_penalty': 1.2, 'min_len': 5}, ''),
        ({'min_length': 9, 'no_repeat_ngram_size': 0}, {}, 'min_length=9, with the prompt'),
        ({'min_length': 9, 'min_new_tokens': 4}, {'min_len': 4}, ''),
        ({'min_new_tokens': 9, 'max_new_tokens': 4}, {'min_len': 4, 'max_len': 4}, ''),
        ({'encoder_repetition_penalty': 1.2, 'suppress_tokens': [5], 'begin_suppress_tokens': []}, {},
         'encoder_repetition_penalty=1.2, suppress_tokens=[5]'),
        ({'a_setting_to_come': 3, 'another': None, 'use_cache': False, 'transformers_version': '9', '_x': 1}, {},
         'a_setting_to_come=3'),
        ({'bad_words_ids': [[1]]}, {}, ''),  # special tokens are never generated
        ({'bad_words_ids': [[1], [7, 8]]}, {}, 'bad_words_ids=[[1], [7, 8]]'),
        ({'sequence_bias': [[[42, 43], 7], [[42, 43], -1.5], [[2], 2]]},
         {'bias': (f'{TOKENIZER.decode([42, 43])}=-1.5', '</s>=2')}, ''),
        ({'sequence_bias': [[[2, 1], 3.0]]}, {}, 'sequence_bias=[[2, 1], 3.0]'),
        ({'num_beams': 4, 'sequence_bias': [[[2], 3.0]]}, BEAM, 'sequence_bias=[[2], 3.0]'),
        ({'bad_words_ids': 3}, {}, 'bad_words_ids=3'),
        ({'eos_token_id': [2, 4]}, {'ends': ('<mask>',)}, ''),
        ({'eos_token_id': 4, 'pad_token_id': 1}, {'ends': ('<mask>',)}, ''),
        ({'max_new_tokens': 30, 'max_length': 300}, {'max_len': 30}, ''),
        ({'max_new_tokens': 300}, {'max_len': 200}, 'max_new_tokens=300, for which there is no room'),
        ({'max_length': 30}, {}, 'max_length=30, with the prompt'),
        ({'max_length': 20}, {}, ''),
    ],
)  # fmt: skip
def test_settings_become_fields_or_are_named(settings: dict[str, Any], fields: dict[str, Any], lost: str) -> None:
    assert read(settings) == (PLAIN | fields, lost)


def test_the_settings_of_an_older_config_are_read_where_there_is_no_generation_config() -> None:
    older = {'num_beams': 4, 'early_stopping': True, 'min_length': 5, 'num_hidden_layers': 3, 'eos_token_id': 2}
    assert read({}, **older) == (BEAM | {'early_stopping': 'full'}, 'min_length=5, with the prompt')
    assert read({'max_new_tokens': 9}, **older) == (PLAIN | {'max_len': 9}, '')


@pytest.mark.parametrize(('start', 'length', 'expected'), [(1, 50, 49), (2, 50, 48), (1, 402, 400), (2, 402, 399)])
def test_the_length_of_a_decoder_beside_an_encoder_counts_what_it_starts_from(
    start: int, length: int, expected: int
) -> None:
    fields, lost = read({'max_length': length, 'num_beams': 2, 'early_stopping': 'never'}, PAIRED, start)
    assert fields['max_len'] == expected and bool(lost) == (length - start > expected)
    assert fields['length_offset'] == start - 1


@pytest.mark.parametrize(('start', 'settings', 'least'), [(1, 56, 55), (2, 56, 54), (2, 1, 0)])
def test_the_least_length_of_a_decoder_beside_an_encoder_counts_what_it_starts_from(
    start: int, settings: int, least: int
) -> None:
    fields, lost = read({'min_length': settings}, PAIRED, start)
    assert (fields['min_len'], lost) == (least, '')


def test_a_token_that_is_forced_after_the_first_is_one_of_the_hubs_new_tokens() -> None:
    """Of `</s> <s>` the library counts the second one as new."""
    settings = {'max_new_tokens': 9, 'min_new_tokens': 4}
    for start, length, least in ((1, 9, 4), (2, 8, 3)):
        fields = read(settings, PAIRED, start)[0]
        assert (fields['max_len'], fields['min_len']) == (length, least)
        changes = {'decode.max_len': length, 'decode.min_len': least, 'data.start': ('eos', 'bos')[:start]}
        run = config.override(Config(PAIRED, train=Train(objective='seq2seq', num_steps=1)), changes)
        written = generation.generation_config(run, Tokenizers(TOKENIZER, TOKENIZER), {})
        assert written is not None and {name: written[name] for name in settings} == settings
    with pytest.raises(UserError, match='max_new_tokens=1 leaves no new token'):
        read({'max_new_tokens': 1}, PAIRED, 2)


def test_no_token_is_forced_that_generation_config_does_not_force(tmp_path: pathlib.Path) -> None:
    """The hub's library reads config.json where there is no generation_config.json."""
    forced = {'forced_eos_token_id': 2, 'forced_bos_token_id': 4}
    both, neither = (('eos', '<mask>'), True), (('eos',), False)
    hub_directories.write(tmp_path, 'mbart', decoder_start_token_id=2, **forced)
    for settings, expected in ((None, both), ({'num_beams': 2}, neither), ({'num_beams': 2, **forced}, both)):
        if settings is not None:
            (tmp_path / generation.FILE).write_text(json.dumps(settings))
        run = open_hub(str(tmp_path)).run_config()
        assert (run.data.start, run.decode.forced_end) == expected


@pytest.mark.parametrize(
    ('settings', 'said'),
    [
        ({'num_beams': '4'}, "num_beams='4' is not a whole number"),
        ({'do_sample': True, 'top_p': [1]}, r'top_p=\[1\] is not a number'),
        ({'num_beams': -4}, 'num_beams=-4 is not a whole number of at least 0'),
        ({'do_sample': True, 'temperature': float('nan')}, 'temperature=nan is not a number of at least 0'),
        ({'do_sample': True, 'temperature': -0.5}, 'temperature=-0.5 is not a number of at least 0'),
        ({'num_beams': 2, 'length_penalty': float('inf')}, 'length_penalty=inf is not a number'),
        ({'num_beams': 2, 'num_return_sequences': 3}, 'num_return_sequences=3 is not from 1 to num_beams=2'),
        ({'num_return_sequences': 2}, 'num_return_sequences=2 is not from 1 to num_beams=1'),
        ({'do_sample': True, 'num_return_sequences': 0}, 'num_return_sequences=0 is not from 1'),
        ({'num_beams': 2, 'early_stopping': 'sometimes'}, "early_stopping='sometimes' is neither true nor false"),
        ({'do_sample': 'yes'}, "do_sample='yes' is neither true nor false"),
        ({'sequence_bias': {'2': 1.0}}, r"sequence_bias=\{'2': 1.0\} is not a list"),
        ({'sequence_bias': [[2, 1.0]]}, r'sequence_bias has \[2, 1.0\], which is not \[\[ID, ...\], NUMBER\]'),
        ({'max_new_tokens': 0}, 'max_new_tokens=0 leaves no new token'),
        ({'max_new_tokens': 1.5}, 'max_new_tokens=1.5 leaves no new token'),
        ({'eos_token_id': [2, [4]]}, r'eos_token_id=\[4\] is not a token of the tokenizer'),
        ({'eos_token_id': [2, 100_000]}, 'eos_token_id=100000 is not a token of the tokenizer'),
    ],
)
def test_a_malformed_setting_is_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=f'^generation_config.json: {said}'):
        read(settings)


@pytest.mark.parametrize(
    ('changes', 'lost'),
    [
        ({'decode.max_len': 7, 'decode.ends': ('<mask>',)}, 0),
        ({'decode.strategy': 'sample', 'decode.num_outputs': 5}, 0),
        ({'decode.strategy': 'mbr', 'decode.num_outputs': 5}, 1),
        ({'decode.strategy': 'beam', 'decode.count_cut': True, 'decode.beam_groups': 2}, 1),
        ({'decode.strategy': 'sample', 'decode.top_k': None, 'decode.top_p': 0.5, 'decode.temperature': 0.9}, 0),
        (
            {
                'decode.strategy': 'beam',
                'decode.beam_size': 3,
                'decode.length_penalty': 2.0,
                'decode.length_offset': 0.0,
                'decode.early_stopping': 'full',
                'decode.count_cut': True,
            },
            0,
        ),
        ({'decode.strategy': 'beam', 'decode.length_penalty': 0.6}, 2),
        ({'decode.no_repeat_ngram': 3, 'decode.repetition_penalty': 1.5, 'decode.min_len': 2}, 0),
        ({'decode.strategy': 'sample', 'decode.top_k': 7, 'decode.min_p': 0.1, 'decode.typical_p': 0.5}, 0),
        ({'decode.strategy': 'sample', 'decode.epsilon_cutoff': 0.1, 'decode.eta_cutoff': 0.5}, 0),
        ({'decode.presence_penalty': 0.5, 'decode.frequency_penalty': -0.5}, 2),
        ({'decode.bias': (' cat=-1.5', '</s>=2.0')}, 0),
        ({'decode.regex': 'a'}, 1),
        ({'decode.guidance': 2.5}, 0),
        ({'decode.choices': ('a', 'b')}, 1),
    ],
)
def test_fields_are_written_as_settings_that_are_read_as_the_same(changes: dict[str, Any], lost: int) -> None:
    run = config.override(Config(DECODER, train=Train(num_steps=1)), changes)
    tokens = {'eos_token_id': 2}
    written = generation.generation_config(run, Tokenizers(None, TOKENIZER), tokens)
    assert written is not None and len(generation.unexpressed(run)) == lost
    fields, left = generation.decode_fields(json.loads(json.dumps(written)), {}, DECODER, 1, TOKENIZER)
    again = checks.settled(config.override(Config(DECODER, train=Train(num_steps=1)), fields))
    assert left == [] and (lost or again.decode == run.decode)


def test_a_beam_whose_texts_all_end_is_that_of_the_hub() -> None:
    plain = {'decode.strategy': 'beam', 'decode.length_penalty': 0.0}
    for end, lost in ((True, []), (False, ['decode.count_cut=False'])):
        assert generation.unexpressed(config.override(Config(DECODER), {**plain, 'decode.forced_end': end})) == lost


@pytest.mark.skipif(not importlib.util.find_spec('transformers'), reason='needs transformers')
def test_the_defaults_are_those_of_the_hubs_library() -> None:
    from transformers import GenerationConfig

    theirs = GenerationConfig._get_default_generation_params()
    for name, value in {**generation.DEFAULTS, **generation.OFF}.items():
        assert (theirs.get(name) or None) == (value or None) or name == 'guidance_scale', name


def test_a_run_decodes_as_its_generation_config_says(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hub_directories.write(tmp_path / 'hub', 'llama')
    settings = {
        'num_beams': 2,
        'min_length': 3,
        'no_repeat_ngram_size': 2,
        'eos_token_id': [2, 5],
        'max_new_tokens': 4,
        'early_stopping': 'never',
    }
    (tmp_path / 'hub' / generation.FILE).write_text(json.dumps(settings))
    import_hub(str(tmp_path / 'hub'), tmp_path / 'run')
    assert capsys.readouterr().err == f'{tmp_path}/hub: generation here has no min_length=3, with the prompt\n'
    decode = Run.load(tmp_path / 'run').config.decode
    assert (decode.strategy, decode.beam_size, decode.max_len, decode.length_offset) == ('beam', 2, 4, 0.0)
    assert decode.ends == ('c',)
    export(tmp_path / 'run', tmp_path / 'out')
    written = json.loads((tmp_path / 'out' / generation.FILE).read_text())
    assert {name: written.get(name) for name in settings} == {**settings, 'min_length': None}
