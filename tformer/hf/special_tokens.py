"""The special tokens that a hub's model was trained with, as fields of a run."""

import json
import pathlib
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

from tformer.config import Config, json_files
from tformer.config.tasks import HEADS, TASKS
from tformer.data.examples.special_tokens import template_of
from tformer.data.tokenizers.chat import VARIABLES
from tformer.data.tokenizers.tokenizers import Tokenizers
from tformer.data.tokenizers.vocabulary import NAMES, Specials, Tokenizer
from tformer.errors import UserError, choose
from tformer.hf import chat_templates
from tformer.hf.models import FAMILIES
from tformer.hf.tokenizer_files import language_of


def declared(
    directory: pathlib.Path, hub_config: Mapping[str, Any], generation: Mapping[str, Any]
) -> dict[str, list[str | int]]:
    """Returns the names and the ids of special tokens that the files of a directory declare, by fields of `Specials`.

    Names are those of tokenizer_config.json and special_tokens_map.json. They come before the ids of config.json, and
    these before those of generation_config.json. The id of BOS counts where the family reads it.
    """
    family = choose(FAMILIES, str(hub_config.get('model_type')), 'config.json: model_type')
    unread = {'bos_token_id'} - {*family.start, *family.source_start}
    names = chat_templates.tokens(chat_templates.settings_in(directory))
    found: dict[str, list[str | int]] = {}
    for variable, field in VARIABLES.items():
        name = f'{variable}_token_id'
        ids = [hub.get(name) for hub in (hub_config, generation) if name not in unread]
        given = [names.get(f'{variable}_token'), *(index for each in ids for index in _listed(each))]
        found[field] = [token for token in given if type(token) in (str, int)]
    return found


def _listed(ids: Any) -> list[Any]:
    return ids if isinstance(ids, list) else [ids]


def special_tokens_of(hub_config: Mapping[str, Any], specials: Specials) -> dict[str, Any]:
    """Returns the fields of a run that put the family's special tokens around texts, for `config.override`.

    BART's encoder reads `<s> text </s>`, and its decoder starts from `</s> <s>`. T5 and Marian read `text </s>` and
    start from `<pad>`. Llama, Gemma and Mixtral read `<s> text`, GPT-2 reads `text`, BERT and RoBERTa read
    `<s> text </s>`.

    Args:
      hub_config: the fields of config.json, and over them those of generation_config.json where there is one.
      specials: the special tokens of the checkpoint's tokenizer.

    Raises:
      UserError: an unknown family, or an id that is not that of a special token, or of this one, in the tokenizer.
    """
    family = choose(FAMILIES, str(hub_config.get('model_type')), 'config.json: model_type')
    names = {getattr(specials, name): name for name in reversed(NAMES)}  # the first name of each id
    known = {**{index: name for name, index in specials.others}, **names}

    def name_of(field: str, default: str) -> list[str]:
        token = hub_config.get(field)
        if token is None:
            return [names[getattr(specials, default)]] if default else []
        if type(token) is not int or token not in known:
            valid = ', '.join(f'{index} ({name})' for index, name in sorted(names.items()))
            raise UserError(f'config.json: {field}={token!r} is not a special token of the tokenizer; valid: {valid}')
        return [known[token]]

    for field, others in (('eos_token_id', dict(specials.others).values()), ('forced_eos_token_id', ())):
        ends = hub_config.get(field)
        listed = _listed(ends)
        if ends is not None and specials.eos not in listed and not all(end in others for end in listed):
            raise UserError(f'config.json: {field}={ends!r}, but the tokenizer ends a text with {specials.eos}')
    start, source_start = (
        tuple(name for field, default in fields.items() for name in name_of(field, default))
        for fields in (family.start, family.source_start)
    )
    forced = hub_config.get('forced_eos_token_id') is not None
    return {'data.start': start, 'data.source_start': source_start, 'decode.forced_end': forced}


def padded(family: str, config: Config, tokenizers: Tokenizers) -> Tokenizers:
    """Returns the tokenizers of a run with the padding that all files of its export have.

    Raises:
      UserError: as `check_positions`, or the hub's library would pool another token than the run.
    """
    check_positions(family, config, tokenizers)
    if FAMILIES[family].padded_positions:
        return tokenizers.padded(config.model.position_offset - 1)
    specials, head = tokenizers.target.specials, HEADS[TASKS[config.train.objective].head]
    pools = config.model.family == 'decoder' and head.per_row and not head.vocabulary
    if pools and specials.of(config.data.end)[-1:] == [specials.pad]:
        pad = tokenizers.target.piece(specials.pad)
        ends = (
            f'texts end with {pad} (data.end={config.data.end}), and the hub pools the last token that is not padding'
        )
        raise UserError(f'{family}: {pad} is the padding, too: {ends}; one trained with data.end=() can be written')
    return tokenizers


