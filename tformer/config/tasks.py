"""The training objectives: one row holds every fact of an objective. Losses, formats and judges stand in their own
tables (`objectives.LOSSES`, `example_formats.FORMATS`, `scorer.JUDGES`) and are named here by their keys.

An objective on an existing record form, example format, head and loss is one more row of `TASKS`.
"""

from typing import NamedTuple

EVERY_FAMILY = ('encoder', 'decoder', 'encoder_decoder')


class RecordForm(NamedTuple):
    """The fields of one record of the data."""

    fields: tuple[str, ...]  # names of the required fields, in the order of a file's columns
    optional: tuple[str, ...] = ()  # names of further fields that a record may have
    labelled: bool = False  # records carry an annotation, so errors cite the file and the line (`where`)
    held_out_by: str = 'text'  # the field whose hash decides a record's split where a source has no splits


RECORDS: dict[str, RecordForm] = {
    'text': RecordForm(('text',)),
    'pair': RecordForm(('source', 'target'), ('references',), held_out_by='source'),
    'chat': RecordForm(('messages',), labelled=True, held_out_by='messages'),
    'class': RecordForm(('label', 'text'), ('pair',), labelled=True),
    'number': RecordForm(('label', 'text'), ('pair',), labelled=True),
    'positive': RecordForm(('text', 'positive'), ('negative',), labelled=True),
    'similarity': RecordForm(('label', 'text', 'pair'), labelled=True),
    'choices': RecordForm(('context', 'choices', 'label'), labelled=True, held_out_by='context'),
    'preference': RecordForm(('prompt', 'chosen', 'rejected'), labelled=True, held_out_by='prompt'),
    'tags': RecordForm(('tokens', 'tags'), labelled=True, held_out_by='tokens'),
    'answers': RecordForm(('question', 'context', 'answers'), labelled=True, held_out_by='context'),
}


class Head(NamedTuple):
    """Facts about the end of a model that an objective scores. `layers.outputs.HEADS` has its modules."""

    per_row: tuple[str, ...] = ()  # names of the parameters that the head adds and that see one vector of each row
    per_token: tuple[str, ...] = ()  # names of the parameters that the head adds and that see every token
    vocabulary: bool = False  # whether the outputs include logits over the vocabulary
    pools: bool = False  # whether the vectors of texts are their tokens', pooled

    @property
    def drops(self) -> bool:
        """Whether model.head_dropout_rate has layers that it stands before."""
        return bool(self.per_row or self.per_token) and not self.vocabulary


HEADS: dict[str, Head] = {
    'tokens': Head(vocabulary=True),
    'class': Head(per_row=('pooler', 'class_head'), pools=True),
    'number': Head(per_row=('pooler', 'number_head'), pools=True),
    'choice': Head(per_row=('pooler', 'choice_head'), pools=True),
    'tags': Head(per_token=('tag_head',)),
    'spans': Head(per_token=('span_head',)),
    'sentences': Head(per_row=('pooler', 'sentence_head'), vocabulary=True, pools=True),
    'vectors': Head(pools=True),
    'comparison': Head(pools=True),
    'detection': Head(per_token=('generator', 'detection_head'), vocabulary=True),
}


class Task(NamedTuple):
    """A training objective."""

    records: str  # what a record of the data holds, a key of `RECORDS`
    format: str  # how a record becomes an example, a key of `example_formats.FORMATS`
    two_stack_format: str | None = None  # the same for the family encoder_decoder, where that differs
    families: tuple[str, ...] = EVERY_FAMILY  # the model families that can be trained on it
    head: str = 'tokens'  # what the model ends in, a key of `HEADS`
    loss: str = 'tokens'  # a key of `objectives.LOSSES`
    second_weight: float = 1.0  # the weight of the second loss, for losses that have one
    judge: str | None = None  # the metrics that need every prediction of a split, a key of `scorer.JUDGES`
    writes: bool = False  # the trained model generates text
    given: bool = False  # the generated text follows another text that is given, as a translation follows its source
    prefix: bool = False  # the text before the generated one may be seen bidirectionally (data.bidirectional_prefix)
    gap: bool = False  # the generated text may be the middle of another, where decode.gap stands
    running_text: bool = False  # a record is a document, each token of which is scored once, as bits per byte need
    teacher: bool = False  # the outputs of a second, frozen model (train.teacher) are part of the loss
    classes: str | tuple[str, ...] = ()  # names of the classes; 'label' or 'tags': the data's labels or tags

    @property
    def fields(self) -> tuple[str, ...]:
        """The required fields of a record."""
        return RECORDS[self.records].fields

    @property
    def optional(self) -> tuple[str, ...]:
        """The optional fields of a record."""
        return RECORDS[self.records].optional

    @property
    def labelled(self) -> bool:
        """Whether records carry an annotation."""
        return RECORDS[self.records].labelled

    @property
    def in_pairs(self) -> bool:
        """Whether a record has a source and a target."""
        return 'source' in self.fields

    @property
    def classes_from_data(self) -> bool:
        """Whether the data decide how many classes there are."""
        return isinstance(self.classes, str)


