"""Records from plain (JSON) values under the names that the data gives them, and the checks of each field."""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from tformer.config.run import Data
from tformer.config.tasks import TASKS
from tformer.data.sources import templates
from tformer.data.sources.records import BadRecord, Record, no_key
from tformer.errors import UserError, nearest

Make = Callable[[Mapping[str, Any]], Record]

_SHOWN = 40  # the characters of a value that a message shows


def keys_of(config: Data, objective: str) -> dict[str, str]:
    """Returns the name in the data of each field, from `config.columns`: required fields first, then optional ones."""
    fields, optional = TASKS[objective].fields, TASKS[objective].optional
    allowed = fields + optional
    if config.columns and not len(fields) <= len(config.columns) <= len(allowed):
        more = f', and may name {", ".join(optional)}' if optional else ''
        raise UserError(f'data.columns={config.columns} must name {len(fields)} fields: {", ".join(fields)}{more}')
    return {**dict(zip(allowed, allowed, strict=True)), **dict(zip(allowed, config.columns, strict=False))}


def maker(config: Data, objective: str, keys: Mapping[str, str] | None = None) -> Make:
    """Returns the function that makes a record of the objective from plain values.

    It fills the templates, if there are any; else it reads the values of `keys` (None: the fields' own names). It
    raises `BadRecord` if a value is missing or is not valid for its field.
    """
    if config.source_template is not None:
        return lambda values: {
            field: text(value, f'data.{field}_template') for field, value in templates.written(values, config).items()
        }
    task = TASKS[objective]
    check = TagForm().check if task.records == 'tags' else CHECKS.get(task.records, lambda record, config: record)
    names = keys or {field: field for field in task.fields + task.optional}

    def make(values: Mapping[str, Any]) -> Record:
        record = {}
        for field, key in names.items():
            if key in values:
                record[field] = READERS.get(field, text)(values[key], key)
            elif field in task.fields:
                raise no_key(key, values)
        return check(record, config)

    return make


def text(value: Any, key: str) -> str:
    """Returns a string that can be encoded as UTF-8."""
    if not isinstance(value, str):
        raise BadRecord(f'{key!r} is not a string: {_short(value)}')
    if '\0' in value:
        raise BadRecord(f'{key!r} has a NUL character, so it is not text')
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise BadRecord(f'{key!r} has half of a surrogate pair: {value[error.start]!r}') from None
    return value


def _texts(value: Any, key: str) -> list[str]:
    if not isinstance(value, list):
        raise BadRecord(f'{key!r} is not a list of strings: {_short(value)}')
    return [text(item, f'{key}[{place}]') for place, item in enumerate(value)]


def _one_or_more(value: Any, key: str) -> list[str]:
    return [value] if isinstance(value, str) else _texts(value, key)


def messages(value: Any, key: str) -> list[dict[str, str]]:
    """Returns the messages of a chat: a role and a content each."""
    if not isinstance(value, list) or not all(isinstance(message, dict) for message in value) or not value:
        raise BadRecord(f'{key!r} is not a list of {{"role": ..., "content": ...}}: {_short(value)}')
    read = []
    for place, message in enumerate(value):
        if unknown := sorted(message.keys() - {'role', 'content'}):
            raise BadRecord(f'{key}[{place}] has {unknown[0]!r}; valid: role, content')
        for name in ('role', 'content'):
            if name not in message:
                raise BadRecord(f'{key}[{place}] has no {name!r}')
        read.append({name: text(message[name], f'{key}[{place}].{name}') for name in ('role', 'content')})
    return read


def _label(value: Any, key: str) -> str | float:
    """A string or a number; `CHECKS` of the record decide which."""
    if not isinstance(value, str | int | float) or isinstance(value, bool):
        raise BadRecord(f'{key!r} is neither a string nor a number: {_short(value)}')
    return text(value, key) if isinstance(value, str) else value


