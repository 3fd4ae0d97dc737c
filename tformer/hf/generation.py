"""generation_config.json as fields of a run's `decode` section, and back.

What is not given has the default of the hub's library; what has no counterpart here is named.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from tformer.config import Config, Decode, Model
from tformer.config.tasks import TASKS
from tformer.data.tokenizers import biased_texts
from tformer.data.tokenizers.tokenizers import Tokenizers
from tformer.data.tokenizers.vocabulary import Tokenizer
from tformer.errors import UserError
from tformer.hf.fields import matches

FILE = 'generation_config.json'
# The library's defaults of what is read: how the next token is chosen, and the lengths.
DEFAULTS: dict[str, Any] = {
    'do_sample': False,
    'num_beams': 1,
    'num_return_sequences': 1,
    'num_beam_groups': 1,
    'diversity_penalty': 0.0,
    'temperature': 1.0,
    'top_k': 50,
    'top_p': 1.0,
    'min_p': 0.0,
    'typical_p': 1.0,
    'epsilon_cutoff': 0.0,
    'eta_cutoff': 0.0,
    'repetition_penalty': 1.0,
    'no_repeat_ngram_size': 0,
    'guidance_scale': 1.0,
    'length_penalty': 1.0,
    'early_stopping': False,
    'min_new_tokens': 0,
    'min_length': 0,
    'max_new_tokens': None,
    'max_length': 20,
    'bad_words_ids': None,
    'sequence_bias': None,
}
CUTS = ('min_p', 'typical_p', 'epsilon_cutoff', 'eta_cutoff')  # of sampling, whose names and values are ours
EARLY_STOPPING: dict[str, Any] = {'never': 'never', 'likely': False, 'full': True}  # of decode, and of the hub
# Settings of older config.json files that have no counterpart, with the values that switch them off.
OFF: dict[str, Any] = {
    'encoder_no_repeat_ngram_size': 0,
    'encoder_repetition_penalty': 1,
    **dict.fromkeys(('suppress_tokens', 'begin_suppress_tokens', 'exponential_decay_length_penalty'), None),
}
# Settings that change no token, or that `special_tokens` reads.
NEUTRAL = (
    *('*_token_id', '_*', 'transformers_version', 'use_cache', 'cache_*', 'max_cache_len', 'output_*', 'return_*'),
    *('*assistant*', 'target_lookbehind', 'prompt_lookup*', 'max_matching_ngram_size', 'speculation_type', 'use_mtp'),
    *('*compile*', 'continuous_batching_config', 'low_memory', 'prefill_chunk_size', 'remove_invalid_values'),
)


def decode_fields(
    generation: Mapping[str, Any], hub_config: Mapping[str, Any], model: Model, start: int, tokenizer: Tokenizer
) -> tuple[dict[str, Any], list[str]]:
    """Returns fields of a run for `config.override`, and the settings that these do not express.

    Args:
      generation: the fields of generation_config.json; {} where there is none.
      hub_config: those of config.json, which holds the settings in its place.
      model: of the run.
      start: the number of tokens that a decoder starts from, in front of the new ones.
      tokenizer: of the new tokens.

    Raises:
      UserError: a setting is not of its type, or an id is that of no token.
    """
    known = DEFAULTS.keys() | OFF.keys()
    given = generation or {name: value for name, value in hub_config.items() if name in known}
    given = {name: value for name, value in given.items() if value is not None}
    hub = _Settings({**DEFAULTS, **given})
    off = {**DEFAULTS, **OFF}
    lost = [
        f'{name}={value!r}'
        for name, value in given.items()
        if name not in DEFAULTS and value not in (off.get(name), False, 0, '', [], {}) and not matches(name, NEUTRAL)
    ]
    ids = generation.get('eos_token_id', hub_config.get('eos_token_id'))
    fields: dict[str, Any] = {'decode.ends': _names(ids if isinstance(ids, list) else [ids], tokenizer)}
    if hub.switch('do_sample') and hub.number('temperature') > 0:
        fields |= {'decode.strategy': 'sample', 'decode.temperature': hub.number('temperature')}
        fields |= {'decode.top_k': hub.number('top_k') or None}
        fields |= {f'decode.{name}': _cut(hub, name) for name in ('top_p', *CUTS)}
        lost += [f'num_beams={hub["num_beams"]} with do_sample'] if hub.number('num_beams') > 1 else []
    elif hub.number('num_beams') > 1:
        fields |= _beams(hub) | {'decode.length_offset': _offset(model, start)}
        lost += [f'length_penalty={hub["length_penalty"]}'] if hub.number('length_penalty') < 0 else []
    fields |= _outputs(hub, fields.get('decode.strategy') == 'sample')
    fields |= {'decode.repetition_penalty': hub.number('repetition_penalty')}
    fields |= {'decode.no_repeat_ngram': hub.number('no_repeat_ngram_size') or None}
    fields |= {'decode.guidance': hub.number('guidance_scale')}
    special = [[index] for index in np.flatnonzero(~tokenizer.ordinary).tolist()]  # which are never generated
    if (words := hub['bad_words_ids']) and not (isinstance(words, list) and all(word in special for word in words)):
        lost.append(f'bad_words_ids={words}')
    fields['decode.bias'], unsaid = _biases(hub['sequence_bias'], tokenizer, 'decode.beam_size' in fields)
    lost += unsaid
    (length, said), (least, more) = _length(hub, given, model, start), _least(hub, model, start)
    return fields | {'decode.max_len': length, 'decode.min_len': min(least, length)}, lost + said + more


def _forced(model: Model, start: int) -> int:
    """Returns the number of tokens that are forced after the first, which the library counts as new."""
    return start - 1 if model.family == 'encoder_decoder' else 0


def _offset(model: Model, start: int) -> float:
    """Returns decode.length_offset of the library's length, which counts the tokens that are forced after the first."""
    return float(_forced(model, start))


