"""A hub directory as the parts of a run: config, tokenizers, parameters, each read when it is asked for.

It holds config.json, tensors (safetensors files, or a torch pickle, which is read weights-only by torch), a vocabulary
and often generation_config.json. No code of a directory is run.
"""

import dataclasses
import functools
import importlib
import os
import pathlib
import re
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np

from tformer import config as config_lib
from tformer.config import Config, Data, json_files
from tformer.config.tasks import HEADS, TASKS
from tformer.data import stores
from tformer.data.tokenizers.hub_tokenizer import HubTokenizer
from tformer.data.tokenizers.tokenizers import Tokenizers
from tformer.errors import UserError, choose, nearest
from tformer.hf import (
    adapters,
    chat_templates,
    convert,
    generation,
    heads,
    models,
    pickles,
    safetensors,
    special_tokens,
    tokenizer_files,
)
from tformer.layers.resolved import resolve_model

# The end of an architecture's name -> the objective of its head. A name without such an end has no head.
OBJECTIVES = {
    'ForCausalLM': 'causal_lm',
    'LMHeadModel': 'causal_lm',
    'ForMaskedLM': 'masked_lm',
    'ForPreTraining': 'masked_lm',
    'ForNextSentencePrediction': 'masked_lm_nsp',
    'ForConditionalGeneration': 'seq2seq',
    'MTModel': 'seq2seq',
    'ForSequenceClassification': 'classification',
    'ForMultipleChoice': 'multiple_choice',
    'ForTokenClassification': 'token_classification',
    'ForQuestionAnswering': 'question_answering',
}
ADAPTED = {  # the task_type of adapters -> the end of the architecture that they are for
    'SEQ_CLS': 'ForSequenceClassification',
    'TOKEN_CLS': 'ForTokenClassification',
    'QUESTION_ANS': 'ForQuestionAnswering',
}
SENTENCES = {'seq_relationship': 'masked_lm_nsp', 'sop_classifier': 'masked_lm_sop'}  # by a part of a tensor's name
HEADLESS = {'encoder': 'masked_lm', 'decoder': 'causal_lm', 'encoder_decoder': 'seq2seq'}  # by family
DOWNLOADED = ('*.json', '*.safetensors', '*.model', '*.spm', '*.txt', '*.jinja')
PICKLES = 'pytorch_model*.bin'  # where there are no other tensors


