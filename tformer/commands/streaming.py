"""Texts that a terminal shows as they grow."""

import functools
from collections.abc import Iterator, Sequence

import numpy as np

from tformer.commands import row_writer
from tformer.commands.run import Run
from tformer.commands.serving.scheduler import Text
from tformer.data.tokenizers.chat import Messages
from tformer.decode.drawing import drawing_of, unknown
from tformer.decode.text import make_writer
from tformer.distributed import meshes, sharding
from tformer.model import for_steps, quantized


def streams(run: Run) -> bool:
    """Returns whether a run's texts can be shown as they grow: greedy ones and plain draws, one of each."""
    decode = run.config.decode
    single = decode.num_outputs == 1 and decode.draft is None and run.draft is None
    return single and not unknown(decode) and run.config.model.recurrence is None


def stream(run: Run, texts: Sequence[str | Messages], seed: int) -> Iterator[Iterator[str]]:
    """Yields for each text the pieces that are written for it, which together are what `run.generate` returns."""
    decode = run.config.decode
    writer, batch, engine = row_writer.make(run, 1)[:3]
    variables = for_steps(run.model.cfg, quantized(run.model, run.variables, decode.quantization))
    read = make_writer(run.model, run.config, run.tokenizers, cut=False).read(texts)  # with room for decode.max_len
    drawing = drawing_of(decode, seed)
    place = functools.partial(sharding.placed, meshes.make_mesh(run.config.mesh), run.config.mesh)
    with place():
        slots = engine.empty(variables)
    for number, tokens in enumerate(read):
        with place():
            slots = engine.insert(variables, slots, batch(tokens), np.int32(0), drawing._replace(row=number))

        def pieces() -> Iterator[str]:
            nonlocal slots
            text = Text(decode.max_len, (), writer.decode, writer.ends)
            finish = None
            while finish is None:
                with place():
                    slots, tokens_B, logprobs_B = engine.step(variables, slots)
                new, _, finish, _ = text.add(int(tokens_B[0]), float(logprobs_B[0]))
                yield new

        yield pieces()
        with place():
            slots = engine.free(slots, np.int32(0))
