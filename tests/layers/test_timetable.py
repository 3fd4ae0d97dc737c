"""The timetable of a pipeline, played through by hand: parts go from stage to stage, round after round."""

import itertools

import jax.numpy as jnp
import pytest

from tformer.layers.parallel.pipeline_turns import Timetable


@pytest.mark.parametrize(
    ('stages', 'parts', 'rounds'), [(2, 4, 1), (4, 4, 1), (2, 4, 2), (2, 6, 3), (4, 8, 2), (3, 3, 2)]
)
def test_every_part_passes_through_all_layers_in_their_order(stages, parts, rounds):
    """Blocks of layers are numbered in order: stage s computes block r stages + s in round r. A part carries the list
    of the blocks that it has passed."""
    table = Timetable(stages, parts, rounds)
    inbox: list = [[] for _ in range(stages)]
    done, turns = {}, [set() for _ in range(stages)]
    for time in range(table.ticks):
        sent = []
        for stage in range(stages):
            turn = table.at(jnp.array(time), jnp.array(stage))
            carried = [int(turn.part)] if turn.begins else inbox[stage]
            sent.append([*carried, int(turn.round) * stages + stage] if turn.active else [])
            assert bool(turn.active) == (stage <= time < stage + table.turns)
            turns[stage] |= {(int(turn.number), int(turn.round), int(turn.part))}
        if turn.active:
            done[int(turn.part)] = sent[-1]
        inbox = [sent[-1], *sent[:-1]] if rounds > 1 else [[], *sent[:-1]]
    assert done == {part: [part, *range(stages * rounds)] for part in range(parts)}
    for each in turns:
        assert sorted(number for number, _, _ in each) == list(range(table.turns))
        assert {(round_, part) for _, round_, part in each} == set(itertools.product(range(rounds), range(parts)))
