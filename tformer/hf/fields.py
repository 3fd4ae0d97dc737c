"""Correspondences of config.json and our `Model`, which read both ways; each family's table consists of them.

A field is a pair of functions. `read` takes config.json to fields of `Model`, `write` takes a `Model` back.
"""

import fnmatch
import math
from collections.abc import Callable, Collection, Hashable, Mapping
from typing import Any, NamedTuple

from tformer.config import Model
from tformer.errors import UserError, choose


class HubConfig(dict[str, Any]):
    """A hub's config.json with the family's defaults. It notes which fields are read.

    A field that is missing, or null where null has no meaning, raises a `UserError`.
    """

    def __init__(self, given: Mapping[str, Any], defaults: Mapping[str, Any]):
        super().__init__({**defaults, **given})
        self.given = given
        self.was_read: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        value = self.nullable(name)
        if value is None:
            raise UserError(f'config.json: {name} is null, which has no counterpart')
        return value

    def nullable(self, name: str) -> Any:
        """Returns the value of a field that may be null."""
        self.was_read.add(name)
        if name not in self:
            raise UserError(f'config.json ({self.get("model_type")}) has no field {name}')
        return super().__getitem__(name)

    def number(self, name: str, least: float = 0, kinds: tuple[type, ...] = (int, float)) -> Any:
        """Returns the value of a field that holds a number of one of `kinds`, `least` or more."""
        value = self[name]
        if type(value) not in kinds or not least <= value < math.inf:
            kind = 'number' if float in kinds else 'whole number'
            raise UserError(f'config.json: {name}={value!r} is not a {kind} of at least {least}')
        return value

    def size(self, name: str, least: int = 1) -> int:
        """Returns the value of a field that holds a whole number, `least` or more."""
        return int(self.number(name, least, (int,)))

    def section(self, name: str) -> 'HubConfig | None':
        """Returns a field that holds fields; None where it is missing, null or empty."""
        self.was_read.add(name)
        value = self.get(name) or None
        if value is not None and not isinstance(value, Mapping):
            raise UserError(f'config.json: {name}={value!r} is not an object with fields')
        return value if value is None else HubConfig(value, {'model_type': name})

    def unread(self, neutral: Collection[str] = ()) -> dict[str, Any]:
        """Returns the given fields that were not read, without those that are off or never change a number.

        Args:
          neutral: more fields that never change one.
        """
        return {
            name: value
            for name, value in self.given.items()
            if name not in self.was_read
            and not matches(name, (*NEUTRAL, *neutral))
            and (value is False or value not in (None, 0, [], {}, ''))
        }


def matches(name: str, patterns: Collection[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


# Fields that act in training alone.
OF_TRAINING = ('*dropout*', '*_pdrop', '*layerdrop*', 'router_jitter_noise', 'input_jitter_noise')

# Fields about files, outputs, initial values and generation; the last line's are computed from others, or old names.
NEUTRAL = (
    *('model_type', 'architectures', 'transformers_version', 'dtype', 'torch_dtype', '_*', 'name_or_path', 'auto_map'),
    *('*_token_id', 'tokenizer_class', 'prefix', 'id2label', 'label2id', 'num_labels', 'problem_type', 'language'),
    *('finetuning_task', 'task_specific_params', 'summary_*', 'pooler_*', 'directionality', 'output_*', 'return_dict'),
    *('use_cache', 'cache_implementation', 'torchscript', 'gradient_checkpointing', 'attn_implementation'),
    *('name', 'unsloth_*', 'transformers.js_config', 'sentence_transformers', 'sbert_*', 'custom_pipelines'),
    *('initializer_range', 'initializer_factor', 'init_std', 'pretraining_tp', 'reorder_and_upcast_attn'),
    *('chunk_size_feed_forward', 'max_length', 'min_length', 'num_beams', 'num_beam_groups', 'num_return_sequences'),
    *('length_penalty', 'early_stopping', 'no_repeat_ngram_size', 'encoder_no_repeat_ngram_size', 'do_sample'),
    *('temperature', 'top_k', 'top_p', 'typical_p', 'repetition_penalty', 'diversity_penalty', 'bad_words_ids'),
    *('begin_suppress_tokens', 'suppress_tokens', 'exponential_decay_length_penalty', 'remove_invalid_values'),
    *(
        'n_ctx',
        'output_past',
        'extra_pos_embeddings',
        'force_bos_token_to_be_generated',
        'tie_weights_',
        'num_hidden_layers',
        'classif_dropout',
        'tf_legacy_loss',
        'use_bfloat16',
    ),
)

# Fields that must have this value in every family, where config.json has them.
FIXED: dict[str, Any] = {
    'is_decoder': False,
    'add_cross_attention': False,
    'quantization_config': None,
    'tie_encoder_decoder': False,
    'cross_attention_hidden_size': None,
    'pruned_heads': {},
}


class Field(NamedTuple):
    """One correspondence between config.json and `Model`.

    Attributes:
      read: config.json -> fields of `Model` and their values.
      write: a resolved `Model` -> fields of config.json and their values.
    """

    read: Callable[[HubConfig], dict[str, Any]]
    write: Callable[[Model], dict[str, Any]]


def field(ours: str, *theirs: str, values: Mapping[Any, Any] | None = None, null: bool = False) -> Field:
    """Returns the correspondence of our field `ours` with the hub's fields `theirs`, which must be equal.

    Args:
      ours: a field of `Model`.
      theirs: fields of config.json.
      values: the hub's value -> ours, the name to write first; None: they are the same.
      null: whether the hub's field may be null.
    """

    def read(hub: HubConfig) -> dict[str, Any]:
        found = [hub.nullable(name) if null else hub[name] for name in theirs]
        if any(value != found[0] for value in found[1:]):
            raise UserError(f'config.json: {" and ".join(theirs)} differ, which has no counterpart')
        if values is None:
            return {ours: found[0]}
        key = found[0] if isinstance(found[0], Hashable) else str(found[0])
        return {ours: choose(values, key, f'config.json: {theirs[0]}')}

    def write(model: Model) -> dict[str, Any]:
        value = getattr(model, ours)
        if values is not None:
            names = [name for name, expressed in values.items() if expressed == value]
            if not names:
                valid = ', '.join(map(repr, dict.fromkeys(values.values())))
                raise UserError(f'model.{ours}={value!r} has no counterpart; valid: {valid}')
            value = names[0]
        elif value is None and not null:
            raise UserError(f'model.{ours}=None has no counterpart')
        return dict.fromkeys(theirs, value)

    return Field(read, write)


def fields(**names: str) -> tuple[Field, ...]:
    """Returns the correspondences of fields that differ in their names alone: ours='theirs'."""
    return tuple(field(ours, theirs) for ours, theirs in names.items())


ACTIVATIONS = {
    'relu': 'relu',
    'gelu': 'gelu',
    'gelu_new': 'gelu_tanh',
    'gelu_pytorch_tanh': 'gelu_tanh',
    'silu': 'silu',
    'swish': 'silu',
}
GATED_ACTIVATIONS = {
    'relu': 'reglu',
    'gelu': 'geglu',
    'gelu_pytorch_tanh': 'geglu_tanh',
    'gelu_new': 'geglu_tanh',
    'silu': 'swiglu',
    'swish': 'swiglu',
}

# Two stacks of one vocabulary.
VOCABULARY = Field(
    lambda hub: {'vocab_size': hub['vocab_size'], 'encoder_vocab_size': hub['vocab_size']},
    lambda model: {'vocab_size': model.vocab_size},
)
