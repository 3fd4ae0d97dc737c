"""The special tokens that a hub's model was trained with, as fields of a run."""

from collections.abc import Mapping
from typing import Any

from tformer.data.tokenizers.vocabulary import NAMES, Specials
from tformer.errors import UserError, choose
from tformer.hf.models import FAMILIES


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

    def name_of(field: str, default: str) -> list[str]:
        token = hub_config.get(field)
        if token is None:
            return [names[getattr(specials, default)]] if default else []
        if type(token) is not int or token not in names:
            valid = ', '.join(f'{known} ({name})' for known, name in sorted(names.items()))
            raise UserError(f'config.json: {field}={token!r} is not a special token of the tokenizer; valid: {valid}')
        return [names[token]]

    for field in ('eos_token_id', 'forced_eos_token_id'):
        ends = hub_config.get(field)
        if ends is not None and specials.eos not in (ends if isinstance(ends, list) else [ends]):
            raise UserError(f'config.json: {field}={ends!r}, but the tokenizer ends a text with {specials.eos}')
    start, source_start = (
        tuple(name for field, default in fields.items() for name in name_of(field, default))
        for fields in (family.start, family.source_start)
    )
    forced = hub_config.get('forced_eos_token_id') is not None
    return {'data.start': start, 'data.source_start': source_start, 'decode.forced_end': forced}