def _answers(value: Any, key: str) -> list[tuple[int, str]]:
    """Answers in either form of SQuAD: {"text": [...], "answer_start": [...]}, or a list of one object per answer."""
    if isinstance(value, list) and all(isinstance(answer, dict) for answer in value):
        value = {name: [answer.get(name) for answer in value] for name in ('text', 'answer_start')}
    if not isinstance(value, dict) or not all(isinstance(value.get(n), list) for n in ('text', 'answer_start')):
        raise BadRecord(f'{key!r} is not {{"text": [...], "answer_start": [...]}}: {_short(value)}')
    answers, starts = _texts(value['text'], f'{key}.text'), value['answer_start']
    if len(answers) != len(starts):
        raise BadRecord(f'{key!r} has {len(answers)} texts and {len(starts)} starts')
    for start in starts:
        if not isinstance(start, int) or isinstance(start, bool):
            raise BadRecord(f'{key!r}: the start {_short(start)} is not a whole number')
    return list(zip(starts, answers, strict=True))


def _short(value: Any) -> str:
    return repr(value)[:_SHOWN] if isinstance(value, str) else str(value)[:_SHOWN].replace('\n', ' ')


def _filled(record: Record, *fields: str) -> None:
    for field in fields:
        texts = record.get(field, [])
        if not all(text.strip() for text in ([texts] if isinstance(texts, str) else texts)):
            raise BadRecord(f'{field} is empty')


def _of_positive(record: Record, config: Data) -> Record:
    _filled(record, 'text', 'positive', 'negative')
    return {**record, 'texts': [record['text'], record['positive'], *record.get('negative', [])]}


def _of_preference(record: Record, config: Data) -> Record:
    _filled(record, 'chosen', 'rejected')
    if record['chosen'] == record['rejected']:
        raise BadRecord('chosen and rejected are the same')
    return {**record, 'texts': [record[field] for field in ('prompt', 'chosen', 'prompt', 'rejected')]}


def _of_class(record: Record, config: Data) -> Record:
    """The label is one of data.labels."""
    label = str(record['label'])
    if isinstance(record['label'], float) and not math.isfinite(record['label']):  # often a value that is missing
        raise BadRecord(f'label {label} is not finite')
    record = {**record, 'label': label}
    _filled(record, 'label', 'text', 'pair')
    if label != label.strip():
        raise BadRecord(f'label {_short(label)} begins or ends with white space')
    if config.labels and label not in config.labels:
        raise BadRecord(f'label {_short(label)} is not in data.labels{nearest(label, config.labels)}')
    return record


def _of_number(record: Record, config: Data) -> Record:
    """The label is a finite number within data.label_range."""
    try:
        if isinstance(record['label'], bool) or '_' in str(record['label']):  # Python would read these as numbers
            raise ValueError
        label = float(record['label'])
    except (ValueError, OverflowError):
        raise BadRecord(f'label {_short(record["label"])} is not a number') from None
    if not math.isfinite(label):
        raise BadRecord(f'label {label} is not finite')
    if config.label_range and not config.label_range[0] <= label <= config.label_range[1]:
        low, high = config.label_range
        raise BadRecord(f'label {label:g} is outside data.label_range, from {low:g} to {high:g}')
    _filled(record, 'text', 'pair')
    return {**record, 'label': label}


def _of_choices(record: Record, config: Data) -> Record:
    """The label is the number, from 0, of one of two choices or more."""
    _filled(record, 'context', 'choices')
    label, count = str(record['label']), len(record['choices'])
    if count < 2:
        raise BadRecord(f'choices are {count}: there must be two or more')
    if not label.isdecimal() or int(label) >= count:
        raise BadRecord(f'label {_short(record["label"])} is not the number of a choice, from 0 to {count - 1}')
    return {**record, 'label': int(label)}


def _of_similarity(record: Record, config: Data) -> Record:
    """As `_of_number`; without data.label_range the label is a cosine."""
    record = _of_number(record, config)
    if not config.label_range and abs(record['label']) > 1:
        raise BadRecord(f'label {record["label"]:g} is no cosine: data.label_range is not set, e.g. to 0,5')
    return {**record, 'texts': [record['text'], record['pair']]}


class TagForm:
    """The form of the tags of records, which the first of them decides: plain, as parts of speech, or `is_bio`."""

    def __init__(self) -> None:
        self._bio: bool | None = None

    def check(self, record: Record, config: Data) -> Record:
        """There is a tag for each token: one of data.labels, or of the types there, which are rewritten by `bio`."""
        tokens, tags = record['tokens'], record['tags']
        if not tokens:
            raise BadRecord('tokens are empty')
        for place, token in enumerate(tokens, start=1):
            if not token.strip():
                raise BadRecord(f'token {place} is empty')
        if len(tokens) != len(tags):
            raise BadRecord(f'{len(tokens)} tokens and {len(tags)} tags')
        if self._bio is False or not (self._bio or any(map(is_bio, tags))):
            for tag in tags:
                _check_plain(tag, config.labels)
            self._bio = False
            return record
        for tag in tags:
            check_tag(tag, config.labels)
        self._bio = True
        return {**record, 'tags': bio(tags)}