def check_positions(family: str, config: Config, tokenizers: Tokenizers) -> None:
    """Raises a `UserError` where the hub's library counts the positions of a text otherwise than a run: from the tokens
    that are not its padding, whose id is model.position_offset - 1, where a text may have that token."""
    if not FAMILIES[family].padded_positions:
        return
    pad, own = config.model.position_offset - 1, tokenizers.target.specials.pad
    around = _around_texts(config, tokenizers)
    sides = [side for side in (tokenizers.target, tokenizers.source) if side is not None]
    if pad not in around and not any(pad in side.ordinary_ids for side in sides):
        return
    piece, valid = tokenizers.target.piece(pad), f"{own + 1}, which follows the tokenizer's padding, {own}"
    if own in around or 'pad_token_id' in FAMILIES[family].fixed:
        valid = f'a tokenizer in which {pad} is padding alone'
    counted = f'the hub counts positions without the token {pad} ({piece!r}), which texts have'
    raise UserError(f'{family}: with model.position_offset={pad + 1} {counted}; valid: {valid}')


def _around_texts(config: Config, tokenizers: Tokenizers) -> set[int | None]:
    """Returns the special ids that a run reads around texts or in them."""
    template, specials = template_of(config, tokenizers), tokenizers.target.specials
    found = {*template.front, *template.back, *template.between, specials.mask_or_none}
    found |= {specials.unk} - {specials.pad}  # which stands for what a vocabulary does not need
    if config.model.family == 'encoder_decoder':
        found |= {*template.around[0], *template.around[1], specials.eos}
    return found


class Around(NamedTuple):
    """The ids that a tokenizer puts around texts."""

    before: list[int]
    after: list[int]
    between: list[int] | None  # two texts; None: the tokenizer does not put the others around two


def framing(
    directory: pathlib.Path,
    hub_config: Mapping[str, Any],
    generation: Mapping[str, Any],
    tokenizers: Tokenizers,
    family: str,
    judged: bool = False,
) -> dict[str, Any]:
    """Returns the fields of the special tokens around texts, for `config.override`.

    They are those of config.json and generation_config.json, with those that the tokenizer puts around a text, or two.
    Where a model writes many languages, a line says how to choose one if the directory does not. `family` is that of
    the run's model, and `judged` says that the model has a head of texts.

    Raises:
      UserError: as `special_tokens_of`; an encoder's tokenizer puts others around a text than the run does; or those of
        an encoder-decoder with a head of texts are none that the run can read.
    """
    read = tokenizers.source or tokenizers.target
    settings = json_files.read_if_there(directory / 'tokenizer_config.json')
    given = {name: value for name, value in generation.items() if value is not None}
    # Where there is a generation_config.json, the hub's library forces no token that only config.json names.
    older = {name: value for name, value in hub_config.items() if not (generation and name.startswith('forced_'))}
    fields = special_tokens_of({**older, **given}, tokenizers.target.specials)
    around, table = _around(directory, settings, read), FAMILIES[str(hub_config['model_type'])]
    fields['data.separator'] = table.separator
    if family == 'decoder':
        fields |= {'data.end': (), 'data.separator': fields['data.start']}
    if around is None:
        return _as_judged(directory, fields) if judged and family == 'encoder_decoder' else fields
    if family == 'encoder':
        _check_encoder(directory, read, around)
        if around.between is None or not around.before:
            return fields
    names = {getattr(read.specials, name): name for name in reversed(NAMES)}
    names = {**{index: name for name, index in read.specials.others}, **names}
    if any(index not in names for index in (*around.before, *around.after, *(around.between or ()))):
        print(f'{directory}: the tokens that its tokenizer puts around a text are left out: {around}', file=sys.stderr)
        return fields
    before, after = (tuple(names[index] for index in ids) for ids in around[:2])
    if around.between is not None:
        own = {**names, read.specials.sep: 'sep'}
        fields['data.separator'] = tuple(own[index] for index in around.between)
    if family == 'encoder':
        return fields
    if family == 'decoder':
        pooled = _up_to_pooled(around.after, hub_config.get('pad_token_id')) if judged else len(after)
        separator = (*after, *before) if around.between is None else fields['data.separator']
        return {**fields, 'data.start': before, 'data.end': after[:pooled], 'data.separator': separator}
    fields |= {'data.source_start': before, 'data.source_end': after or ('eos',)}
    if judged:
        return _as_judged(directory, fields)
    if {*before, *after} - {*NAMES} and {*fields['data.start']} <= {*NAMES}:  # a language that is read, none to write
        fields['data.start'] += _written(directory, settings, tokenizers.target)
    return fields


