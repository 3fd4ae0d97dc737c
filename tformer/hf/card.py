"""What stands beside the weights of an exported model: its card, its tokenizer files, generation_config.json."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from tformer import config as config_lib
from tformer.config import Config
from tformer.config.tasks import HEADS as HEADS_OF_TASKS
from tformer.config.tasks import TASKS
from tformer.data.tokenizers import chat
from tformer.data.tokenizers.hub_tokenizer import HubTokenizer
from tformer.data.tokenizers.subwords import SentencePiece
from tformer.data.tokenizers.tokenizers import TOKENIZERS, Tokenizers
from tformer.data.tokenizers.vocabulary import Tokenizer
from tformer.errors import UserError
from tformer.hf import chat_templates, special_tokens, vocabularies

# model_type -> how the names of the hub's classes begin, and end for a language model where that differs by family
CLASSES = {
    'albert': 'Albert', 'bart': 'Bart', 'bert': 'Bert', 'camembert': 'Camembert', 'deepseek_v2': 'DeepseekV2',
    'deepseek_v3': 'DeepseekV3', 'distilbert': 'DistilBert', 'electra': 'Electra', 'gemma': 'Gemma',
    'gemma2': 'Gemma2', 'gemma3_text': 'Gemma3', 'gpt2': 'GPT2', 'gpt_neox': 'GPTNeoX', 'gpt_oss': 'GptOss',
    'llama': 'Llama', 'm2m_100': 'M2M100', 'marian': 'Marian', 'mbart': 'MBart', 'mistral': 'Mistral',
    'mixtral': 'Mixtral', 'modernbert': 'ModernBert', 'mpnet': 'MPNet', 'mt5': 'MT5', 'olmo2': 'Olmo2', 'phi3': 'Phi3',
    'qwen2': 'Qwen2', 'qwen3': 'Qwen3', 'roberta': 'Roberta', 't5': 'T5', 'xlm-roberta': 'XLMRoberta',
}  # fmt: skip
LANGUAGE_MODELS = {'encoder': 'ForMaskedLM', 'decoder': 'ForCausalLM', 'encoder_decoder': 'ForConditionalGeneration'}
OTHER_NAMES = {'gpt2': 'LMHeadModel', 'marian': 'MTModel'}
HEADS = {  # by the first name of a head's parameters
    'class_head': 'ForSequenceClassification',
    'number_head': 'ForSequenceClassification',
    'choice_head': 'ForMultipleChoice',
    'tag_head': 'ForTokenClassification',
    'span_head': 'ForQuestionAnswering',
    'sentence_head': 'ForPreTraining',
    'detection_head': 'ForPreTraining',
}


def hub_config(family: str, config: Config, tokenizers: Tokenizers, params: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of config.json beside those of the model: class, labels, special tokens, dtype."""
    model = config.model
    heads = [end for name, end in HEADS.items() if name in params]
    vocabulary = 'head' in params or model.family != 'encoder'
    end = heads[0] if heads else OTHER_NAMES.get(family, LANGUAGE_MODELS[model.family]) if vocabulary else 'Model'
    found: dict[str, Any] = {'dtype': model.param_dtype, 'torch_dtype': model.param_dtype, **tokens(config, tokenizers)}
    if family in CLASSES:
        found['architectures'] = [CLASSES[family] + end]
    if 'class_head' in params:  # also of one class, which the hub's library takes for a number
        found['problem_type'] = 'single_label_classification'
    if 'number_head' in params:
        found |= {'num_labels': 1, 'problem_type': 'regression'}
    elif tokenizers.labels and not {'class_head', 'tag_head'}.isdisjoint(params):
        found['id2label'] = {str(index): label for index, label in enumerate(tokenizers.labels)}
        found['label2id'] = {label: index for index, label in enumerate(tokenizers.labels)}
    return found