def is_bio(tag: str) -> bool:
    """Returns whether a tag is O, or begins as B-TYPE and I-TYPE do."""
    return tag == 'O' or tag[:2] in ('B-', 'I-')


def are_plain(tags: Iterable[str]) -> bool:
    """Returns whether there are tags, and none of them is of entities."""
    found = set(tags)
    return bool(found) and not any(map(is_bio, found))


def _check_plain(tag: str, labels: tuple[str, ...]) -> None:
    if is_bio(tag):
        raise BadRecord(f'tag {_short(tag)} is of entities, unlike the tags before')
    if not tag or tag != tag.strip():
        raise BadRecord(f'tag {_short(tag)} is empty, or begins or ends with white space')
    if labels and tag not in labels:
        raise BadRecord(f'tag {_short(tag)} is not in data.labels{nearest(tag, labels)}')


def check_tag(tag: str, types: tuple[str, ...]) -> None:
    """Raises `BadRecord` if a tag is not O, B-TYPE or I-TYPE, or its type is not in `types` (if there are any)."""
    if tag == 'O':
        return
    if not is_bio(tag) or not tag[2:] or tag != tag.strip():
        hint = nearest(tag, tags_of(types)) if types else ''
        raise BadRecord(f'tag {_short(tag)} is neither O nor B-TYPE nor I-TYPE{hint}')
    if types and tag[2:] not in types:
        raise BadRecord(f'tag {_short(tag)}: {_short(tag[2:])} is not in data.labels{nearest(tag[2:], types)}')


def bio(tags: list[str]) -> list[str]:
    """Returns the tags with B- at the beginning of each entity: an I- that does not continue its type becomes B-.

    This turns IOB1 (Ramshaw & Marcus 1995), where B- only separates neighbours of the same type, into BIO, and leaves
    BIO unchanged.
    """
    before = ['O', *tags]
    starts = [tag[:2] == 'I-' and last[2:] != tag[2:] for last, tag in zip(before, tags, strict=False)]
    return [f'B-{tag[2:]}' if start else tag for start, tag in zip(starts, tags, strict=True)]


def tags_of(types: tuple[str, ...]) -> tuple[str, ...]:
    """Returns all tags of these types in the order of their ids; O is the first."""
    return ('O', *(f'{prefix}-{kind}' for kind in types for prefix in 'BI'))


def _of_chat(record: Record, config: Data) -> Record:
    """The assistant says something."""
    roles = {message['role'] for message in record['messages']}
    if 'assistant' not in roles:
        raise BadRecord(f'no message of the assistant{nearest("assistant", sorted(roles))}')
    return record


def _of_answers(record: Record, config: Data) -> Record:
    """Each answer stands in the context at its start."""
    _filled(record, 'question', 'context')
    context = record['context']
    for start, answer in record['answers']:
        if not answer.strip():
            raise BadRecord('an answer is empty')
        if not 0 <= start < len(context):
            place = f'outside its context of {len(context)} characters'
            raise BadRecord(f'answer {_short(answer)} starts at {start}, {place}')
        present = context[start : start + len(answer)]
        if present != answer:
            places = [at for at in range(len(context)) if context.startswith(answer, at)]
            hint = f'; it stands at {min(places, key=lambda at: abs(at - start))}' if places else ''
            raise BadRecord(f'answer {_short(answer)} starts at {start}, where its context has {_short(present)}{hint}')
    return record


READERS: dict[str, Callable[[Any, str], Any]] = {  # of fields that are not text
    'label': _label,
    'tokens': _texts,
    'tags': _texts,
    'references': _texts,
    'choices': _texts,
    'negative': _one_or_more,
    'answers': _answers,
    'messages': messages,
}

CHECKS: dict[str, Callable[[Record, Data], Record]] = {  # by the form of the record, `config.tasks.RECORDS`
    'chat': _of_chat,
    'class': _of_class,
    'number': _of_number,
    'choices': _of_choices,
    'positive': _of_positive,
    'similarity': _of_similarity,
    'preference': _of_preference,
    'answers': _of_answers,
}