class _Settings(dict[str, Any]):
    def number(self, name: str) -> Any:
        """Returns a setting that is a number, whole where its default is."""
        kinds = (int, float) if isinstance(DEFAULTS[name], float) else (int,)
        least = -math.inf if name == 'length_penalty' else 0
        if type(self[name]) not in kinds or not (least <= self[name] < math.inf):
            what = '' if float in kinds else 'whole '
            raise UserError(f'{FILE}: {name}={self[name]!r} is not a {what}number{"" if least else " of at least 0"}')
        return self[name]

    def switch(self, name: str) -> bool:
        """Returns a setting that is true or false."""
        if type(self[name]) is not bool:
            raise UserError(f'{FILE}: {name}={self[name]!r} is neither true nor false')
        return bool(self[name])


def _outputs(hub: _Settings, sampled: bool) -> dict[str, Any]:
    """Returns how many outputs there are of a text: of beams no more than they are."""
    number, beams = hub.number('num_return_sequences'), hub.number('num_beams')
    if number < 1 or (number > beams and not sampled):
        raise UserError(f'{FILE}: num_return_sequences={number} is not from 1 to num_beams={beams}')
    return {'decode.num_outputs': number} if number > 1 else {}


def _beams(hub: _Settings) -> dict[str, Any]:
    """Returns the fields of a beam search."""
    early = hub['early_stopping'] if hub['early_stopping'] == 'never' else hub.switch('early_stopping')
    fields = {
        'strategy': 'beam',
        'beam_size': hub.number('num_beams'),
        'length_penalty': max(hub.number('length_penalty'), 0.0),
        'early_stopping': {value: name for name, value in EARLY_STOPPING.items()}[early],
        'count_cut': True,
    }
    if hub.number('num_beam_groups') > 1:
        fields |= {'beam_groups': hub['num_beam_groups'], 'diversity_penalty': hub.number('diversity_penalty')}
    return {f'decode.{name}': value for name, value in fields.items()}


def _cut(hub: _Settings, name: str) -> float | None:
    """Returns a setting of sampling; None where it cuts nothing, as by its default."""
    off = hub.number(name) >= 1 if DEFAULTS[name] == 1 else hub.number(name) == 0
    return None if off else hub.number(name)


def _least(hub: _Settings, model: Model, start: int) -> tuple[int, list[str]]:
    """Returns the fewest new tokens, and the setting that this does not express."""
    if hub.number('min_new_tokens') or not hub.number('min_length'):
        return max(0, hub.number('min_new_tokens') - _forced(model, start)), []
    if model.family == 'encoder_decoder':
        return max(0, hub.number('min_length') - start), []
    return 0, [f'min_length={hub["min_length"]}, with the prompt']


def _biases(given: Any, tokenizer: Tokenizer, beams: bool) -> tuple[tuple[str, ...], list[str]]:
    """Returns decode.bias, and the settings that this does not express: of beams what is above 0."""
    entries: dict[str, float] = {}
    lost = []
    if not isinstance(given, list | None):
        raise UserError(f'{FILE}: sequence_bias={given!r} is not a list')
    for entry in given or []:
        pair = isinstance(entry, list) and len(entry) == 2 and isinstance(entry[0], list)
        if not pair or type(entry[1]) not in (int, float) or not math.isfinite(entry[1]):
            raise UserError(f'{FILE}: sequence_bias has {entry!r}, which is not [[ID, ...], NUMBER]')
        text = None if beams and entry[1] > 0 else biased_texts.text_of(entry[0], tokenizer)
        if text is None:
            lost.append(f'sequence_bias={entry}')
        else:
            entries[text] = entry[1]  # of several the last one counts
    return tuple(f'{text}={value}' for text, value in entries.items()), lost


