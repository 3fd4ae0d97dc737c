"""The timetable of a pipeline, played through by hand: parts go from stage to stage, round after round."""

import jax.numpy as jnp
import numpy as np
import pytest

from tformer.layers.parallel.pipeline_stages import Timetable


@pytest.mark.parametrize(
    ('stages', 'parts', 'rounds'), [(2, 4, 1), (4, 4, 1), (2, 4, 2), (2, 6, 3), (4, 8, 2), (3, 3, 2)]
)
def test_every_part_passes_through_all_layers_in_their_order(stages, parts, rounds):
    """Blocks of layers are numbered in order: stage s computes block r stages + s in round r. A part carries the list
    of the blocks that it has passed."""
    table = Timetable(stages, parts, rounds)
    inbox: list = [[] for _ in range(stages)]
    outputs = []
    for time in range(stages + table.turns - 1):
        sent = []
        for stage in range(stages):
            round_, part, begins = (int(x) for x in table.at(jnp.array(time), jnp.array(stage)))
            carried = [part] if begins else inbox[stage]
            sent.append([*carried, round_ * stages + stage])
        inbox = [sent[-1], *sent[:-1]] if rounds > 1 else [[], *sent[:-1]]
        outputs.append(sent[-1])
    done = {output[0]: output[1:] for output in outputs if len(output) == stages * rounds + 1}
    assert done == {part: list(range(stages * rounds)) for part in range(parts)}

    length = max(map(len, outputs))
    numbers = np.array([[*output, *[-1] * (length - len(output))] for output in outputs])
    ended = np.asarray(table.ended(jnp.asarray(numbers)))
    assert ended.tolist() == [[part, *range(stages * rounds)] for part in range(parts)]
