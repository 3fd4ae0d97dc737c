"""Caches of prompts that were read, from which later prompts with the same beginning go on.

Which part of a prompt another one shares is not asked for by a length: every beginning of a kept one serves, and what
is behind it is read, padded to one of the lengths of all prompts. Texts are those of prompts that are read whole, but
for rounding.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tformer.decode import buckets
from tformer.decode.drawing import Drawing
from tformer.decode.engine import Engine, Slots


@dataclasses.dataclass(eq=False)
class Kept:
    """A prompt that was read."""

    tokens: list[int]  # but its last
    cache: Any


class KeptPrompts:
    """Keeps the `most` prompts that were used last, each in the memory of a row of the engine."""

    def __init__(self, engine: Engine, most: int) -> None:
        self.engine, self.most = engine, most
        self.prompts: list[Kept] = []  # that was used last behind the others
        self.given, self.kept = 0, 0  # tokens of prompts so far, and those of them that were not read again

    def keeping(self) -> Engine:
        """Returns the engine whose prompts are kept; of free rows anew it keeps nothing."""
        return self.engine._replace(empty=self._empty, insert=self._insert)

    def compile(self, variables: Any, slots: Slots, batch: Mapping[str, Any], row: Any, drawing: Drawing) -> Slots:
        """Inserts a prompt that is not kept, by both programs of its padded length."""
        assert self.engine.resume is not None
        slots, cache = self.engine.resume(variables, slots, batch, row, drawing, None, np.int32(0))
        return self.engine.resume(variables, slots, batch, row, drawing, cache, np.int32(0))[0]

    def _empty(self, variables: Any) -> Slots:
        self.prompts.clear()
        return self.engine.empty(variables)

    def _insert(self, variables: Any, slots: Slots, batch: Mapping[str, Any], row: Any, drawing: Drawing) -> Slots:
        assert self.engine.resume is not None
        size, tokens = batch['inputs'].shape[1], batch['inputs'][0][batch['positions'][0] >= 0].tolist()
        used, number = self._longest(tokens, len(tokens) - slots.recent_BK.shape[1])
        width = buckets.length(len(tokens) - number, size)
        if width == size:  # as much would be read
            used, number = None, 0
        batch = {**batch, **{name: batch[name][:, -width:] for name in ('inputs', 'positions')}}
        batch['positions'] = np.where(batch['positions'] < number, -1, batch['positions'])
        cache = None if used is None else used.cache
        slots, made = self.engine.resume(variables, slots, batch, row, drawing, cache, np.int32(number))
        self.given, self.kept = self.given + len(tokens), self.kept + number
        if size > buckets.length(1, size):  # of a shorter one there is nothing to save
            self._keep(used, number, Kept(tokens[:-1], made))
        return slots

    def _longest(self, tokens: Sequence[int], most: int) -> tuple[Kept | None, int]:
        """Returns the kept prompt that begins with the most of some tokens, at most so many, and with how many."""
        found = [(max(min(_same(kept.tokens, tokens), most), 0), kept) for kept in self.prompts]
        number, used = max(found, key=lambda pair: pair[0], default=(0, None))
        return used, number

    def _keep(self, used: Kept | None, number: int, new: Kept) -> None:
        """Keeps a prompt of which so many tokens are those of a kept one, which it replaces where that is all of it.

        Where most of it is kept already, as of a system prompt with another question, the kept one stays instead.
        """
        if used is not None:
            self.prompts.remove(used)
            if number < len(used.tokens):
                self.prompts.append(used)
                if 2 * number >= len(new.tokens):
                    return
        self.prompts = [*self.prompts, new][-self.most :]


def _same(tokens: Sequence[int], others: Sequence[int]) -> int:
    """Returns with how many equal tokens two sequences begin."""
    alike = enumerate(zip(tokens, others, strict=False))
    return next((i for i, (a, b) in alike if a != b), min(len(tokens), len(others)))