def tokens(config: Config, tokenizers: Tokenizers) -> dict[str, Any]:
    """Returns the ids of the special tokens that start, pad and end a text, as config.json has them.

    Raises:
      UserError: data.start has more tokens than the hub can put in front of a decoder's text.
    """
    specials, start = tokenizers.target.specials, config.data.start
    found: dict[str, Any] = {name: getattr(specials, name.partition('_')[0]) for name in ID_FIELDS}
    if config.model.family != 'encoder_decoder':
        return found
    if not 1 <= len(start) <= 2:
        raise UserError(f'data.start={start} has no counterpart in the hub; valid: one token or two')
    first, forced = (*specials.of(start), None)[:2]
    return {
        **found,
        'decoder_start_token_id': first,
        'forced_bos_token_id': forced,
        'forced_eos_token_id': specials.eos if config.decode.forced_end else None,
    }


ID_FIELDS = ('pad_token_id', 'bos_token_id', 'eos_token_id')


def tokenizer_files(config: Config, tokenizers: Tokenizers) -> dict[str, bytes] | None:
    """Returns tokenizer.json and tokenizer_config.json; None for a tokenizer that the hub has no form for.

    Raises:
      UserError: a sentinel has another id than the hub's library gives it.
    """
    read = tokenizers.source or tokenizers.target
    if read.normalization is not None:
        return None
    around = _around(config, read)
    if isinstance(read, HubTokenizer):
        stored, own = read.dump().decode(), special_tokens.around_of(read, 'the tokenizer')
        pairs = _judges(config) or config.model.family == 'encoder'  # others do not read two texts
        framed = own == around and _types(config) == 1 if pairs else own[:2] == around[:2]
    elif isinstance(read, SentencePiece):
        stored, framed = vocabularies.sentence_pieces(read.dump(), 'the tokenizer'), False
    else:
        return None
    stored = _with_sentinels(stored if framed else _framed(stored, config, read, around), read)
    settings = {'tokenizer_class': 'PreTrainedTokenizerFast', 'model_max_length': config.model.max_len}
    types = ['token_type_ids'] if _types(config) > 1 else []
    settings['model_input_names'] = ['input_ids', *types, 'attention_mask']
    settings |= dict(chat.variables_of(read))
    settings['clean_up_tokenization_spaces'] = False
    if tokenizers.own_chat or TASKS[config.train.objective].records == 'chat':
        settings |= chat_templates.settings_of(tokenizers.chat)
    settings['pad_token'] = read.piece(read.specials.pad)  # as config.json has it
    return {'tokenizer.json': stored.encode(), 'tokenizer_config.json': _json(settings)}


def _with_sentinels(stored: str, tokenizer: Tokenizer) -> str:
    """Returns a tokenizer.json with data.sentinels as special tokens, of T5's names, behind the file's own."""
    own = len(tokenizer.sentinels) - tokenizer.num_sentinels
    flags = {'special': True, 'normalized': False}
    added = [
        vocabularies.Added(f'<extra_id_{number}>', index, 'data.sentinels', flags)
        for number, index in enumerate(tokenizer.sentinels.tolist())
        if number >= own
    ]
    return vocabularies.with_added(stored, added)


def _types(config: Config) -> int:
    return config.model.num_token_types or 1


def _judges(config: Config) -> bool:
    """Returns whether a run reads texts that it does not continue."""
    return not HEADS_OF_TASKS[TASKS[config.train.objective].head].vocabulary


def _around(config: Config, tokenizer: Tokenizer) -> special_tokens.Around:
    """Returns the special tokens that a run puts around a text, and between two."""
    specials, data = tokenizer.specials, config.data
    behind = data.end if _judges(config) else ('sep',) if TASKS[config.train.objective].given else ()
    before, after = {
        'encoder': ([specials.cls], [specials.sep]),
        'decoder': (specials.of(data.start), specials.of(behind)),
        'encoder_decoder': (specials.of(data.source_start), specials.of(data.source_end)),
    }[config.model.family]
    return special_tokens.Around(before, after, specials.of(data.separator))


