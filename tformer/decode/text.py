"""Generates text from text: shared by `tformer generate` and the metrics of generated text."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from flax import linen as nn

from tformer.config import Config, tasks
from tformer.data.examples import special_tokens
from tformer.data.sources import fields
from tformer.data.sources.records import BadRecord
from tformer.data.tokenizers.chat import Messages
from tformer.data.tokenizers.tokenizers import Tokenizers
from tformer.decode.constraints import constraint
from tformer.decode.generate import make_generate
from tformer.errors import UserError

TextGenerator = Callable[..., list[str]]


def make_text_generator(model: nn.Module, config: Config, tokenizers: Tokenizers, *, cut: bool) -> TextGenerator:
    """Returns generate(variables, texts, seed=0) -> the best output for each text, in order.

    For objectives that write one text for another, the texts are the sources. Otherwise they are prompts, and the
    output is their continuation. In place of a text may stand the messages of a chat, to which a decoder replies.

    With `cut`, texts that are too long are shortened: sources lose their end, prompts and chats their beginning.

    Raises:
      UserError: the model's family does not generate; on a call, a text that is too long and may not be cut.
    """
    if config.model.family == 'encoder':
        raise UserError('model.family=encoder does not generate text; valid: decoder, encoder_decoder')
    task = tasks.TASKS[config.train.objective]
    if not task.writes:
        valid = ', '.join(tasks.named('writes'))
        raise UserError(f'train.objective={config.train.objective} does not write text; valid: {valid}')
    decode, paired, given = config.decode, config.model.family == 'encoder_decoder', task.given
    whole = task.prefix and config.data.bidirectional_prefix and not paired
    target = tokenizers.target
    eos, *others = ends = tokenizers.ends(config)
    nothing = [*np.flatnonzero(~target.ordinary).tolist(), *range(target.vocab_size, config.model.vocab_size or 0)]
    banned = [index for index in nothing if index not in ends]  # which may be the padding or BOS as well
    asked = constraint(decode, target, ends, config.model.vocab_size or target.vocab_size)
    generate = make_generate(model, decode, eos=eos, banned=banned, others=others, constraint=asked)
    longest, limit = _longest_input(config, given)
    tokenizer = (tokenizers.source if paired else None) or target
    template = special_tokens.template_of(config, tokenizers)
    around = template.given if paired or given else template.prompt
    room = longest - (len(around([0])) - 1)

    def framed(text: str, tokens: list[int]) -> list[int]:
        if len(tokens) > room and not cut:
            raise UserError(f'{text[:40]!r}... has {len(tokens)} tokens, the model takes {room} ({limit})')
        return around(tokens[:room]) if paired or given else around(tokens)[-longest:]

    def replied(chat: Messages) -> list[int]:
        tokens = _chat(chat, tokenizers, config)
        if len(tokens) > longest and not cut:
            raise UserError(f'a chat has {len(tokens)} tokens, the model takes {longest} ({limit})')
        return tokens[-longest:]

    def generated(variables: Any, texts: Sequence[str | Messages], seed: int = 0) -> list[str]:
        encoded = iter(tokenizer.encode_batch([text for text in texts if isinstance(text, str)]))
        inputs = [framed(text, next(encoded)) if isinstance(text, str) else replied(text) for text in texts]
        order = sorted(range(len(inputs)), key=lambda i: len(inputs[i]))
        outputs = [''] * len(inputs)
        size = min(decode.batch_size, max(len(inputs), 1))
        for start in range(0, len(order), size):
            rows = order[start : start + size]
            batch = _batch([inputs[i] for i in rows], size, longest, tokenizer.specials.pad, paired)
            if paired:
                batch |= _decoder_prompt(template.front, batch['encoder_positions'], target.specials.pad)
            if whole:
                batch['prefix'] = batch['positions'] >= 0
            batch['rows'] = np.array([*rows, *[-1] * (size - len(rows))], np.int32)
            tokens_BT, _ = generate(variables, batch, jax.random.key(seed))
            for i, tokens in zip(rows, np.asarray(tokens_BT), strict=False):
                ended = np.flatnonzero(np.isin(tokens, ends))
                outputs[i] = target.decode(tokens[: ended[0] if len(ended) else None].tolist())
        return outputs

    return generated


def _chat(messages: Messages, tokenizers: Tokenizers, config: Config) -> list[int]:
    """Returns the ids of a chat that is to be replied to."""
    if not tokenizers.talk(config):
        needed = 'a decoder that was imported with a chat template, or trained with train.objective=chat'
        raise UserError(f'the run has no chat template; chats need {needed}')
    try:
        return tokenizers.chat.prompt(fields.messages(messages, 'messages'), tokenizers.target)
    except BadRecord as error:
        raise UserError(str(error)) from error


def _longest_input(config: Config, given: bool) -> tuple[int, str]:
    """Returns the largest number of tokens that are read, special tokens included, and the fields that limit it."""
    room = config.model.max_len + 1 - config.decode.max_len
    read_at_most = config.data.encoder_length or config.data.length
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