@dataclasses.dataclass(frozen=True)
class HubDirectory:
    """A directory in the hub's form.

    Attributes:
      path: where it is.
      hub_config: the fields of its config.json.
      adapter: the directory of low-rank adapters for it; None: there are none.
    """

    path: pathlib.Path
    hub_config: Mapping[str, Any]
    adapter: pathlib.Path | None = None

    @property
    def family(self) -> str:
        return str(self.hub_config.get('model_type'))

    @functools.cached_property
    def generation(self) -> dict[str, Any]:
        """The fields of generation_config.json; {} where there is none."""
        return json_files.read_if_there(self.path / generation.FILE)

    @functools.cached_property
    def tensors(self) -> Mapping[str, np.ndarray]:
        """The tensors by the checkpoint's names; each is read when it is asked for."""
        found = safetensors.open_directory(self.path) or pickles.open_directory(self.path)
        if found is None:
            raise UserError(
                f'{self.path} has no tensors; valid: {safetensors.WHOLE}, {safetensors.INDEX}, *.safetensors'
            )
        return found

    @property
    def adapter_tensors(self) -> safetensors.Tensors:
        """Those of the adapters; there are none without."""
        return safetensors.open_files([] if self.adapter is None else [self.adapter / adapters.WEIGHTS])

    @functools.cached_property
    def labels(self) -> tuple[str, ...]:
        """The names of the classes in the order of their ids, where the model has a head with classes."""
        if not TASKS[self.objective].classes_from_data or not TASKS[self.objective].classes:
            return ()
        given, number = self._head_config.get('id2label'), self._num_labels
        if not isinstance(given, Mapping) or sorted(given) != sorted(map(str, range(number))):
            return tuple(f'LABEL_{index}' for index in range(number))
        names = tuple(str(given[str(index)]) for index in range(number))
        if len({*names}) < number:
            twice = next(name for name in names if names.count(name) > 1)
            raise UserError(f'config.json: id2label names two classes {twice!r}; each must have its own name')
        return names

    @functools.cached_property
    def _head_config(self) -> Mapping[str, Any]:
        """The fields of config.json; those of one beside the adapters come first."""
        own = json_files.read_if_there(self.adapter / 'config.json') if self.adapter else {}
        return {**self.hub_config, **own}

    @functools.cached_property
    def _num_labels(self) -> int:
        """The number of classes: that of the adapters' head where they have one, else that of config.json."""
        if self.adapter and (own := adapters.num_classes_of(self.adapter, self.family)):
            return own
        given = self._head_config.get('id2label')
        number = self._head_config.get('num_labels', len(given) if isinstance(given, Mapping) else 2)
        if type(number) is not int or not 0 < number < 1_000_000:
            raise UserError(f'config.json: num_labels={number!r} is not a number of classes')
        return number

    @property
    def objective(self) -> str:
        """The objective of the head that config.json names."""
        family = str(choose(models.FAMILIES, self.family, 'config.json: model_type').model['family'])
        named = self._head_config.get('architectures') or ['']
        if not isinstance(named, list) or not isinstance(named[0], str):
            raise UserError(f'config.json: architectures={named!r} is not a list of names')
        name = named[0]
        if self.adapter:
            name = ADAPTED.get(str(adapters.read_config(self.adapter).get('task_type')), name)
        found = next((objective for end, objective in OBJECTIVES.items() if name.endswith(end)), HEADLESS[family])
        if found == 'masked_lm':
            found = next((SENTENCES[x] for x in SENTENCES if any(x in tensor for tensor in self.tensors)), found)
        if found == 'classification':
            found = self._of_rows()
        missing = {*heads.TASK_HEADS} - {rule.head for rule in models.FAMILIES[self.family].rules}
        if family not in TASKS[found].families or TASKS[found].head in missing:
            raise UserError(f'config.json: architectures={name} has no counterpart in {self.family}')
        if found == 'question_answering' and family == 'encoder_decoder':
            reads = "its decoder reads the text one place later, and a run's does not"
            raise UserError(f'config.json: architectures={name} has no counterpart: {reads}')
        return found

    def _of_rows(self) -> str:
        """Returns the objective of a head of sequences: of numbers also where there is one label."""
        kind = self._head_config.get('problem_type')
        if kind not in (None, 'regression', 'single_label_classification'):
            raise UserError(
                f'config.json: problem_type={kind!r} has no counterpart; valid: single_label_classification'
            )
        one = kind is None and self._num_labels == 1
        return 'regression' if kind == 'regression' or one else 'classification'

    @functools.cached_property
    def tokenizers(self) -> Tokenizers:
        """The tokenizers of both sides, and the names of the classes."""
        found = tokenizer_files.read(self.path, self.family)
        declared = special_tokens.declared(self.path, self.hub_config, self.generation)
        target, source = (
            None if stored is None else HubTokenizer(stored, str(self.path), declared) for stored in found
        )
        assert target is not None
        if models.FAMILIES[self.family].model['family'] != 'encoder_decoder':
            return Tokenizers(None, target, self.labels, chat_templates.read(self.path))
        return Tokenizers(source or target, target, self.labels)

    def run_config(self) -> Config:
        """Returns the config of a run of this model: its sizes, its special tokens, the objective of its head.

        Raises:
          UserError: config.json has a field that has no counterpart, by its name; or as the other parts.
        """
        untied = convert.has_own_output(self.family, self.tensors)
        fields = {**self.hub_config, **({'tie_word_embeddings': False} if untied else {})}
        model = models.model_of(fields, lambda line: print(line, file=sys.stderr, flush=True))
        narrow = are_narrow(self.tensors) and (self.adapter is None or are_narrow(self.adapter_tensors))
        length = min(Data.length, model.max_len)
        if self.adapter is not None:
            model, _ = self._adapted(model)
        head, given = HEADS[TASKS[self.objective].head], (self.path, self.hub_config, self.generation, self.tokenizers)
        framing = special_tokens.framing(*given, model.family, judged=head.pools and not head.vocabulary)
        decoding, lost = generation.decode_fields(
            self.generation, self.hub_config, model, len(framing['data.start']), self.tokenizers.target
        )
        if lost and TASKS[self.objective].writes:
            print(f'{self.path}: generation here has no {", ".join(lost)}', file=sys.stderr, flush=True)
        fields = {
            'data.tokenizer': 'huggingface',
            'data.tokenizer_path': str(self.path.absolute()),
            'data.length': length,
            'data.encoder_length': length if model.family == 'encoder_decoder' else None,
            'data.bidirectional_prefix': False,
            'train.objective': self.objective,
            'train.num_steps': 1000,
            'optimizer.learning_rate': 5e-5,  # of fine-tuning
            'model.param_dtype': 'bfloat16' if narrow else 'float32',
            'optimizer.master_dtype': 'float32' if narrow else None,  # small updates add up in them
            'model.num_classes': len(self.labels) or None,
            **framing,
            **(decoding if TASKS[self.objective].writes else {}),
        }
        if TASKS[self.objective].classes == 'label':
            fields['data.labels'] = self.labels
        return config_lib.override(Config(model=model), fields)

    def parameters(self, model: config_lib.Model) -> dict[str, convert.Stacked]:
        """Returns the parameters by path, unread. Raises a `UserError` as `convert.stacked_params`."""
        plain, head = dataclasses.replace(model, lora_rank=None), TASKS[self.objective].head
        found = convert.stacked_params(self.family, self.tensors, plain, head)
        if self.adapter is not None:
            found |= self._adapted(model)[1]
        return found

    def _adapted(self, model: config_lib.Model) -> tuple[config_lib.Model, dict[str, convert.Stacked]]:
        assert self.adapter is not None
        return adapters.with_adapters(self.adapter, self.family, resolve_model(model), TASKS[self.objective].head)


