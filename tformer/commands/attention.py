"""Writes the attention maps of a text as one HTML page.

    tformer attention --workdir=DIR [TEXT] [--input=FILE]

The page is WORKDIR/attention.html and needs no other file.
"""

import pathlib
from collections.abc import Sequence

from tformer import atomic, commands
from tformer.commands import texts as texts_lib
from tformer.commands.run import Run, opened
from tformer.config.tasks import TASKS
from tformer.errors import UserError
from tformer.evaluation import attention_maps

SHARED_FLAGS = ('workdir', 'checkpoint', 'input')
FLAGS: dict[str, commands.Flag] = {}
ARGUMENTS = 'TEXT'


def run(arguments: list[str], overrides: dict[str, str], flags: commands.Flags) -> None:
    loaded = Run.load(commands.needed(flags, 'workdir'), overrides, flags.checkpoint)
    print(attention(loaded, texts_lib.given(arguments, flags.input)))


def attention(run: Run | str | pathlib.Path, texts: Sequence[str]) -> pathlib.Path:
    """Writes the attention maps of the first text to attention.html in the workdir of a run; returns the file.

        >>> tformer.attention('runs/demo', ['transformer'])
        PosixPath('runs/demo/attention.html')

    The decoder of an encoder-decoder reads the text that the model itself generates.

    Raises:
      UserError: there is no text, it is too long, or the model is recurrent.
    """
    run = opened(run)
    if run.config.model.recurrence is not None:
        raise UserError(f'attention: model.recurrence={run.config.model.recurrence} has no attention maps')
    if not texts_lib.several(texts):
        raise UserError('attention: no text is given')
    target, source = run.tokenizers.target, run.tokenizers.source or run.tokenizers.target
    if run.config.model.family == 'encoder_decoder' and TASKS[run.config.train.objective].writes:
        outputs = run.generate(texts[:1])
        batch, title = run.batch(texts[:1], outputs), f'{texts[0]} → {outputs[0]}'
    else:
        batch, title = run.batch(texts[:1]), texts[0]
    maps = attention_maps.attention_probabilities(run.model, run.variables, batch)
    names = {
        name: list(map((source if name.startswith('encoder_') else target).piece, batch[name][0].tolist()))
        for name in batch
        if name.endswith('inputs')
    }
    file = run.workdir / 'attention.html'
    panels = attention_maps.panels(maps, 0, names['inputs'], names.get('encoder_inputs'))
    atomic.write(file, attention_maps.page(title, panels))
    return file