def _up_to_pooled(ids: list[int], pad: Any) -> int:
    """Returns how many tokens behind a text a decoder's head of texts reads in the hub's library: it pools the last one
    that is not the padding of config.json, and nothing behind that changes it."""
    return max((place for place, index in enumerate(ids, 1) if index != pad), default=0)


def _check_encoder(directory: pathlib.Path, tokenizer: Tokenizer, around: Around) -> None:
    """Raises a `UserError` where an encoder's tokenizer puts other tokens around a text than the run does."""
    own = [tokenizer.specials.cls], [tokenizer.specials.sep]
    if (around.before or around.after) and around[:2] != own:
        theirs, ours = (
            ' '.join([*map(tokenizer.piece, before), 'text', *map(tokenizer.piece, after)])
            for before, after in (around[:2], own)
        )
        raise UserError(f'{directory}: its tokenizer writes {theirs}, and its special tokens are read as {ours}')


def _as_judged(directory: pathlib.Path, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields with which an encoder-decoder reads a text as its head of texts does in the hub's library:
    the decoder is given what the encoder reads one place later, so that its last token stands where the encoder's EOS
    does, which is pooled."""
    if fields.get('data.source_end', ('eos',)) != ('eos',):
        found = ', '.join(fields['data.source_end'])
        raise UserError(f'{directory}: its tokenizer puts {found} behind a text; of a head of texts it must be eos')
    start = *fields['data.start'][:1], *fields['data.source_start']
    return {**fields, 'data.start': start, 'data.end': ()}


def _around(directory: pathlib.Path, settings: Mapping[str, Any], tokenizer: Tokenizer) -> Around | None:
    """Returns the ids that a tokenizer puts in front of a text and behind it, and between two, as tokenizer_config.json
    says or its own file does; None where there is neither."""
    before, after, between = around_of(tokenizer, str(directory))
    if isinstance(ends := settings.get('add_eos_token'), bool):
        after = [tokenizer.specials.eos] if ends else []
    if isinstance(added := settings.get('add_bos_token'), bool):
        before = [tokenizer.specials.bos] if added else []
        return Around(before, after, [*after, *before])
    known = json.loads(tokenizer.dump()).get('post_processor') or (directory / 'tokenizer.json').is_file()
    return Around(before, after, between) if known else None


def around_of(tokenizer: Tokenizer, where: str) -> Around:
    """Returns the ids that the file of a tokenizer puts around texts; raises a `UserError` if it cannot be read."""
    import tokenizers

    try:
        made = tokenizers.Tokenizer.from_str(tokenizer.dump().decode())
        made.no_truncation()
        made.no_padding()
        whole, plain = (made.encode('a', add_special_tokens=added).ids for added in (True, False))
        pair = made.encode('a', 'a')
    except Exception as error:  # the library raises plain Exceptions
        reason = ' '.join(str(error).split())[:200]
        raise UserError(f'{where}: the tokens around a text cannot be read: {reason}') from error
    places = [i for i in range(len(whole) - len(plain) + 1) if whole[i : i + len(plain)] == plain]
    before, after = (whole[: places[0]], whole[places[0] + len(plain) :]) if places else ([], [])
    around = [*before, *plain], [*plain, *after]
    between = pair.ids[len(around[0]) : len(pair.ids) - len(around[1])]
    same = pair.ids == [*around[0], *between, *around[1]]
    return Around(before, after, between if same else None)


def _written(directory: pathlib.Path, settings: Mapping[str, Any], tokenizer: Tokenizer) -> tuple[str, ...]:
    """Returns the token of the language to write that the settings name; () and a line if they name none."""
    language = language_of(settings.get('tgt_lang'), tokenizer.special_names)
    if language is None:
        hint = 'choose it behind the others in data.start, and the one that is read in data.source_start or _end'
        print(f'{directory} does not say which language to write: {hint}', file=sys.stderr, flush=True)
    return () if language is None else (language,)