def are_narrow(tensors: Mapping[str, np.ndarray]) -> bool:
    """Returns whether there are matrices, and all of them are bfloat16. Nothing of a safetensors file is read."""
    known: Mapping[str, Any] = tensors.entries if isinstance(tensors, safetensors.Tensors) else tensors
    dtypes = {tensor.dtype.name for tensor in (known[name] for name in known) if len(tensor.shape) > 1}
    return dtypes == {'bfloat16'}


def is_hub(path: pathlib.Path) -> bool:
    """Returns whether a directory has the config.json of a hub's model, or adapters for one."""
    file = path / 'config.json'
    return os.path.lexists(path / adapters.CONFIG) or (file.is_file() and 'model_type' in json_files.read(file))


def open_hub(name: str) -> HubDirectory:
    """Returns a hub directory: a path, or the name of a repository, which `huggingface_hub` downloads.

    One with adapter_config.json is that of the adapters' base model, with the adapters.

    Raises:
      UserError: there is no such directory, it has no config.json of a hub, the download fails, or the base model has
        adapters itself.
    """
    path = _place(name)
    if not os.path.lexists(path / adapters.CONFIG):
        return _of_model(path)
    base = adapters.base_of(path)
    if os.path.lexists((below := _place(base)) / adapters.CONFIG):
        raise UserError(f'{path / adapters.CONFIG}: base_model_name_or_path={base} has adapters itself')
    return dataclasses.replace(_of_model(below), adapter=path)


def _place(name: str) -> pathlib.Path:
    """Returns the directory of this name, or that into which a repository of this name is downloaded."""
    if re.match(r'https?:/|hf:/', name):
        raise UserError(f'{name} is a URL: name the repository, such as openai-community/gpt2')
    stores.require_local(name)
    path = pathlib.Path(name)
    if not path.is_dir():
        if not re.fullmatch(r'[\w-][\w.-]*/[\w.-]+', name):
            raise UserError(f'{name} is not a directory{nearest(path, path.parent.glob("*/"), listed=0)}')
        path = _downloaded(name)
    return path


def _of_model(path: pathlib.Path) -> HubDirectory:
    hub_config = json_files.read(path / 'config.json')
    if 'model_type' not in hub_config:
        raise UserError(f'{path / "config.json"} is not that of a hub: it has no model_type')
    return HubDirectory(path, hub_config)


def _downloaded(name: str) -> pathlib.Path:
    try:
        hub = importlib.import_module('huggingface_hub')
    except ImportError as error:
        needed = "the package huggingface_hub: pip install 'tformer[hub]'"
        raise UserError(f'{name} is not a directory, and to download it needs {needed}') from error
    try:
        path = pathlib.Path(hub.snapshot_download(name, allow_patterns=list(DOWNLOADED)))
        if not any(path.glob('*.safetensors')):
            path = pathlib.Path(hub.snapshot_download(name, allow_patterns=[*DOWNLOADED, PICKLES]))
        return path
    except Exception as error:  # of its network, of its own and of the system
        raise UserError(f'{name} is not a directory and cannot be downloaded: {str(error)[:200]}') from error