def _framed(stored: str, config: Config, tokenizer: Tokenizer, around: special_tokens.Around) -> str:
    """Returns a tokenizer.json that puts the run's special tokens around a text, or two."""
    before, after, between = (list(map(tokenizer.piece, ids or ())) for ids in around)
    return vocabularies.framed(stored, before, after, between, typed=_types(config) > 1)


def unexpressed(config: Config, tokenizers: Tokenizers, files: Mapping[str, bytes] | None) -> list[str]:
    """Returns lines that say where the hub's library reads or writes texts otherwise than the run; `files` are those of
    the tokenizer, as `tokenizer_files` returns them."""
    read, target = tokenizers.source or tokenizers.target, tokenizers.target
    lines = []
    if files is None:
        kind = next(name for name, row in TOKENIZERS.items() if row is type(read))
        kind += f', data.normalization={read.normalization}' if read.normalization else ''
        valid = 'huggingface, sentencepiece, without data.normalization'
        lines += [f'the tokenizer ({kind}) has no counterpart in the hub and is left out; valid: {valid}']
    elif read is not target and _pieces(read) != _pieces(target):
        lines += ['the tokenizer is that of the texts that are read: what the model writes has the ids of another one']
    if reads_otherwise(config):
        reads = "the hub's library gives the decoder the encoder's text one place later"
        lines += [f'{reads}, and this run read it otherwise']
    return lines


def _pieces(tokenizer: Tokenizer) -> list[str]:
    return list(map(tokenizer.piece, range(tokenizer.vocab_size)))


def reads_otherwise(config: Config) -> bool:
    """Returns whether the hub's library gives a decoder behind an encoder another text than a run that judges does: the
    encoder's, one place later."""
    data, head = config.data, TASKS[config.train.objective].head
    shifted = (data.start[1:], data.source_end, data.end) == (data.source_start, ('eos',), ())
    return config.model.family == 'encoder_decoder' and _judges(config) and (head == 'spans' or not shifted)


def _json(tree: Any) -> bytes:
    return (json.dumps(tree, indent=2, ensure_ascii=False) + '\n').encode()


def card(
    title: str,
    family: str,
    config: Config,
    results: Mapping[str, Mapping[str, float]],
    record: Mapping[str, Any],
    unlike: Sequence[str] = (),
) -> str:
    """Returns README.md: what the model is, its scores, what it was trained on, and the whole config.

    Args:
      title: the model's name.
      family: a hub's model_type.
      config: of the run.
      results: the content of result.json.
      record: the metadata of the checkpoint.
      unlike: lines that say what the hub's library does otherwise than the run.
    """
    lines = ['---', 'library_name: transformers', f'tags: [{family}, jax, tformer]', '---', '', f'# {title}', '']
    lines += [f'A model of the family `{family}`, trained with tformer: `train.objective={config.train.objective}`.']
    if unlike:
        lines += ['', "## What the hub's library does otherwise", '', *(f'- {line}' for line in unlike)]
    for split, scores in results.items():
        if split != 'wall_time':
            lines += ['', f'## Scores on {split}', '', '| metric | value |', '| --- | --- |']
            lines += [f'| {name} | {value:.6g} |' for name, value in scores.items()]
    facts = {**record.get('data', {}), **{f'version of {name}': x for name, x in record.get('versions', {}).items()}}
    lines += ['', '## Data and versions', '', '| fact | value |', '| --- | --- |']
    lines += [f'| {name} | `{value}` |' for name, value in facts.items()]
    changed = config_lib.difference(Config(), config)
    lines += ['', '## Config', '', 'Fields that are not at their defaults:', '', '```']
    lines += [f'{name}={value!r}' for name, (_, value) in changed.items()]
    return '\n'.join([*lines, '```', ''])