_ENCODER = ('encoder',)
_ONE_STACK = ('encoder', 'decoder')


def _text_to_text(records: str, format: str) -> Task:
    families = 'encoder_decoder', 'decoder'
    return Task(records, format, families=families, writes=True, given=True, prefix=True)


NEXT_SENTENCE = ('is_next', 'not_next')  # the classes of a pair of sentences, by id
SENTENCE_ORDER = ('in_order', 'swapped')

TASKS: dict[str, Task] = {
    # Radford et al. 2018
    'causal_lm': Task('text', 'next_token', families=('decoder',), writes=True, running_text=True),
    # Ouyang et al. 2022, section 3.5: answers of the assistant, given the messages before them
    'chat': Task('chat', 'chat', families=('decoder',), writes=True),
    # Devlin et al. 2019, section 3.1; with next-sentence prediction; with Lan et al. 2020's sentence order instead
    'masked_lm': Task('text', 'unmask', families=_ENCODER),
    'masked_lm_nsp': Task(
        'text', 'unmask_next', families=_ENCODER, head='sentences', loss='sentences', judge='sentences',
        classes=NEXT_SENTENCE,
    ),
    'masked_lm_sop': Task(
        'text', 'unmask_order', families=_ENCODER, head='sentences', loss='sentences', judge='sentences',
        classes=SENTENCE_ORDER,
    ),
    # Clark et al. 2020
    'replaced_token': Task(
        'text', 'unmask', families=_ENCODER, head='detection', loss='detection', second_weight=50.0
    ),
    # Vaswani et al. 2017
    'seq2seq': _text_to_text('pair', 'translate'),
    # Devlin et al. 2019, sections 4.1 (STS-B for regression), 4.4, 5.3 and 4.2
    'classification': Task('class', 'class', head='class', loss='labels', judge='classes', classes='label'),
    'regression': Task('number', 'number', head='number', loss='numbers', judge='numbers'),
    'multiple_choice': Task('choices', 'choices', families=_ONE_STACK, head='choice', loss='choices'),
    'token_classification': Task('tags', 'tags', head='tags', loss='tags', judge='tags', classes='tags'),
    'question_answering': Task('answers', 'answer', head='spans', loss='spans', judge='answers'),
    # Henderson et al. 2017, section 4.4; Gao et al. 2021, section 3; Reimers & Gurevych 2019, section 3
    'contrastive': Task(
        'positive', 'texts', families=_ONE_STACK, head='comparison', loss='contrastive', judge='retrieval'
    ),
    'simcse': Task('text', 'text_twice', families=_ONE_STACK, head='comparison', loss='contrastive'),
    'cosine_similarity': Task(
        'similarity', 'scored_texts', families=_ONE_STACK, head='vectors', loss='cosines', judge='numbers'
    ),
    # Rafailov et al. 2023, eq. 7; Azar et al. 2024, eq. 17
    'dpo': Task('preference', 'preferred', families=('decoder',), loss='dpo', writes=True, teacher=True),
    'ipo': Task('preference', 'preferred', families=('decoder',), loss='ipo', writes=True, teacher=True),
    # Raffel et al. 2020, section 3.2.1
    'prefix_lm': Task(
        'text', 'continue_prefix', 'continue_text', ('decoder', 'encoder_decoder'), writes=True, prefix=True
    ),
    # Raffel et al. 2020, section 3.1.4
    'span_corruption': _text_to_text('text', 'fill_spans'),
    # Lewis et al. 2020, section 2.2
    'denoising': _text_to_text('text', 'denoise'),
    # Tay et al. 2023, section 3.1
    'ul2': _text_to_text('text', 'ul2'),
    # Bavarian et al. 2022, section 3
    'fill_in_middle': Task('text', 'fill_in_middle', families=('decoder',), writes=True, gap=True),
}  # fmt: skip

# Hinton et al. 2015; Sanh et al. 2019
DISTILLED = (
    *('causal_lm', 'masked_lm', 'seq2seq'),
    *('classification', 'regression', 'token_classification', 'question_answering'),
)
TASKS |= {f'{name}_distilled': TASKS[name]._replace(teacher=True) for name in DISTILLED}


def named(fact: str) -> tuple[str, ...]:
    """Returns the names of all objectives of which a fact, e.g. 'writes' or 'in_pairs', is true."""
    return tuple(name for name, task in TASKS.items() if getattr(task, fact))


def with_records(*forms: str) -> tuple[str, ...]:
    """Returns the names of all objectives on these forms of records, in the order of the forms."""
    return tuple(name for form in forms for name, task in TASKS.items() if task.records == form)


def head_parameters() -> tuple[str, ...]:
    """Returns the first names of the parameters that heads add to a model; its other parts are the same for all."""
    return tuple(dict.fromkeys(name for head in HEADS.values() for name in (*head.per_row, *head.per_token)))