def _names(ids: list[Any], tokenizer: Tokenizer) -> tuple[str, ...]:
    """Returns the names of the tokens that end a text besides EOS."""
    names = []
    for index in ids:
        if index in (None, tokenizer.specials.eos):
            continue
        inside = type(index) is int and 0 <= index < tokenizer.vocab_size
        if not inside or tokenizer.id_of(tokenizer.piece(index)) != index:
            raise UserError(f'{FILE}: eos_token_id={index!r} is not a token of the tokenizer')
        names.append(tokenizer.piece(index))
    return tuple(names)


def _length(hub: _Settings, given: Mapping[str, Any], model: Model, start: int) -> tuple[int, list[str]]:
    """Returns the most new tokens that there is room for, and the settings of lengths that it does not express."""
    paired = model.family == 'encoder_decoder'
    room = max(1, model.max_len + 1 - start if paired else model.max_len // 2)
    if 'max_new_tokens' in given:
        name, before, wanted = 'max_new_tokens', _forced(model, start), hub['max_new_tokens']
    elif 'max_length' in given and paired:
        name, before, wanted = 'max_length', start, hub.number('max_length')
    else:
        said = hub['max_length'] != DEFAULTS['max_length']
        return min(Decode.max_len, room), [f'max_length={hub["max_length"]}, with the prompt'] if said else []
    if type(wanted) is not int or wanted <= before:
        raise UserError(f'{FILE}: {name}={hub[name]!r} leaves no new token')
    wanted -= before
    return min(wanted, room), [f'{name}={hub[name]}, for which there is no room'] if wanted > room else []


def generation_config(config: Config, tokenizers: Tokenizers, tokens: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns the fields of generation_config.json; None for a model that does not write.

    `tokens` are the ids of its special tokens, as config.json has them.
    """
    decode = config.decode
    if not TASKS[config.train.objective].writes or config.model.family == 'encoder':
        return None
    drawn, forced = decode.strategy in ('sample', 'mbr'), _forced(config.model, len(config.data.start))
    fields = {**tokens, 'max_new_tokens': decode.max_len + forced, 'do_sample': drawn}
    if len(ends := tokenizers.ends(config)) > 1:
        fields['eos_token_id'] = list(ends)
    if drawn:
        fields |= {'temperature': decode.temperature, 'top_k': decode.top_k or 0, 'top_p': decode.top_p or 1.0}
        cuts = {name: getattr(decode, name) for name in CUTS}
        fields |= {name: value for name, value in cuts.items() if value is not None}
    fields |= {} if decode.repetition_penalty == 1 else {'repetition_penalty': decode.repetition_penalty}
    fields |= {} if decode.no_repeat_ngram is None else {'no_repeat_ngram_size': decode.no_repeat_ngram}
    fields |= {} if decode.guidance == 1 else {'guidance_scale': decode.guidance}
    biases = [[list(tokens), value] for tokens, value in biased_texts.of_tokens(decode.bias, tokenizers.target)]
    fields |= {'sequence_bias': biases} if biases else {}
    fields |= {'min_new_tokens': decode.min_len + forced} if decode.min_len else {}
    several = decode.num_outputs > 1 and decode.strategy != 'mbr'
    fields |= {'num_return_sequences': decode.num_outputs} if several else {}
    if decode.strategy == 'beam':
        fields |= {'num_beams': decode.beam_size, 'early_stopping': EARLY_STOPPING[decode.early_stopping]}
        if decode.beam_groups > 1:
            fields |= {'num_beam_groups': decode.beam_groups, 'diversity_penalty': decode.diversity_penalty}
        fields |= {'length_penalty': decode.length_penalty} if _has_penalty_of_the_hub(config) else {}
    return fields


def unexpressed(config: Config) -> list[str]:
    """Returns the fields of a run's generation that generation_config.json has no setting for."""
    decode = config.decode
    named = ('presence_penalty', 'frequency_penalty', 'choices', 'regex', 'json_schema', 'banned', 'begin')
    lost = [f'decode.{name}={value}' for name in named if (value := getattr(decode, name))]
    if decode.strategy == 'beam' and decode.coverage_penalty:
        lost.append(f'decode.coverage_penalty={decode.coverage_penalty}')
    lost += ['decode.strategy=mbr'] if decode.strategy == 'mbr' else []
    if decode.strategy == 'beam' and not (decode.count_cut or decode.forced_end):
        lost.append('decode.count_cut=False')
    if not _has_penalty_of_the_hub(config):
        lost.append(f'decode.length_penalty={decode.length_penalty} with decode.length_offset={decode.length_offset}')
    return lost


def _has_penalty_of_the_hub(config: Config) -> bool:
    """Returns whether the library's length penalty is that of a run."""
    decode, offset = config.decode, _offset(config.model, len(config.data.start))
    return decode.strategy != 'beam' or decode.length_penalty == 0 or decode.length_offset == offset
