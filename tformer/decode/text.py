"""Generates text from text: shared by `tformer generate` and the metrics of generated text."""

import itertools
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import linen as nn

from tformer.config import Config, Decode, tasks
from tformer.data.examples import infilling, special_tokens
from tformer.data.sources import fields
from tformer.data.sources.records import BadRecord
from tformer.data.tokenizers import biased_texts
from tformer.data.tokenizers.chat import Messages
from tformer.data.tokenizers.tokenizers import Tokenizers
from tformer.data.tokenizers.vocabulary import Tokenizer
from tformer.decode import risk
from tformer.decode.constraints import constraint
from tformer.decode.generate import Generate, make_generate, read_together, texts_of_row
from tformer.decode.rules import Rules
from tformer.errors import UserError

Place = Callable[[dict[str, np.ndarray]], Mapping[str, Any]]
Share = tuple[int, int]  # (number of a share, from 0; how many equal ones there are)


class Output(NamedTuple):
    """A text that was written."""

    text: str
    score: float  # the log-probability of its tokens, of a beam over the length penalty; of mbr, the expected utility
    length: int  # in tokens, with the one that ends it


class Writer(NamedTuple):
    """Writes texts for texts; `write` is to be called."""

    program: Generate
    read: Callable[[Sequence[str | Messages]], list[list[int]]]  # texts -> the tokens that the model reads
    batch: Callable[[Sequence[Sequence[int]], int], dict[str, np.ndarray]]  # (tokens, rows) -> a model's batch
    decode: Callable[[list[int]], str]  # tokens before the end -> the text
    ends: Sequence[int]
    banned: Sequence[int]  # tokens that are never generated
    pad: int  # of the texts that are read
    longest: int  # tokens that the model has room for in a prompt, or beside an encoder in a source
    decoding: Decode
    rules: Rules  # what is asked of the texts
    shares: bool = False  # whether tokens with which all texts begin may be read once for all of them

    def write(
        self,
        variables: Any,
        texts: Sequence[str | Messages],
        seed: int = 0,
        *,
        done: Container[int] = (),
        share: Share = (0, 1),
        multiple: int = 1,
        place: Place = dict,
    ) -> Iterator[tuple[int, list[Output]]]:
        """Yields the number of each text and what is written for it, best first, as batches are written.

        Texts whose numbers are `done` already are left out; those after them come out as they would have. Of the
        batches that are left a `share` is written. The rows of a batch are a `multiple`, and `place` puts it on
        devices.

        Raises:
          UserError: a text is longer than the model takes and may not be cut.
        """
        inputs = self.read(texts)
        shared = common(inputs) if self.shares and multiple == 1 else []
        order = sorted(range(len(inputs)), key=lambda i: len(inputs[i]))
        size = -(-min(self.decoding.batch_size, max(len(inputs), 1)) // multiple) * multiple
        batches = [order[start : start + size] for start in range(0, len(order), size)]
        left = [rows for rows in batches if not all(i in done for i in rows)]
        for rows in left[share[0] :: share[1]]:
            batch = self.batch([inputs[i] for i in rows], size)
            batch['rows'] = np.array([*rows, *[-1] * (size - len(rows))], np.int32)
            if shared:
                batch['shared'] = np.tile(np.array(shared, np.int32), (size, 1))
            tokens_RT, scores_R = jax.device_get(self.program(variables, place(batch), jax.random.key(seed)))
            n = texts_of_row(self.decoding)
            for row, i in enumerate(rows):
                found = slice(row * n, row * n + n)
                if i not in done:
                    yield i, self.outputs(tokens_RT[found], scores_R[found])

    def outputs(self, tokens_NT: np.ndarray, scores_N: np.ndarray) -> list[Output]:
        """Returns the outputs of a text by the tokens and the scores of what was written for it."""
        outputs = []
        for tokens, score in zip(tokens_NT, scores_N.tolist(), strict=True):
            ended = np.flatnonzero(np.isin(tokens, self.ends))
            length = int(ended[0]) + 1 if len(ended) else len(tokens)
            outputs.append(Output(self.decode(tokens[: length - bool(len(ended))].tolist()), score, length))
        if self.decoding.strategy != 'mbr':
            return [outputs[0], *(output for output in outputs[1:] if output.score > -np.inf)]  # a beam may find fewer
        texts = [output.text for output in outputs]
        worth = risk.expected_utilities(texts, risk.UTILITIES[self.decoding.utility]())
        places = risk.ranked(texts, worth)[: self.decoding.num_outputs]
        return [outputs[place]._replace(score=worth[place]) for place in places]


SHARED = 16  # tokens with which texts begin are shared in multiples of so many, as each number is compiled


def common(inputs: Sequence[list[int]]) -> list[int]:
    """Returns the tokens with which several rows begin, each of which has more of them."""
    if len(inputs) < 2:
        return []
    least, most = min(inputs), max(inputs)  # in the order of lists, so that the others lie between
    shortest = min(map(len, inputs)) - 1
    same = next((i for i, (a, b) in enumerate(zip(least, most, strict=False)) if a != b), shortest)
    return list(least[: min(same, shortest) // SHARED * SHARED])


def best(written: Iterable[tuple[int, list[Output]]]) -> list[str]:
    """Returns the best output for each text, in their order, of what a writer yields."""
    return [outputs[0].text for _, outputs in sorted(written)]


def check_writes(config: Config) -> None:
    """Raises a `UserError` where a model's family or objective does not write text."""
    if config.model.family == 'encoder':
        raise UserError('model.family=encoder does not generate text; valid: decoder, encoder_decoder')
    if not tasks.TASKS[config.train.objective].writes:
        valid = ', '.join(tasks.named('writes'))
        raise UserError(f'train.objective={config.train.objective} does not write text; valid: {valid}')


def make_writer(
    model: nn.Module, config: Config, tokenizers: Tokenizers, *, cut: bool, draft: nn.Module | None = None
) -> Writer:
    """Returns what writes text for text with a run's model.

    For objectives that write one text for another, the texts are the sources. Otherwise they are prompts, and the
    output is their continuation, or where decode.gap stands in one, what is missing there (objectives with a `gap`). In
    place of a text may stand the messages of a chat, to which a decoder replies.

    With `cut`, texts that are too long are shortened: sources lose their end, prompts and chats their beginning. A
    `draft` is as in `make_generate`.

    Raises:
      UserError: the model's family or objective does not write text.
    """
    check_writes(config)
    target = tokenizers.target
    eos, *others = ends = tokenizers.ends(config)
    nothing = [*np.flatnonzero(~target.ordinary).tolist(), *range(target.vocab_size, config.model.vocab_size or 0)]
    banned = [index for index in nothing if index not in ends]  # which may be the padding or BOS as well
    rules = rules_of(config, tokenizers)
    return Writer(
        make_generate(model, config.decode, eos=eos, banned=banned, others=others, rules=rules, draft=draft),
        _reader(config, tokenizers, cut),
        _batcher(config, tokenizers),
        target.decode,
        ends,
        banned,
        _input_side(config, tokenizers).specials.pad,
        longest_input(config)[0],
        config.decode,
        rules,
        shares=_shares(config),
    )


def rules_of(config: Config, tokenizers: Tokenizers) -> Rules:
    """Returns the biases of a run's texts, and their form.

    Raises:
      UserError: the vocabulary lacks what they need, or no text of the form has at most decode.max_len tokens.
    """
    target, ends = tokenizers.target, tokenizers.ends(config)
    form = constraint(config.decode, target, ends, config.model.vocab_size or target.vocab_size)
    return Rules(constraint=form, bias=biased_texts.of_tokens(config.decode.bias, target))


def _shares(config: Config) -> bool:
    """Returns whether the beginnings of a run's prompts can be read apart from the rest of them."""
    return config.model.family == 'decoder' and config.decode.guidance == 1 and read_whole(config) is None


def read_whole(config: Config) -> str | None:
    """Returns the choice by which the tokens of a run's prompts must be read together, or None."""
    if special_tokens.marks_prefix(config):
        return 'data.bidirectional_prefix=True'
    return read_together(config.model)


def _reader(config: Config, tokenizers: Tokenizers, cut: bool) -> Callable[[Sequence[str | Messages]], list[list[int]]]:
    """Returns texts -> the tokens that the model reads for each, with those around them."""
    paired, given = config.model.family == 'encoder_decoder', tasks.TASKS[config.train.objective].given
    longest, limit = longest_input(config)
    template = special_tokens.template_of(config, tokenizers)
    around = template.given if paired or given else template.prompt
    room = longest - (len(around([0])) - 1)
    gap = config.decode.gap if tasks.TASKS[config.train.objective].gap else None

    def framed(text: str, tokens: list[int]) -> list[int]:
        if len(tokens) > room and not cut:
            raise UserError(f'{text[:40]!r}... has {len(tokens)} tokens, the model takes {room} ({limit})')
        return around(tokens[:room]) if paired or given else around(tokens)[-longest:]

    def replied(chat: Messages) -> list[int]:
        tokens = _chat(chat, tokenizers, config)
        if not tokens:
            raise UserError('a chat has no tokens: its template writes nothing')
        if len(tokens) > longest and not cut:
            raise UserError(f'a chat has {len(tokens)} tokens, the model takes {longest} ({limit})')
        return tokens[-longest:]

    def filled(text: str, parts: list[list[int]]) -> list[int]:
        if len(parts) == 1:
            return framed(text, parts[0])
        if len(parts) > 2:
            raise UserError(f'{text[:40]!r}... has {len(parts) - 1} times {gap} (decode.gap), not once')
        prefix, suffix = parts
        most = room if cut else len(prefix) + len(suffix) + room
        return framed(text, infilling.prompt(tokenizers.target, prefix, suffix, most))

    def pieces_of(text: str | Messages) -> list[str]:
        if not isinstance(text, str):
            return []
        return text.split(gap) if gap is not None else [text]

    def read(texts: Sequence[str | Messages]) -> list[list[int]]:
        pieces = [pieces_of(text) for text in texts]
        encoded = iter(_input_side(config, tokenizers).encode_batch(list(itertools.chain(*pieces))))
        return [
            filled(text, list(itertools.islice(encoded, len(own)))) if isinstance(text, str) else replied(text)
            for text, own in zip(texts, pieces, strict=True)
        ]

    return read


def _batcher(config: Config, tokenizers: Tokenizers) -> Callable[[Sequence[Sequence[int]], int], dict[str, np.ndarray]]:
    """Returns (the tokens of each text, rows) -> a batch."""
    paired, whole = config.model.family == 'encoder_decoder', special_tokens.marks_prefix(config)
    longest, _ = longest_input(config)
    front = special_tokens.template_of(config, tokenizers).front

    def batched(inputs: Sequence[Sequence[int]], rows: int) -> dict[str, np.ndarray]:
        batch = _batch(inputs, rows, longest, _input_side(config, tokenizers).specials.pad, paired)
        if paired:
            batch |= _decoder_prompt(front, batch['encoder_positions'], tokenizers.target.specials.pad)
        if whole:
            batch['prefix'] = batch['positions'] >= 0
        return batch

    return batched


def _input_side(config: Config, tokenizers: Tokenizers) -> Tokenizer:
    """Returns the tokenizer of the texts that are read."""
    return (config.model.family == 'encoder_decoder' and tokenizers.source) or tokenizers.target


def _chat(messages: Messages, tokenizers: Tokenizers, config: Config) -> list[int]:
    """Returns the ids of a chat that is to be replied to."""
    if not tokenizers.talk(config):
        needed = 'a decoder that was imported with a chat template, or trained with train.objective=chat'
        raise UserError(f'the run has no chat template; chats need {needed}')
    try:
        return tokenizers.chat.prompt(fields.messages(messages, 'messages'), tokenizers.target)
    except BadRecord as error:
        raise UserError(str(error)) from error


def longest_input(config: Config) -> tuple[int, str]:
    """Returns the largest number of tokens that are read, special tokens included, and the fields that limit it.

    Raises:
      UserError: new tokens leave no room for a prompt.
    """
    room = config.model.max_len + 1 - config.decode.max_len
    given, read_at_most = tasks.TASKS[config.train.objective].given, config.data.encoder_length or config.data.length
    if config.model.family == 'encoder_decoder' or (given and read_at_most <= room):
        return read_at_most, 'data.encoder_length'
    if room < 1:
        raise UserError(
            f'decode.max_len={config.decode.max_len} leaves no room for a prompt in '
            f'model.max_len={config.model.max_len}'
        )
    return room, 'model.max_len - decode.max_len'


def _batch(inputs: Sequence[Sequence[int]], rows: int, longest: int, pad: int, paired: bool) -> dict[str, np.ndarray]:
    """Returns a batch of prompts padded in front; for an encoder-decoder, of sources padded behind.

    Lengths are rounded up to a multiple of 16, at most `longest`.
    """
    length = min(-(-max(map(len, inputs)) // 16) * 16, longest)
    tokens = np.full((rows, length), pad, np.int32)
    positions = np.full((rows, length), -1, np.int32)
    for row, sequence in enumerate(inputs):
        where = slice(0, len(sequence)) if paired else slice(length - len(sequence), length)
        tokens[row, where] = sequence
        positions[row, where] = np.arange(len(sequence))
    stack = 'encoder_' if paired else ''
    return {f'{stack}inputs': tokens, f'{stack}positions': positions}


def _decoder_prompt(front: Sequence[int], encoder_positions_BT: np.ndarray, pad: int) -> dict[str, np.ndarray]:
    """Returns the tokens that a decoder starts from in each row that has a source, [B, len(front)]."""
    used = encoder_positions_BT[:, :1] >= 0
    return {
        'inputs': np.where(used, front, pad).astype(np.int32),
        'positions': np.where(used, np.arange(len(front)), -1).astype(np.int32),
    }
