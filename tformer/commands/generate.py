"""Generates text from prompts or source texts.

    tformer generate --workdir=DIR [TEXT ...] [--input=FILE] [--seed=0] [--config.decode.strategy=beam ...]

The texts are the arguments, else the lines of --input, else those of standard input. Each output is printed.
"""

import pathlib
import sys
from collections.abc import Sequence

from tformer import commands
from tformer.commands import texts as texts_lib
from tformer.commands.run import Run, opened

SHARED_FLAGS = ('workdir', 'checkpoint', 'input')
FLAGS = {'seed': ('int', 0, 'the seed of sampling')}
ARGUMENTS = 'TEXT'


def run(arguments: list[str], overrides: dict[str, str], flags: commands.Flags) -> None:
    loaded = Run.load(commands.needed(flags, 'workdir'), overrides, flags.checkpoint)
    texts = texts_lib.given(arguments, flags.input)
    reader = loaded.tokenizers.target if loaded.config.model.family == 'decoder' else loaded.tokenizers.source
    if unknown := (reader or loaded.tokenizers.target).unknown(texts):
        shown = ' '.join(map(repr, unknown[:10])) + ' ...' * (len(unknown) > 10)
        print(f'training had none of these, so the output means little: {shown}', file=sys.stderr, flush=True)
    for text in generate(loaded, texts, flags.seed):
        print(text)


def generate(run: Run | str | pathlib.Path, texts: Sequence[str], seed: int = 0, *, cut: bool = False) -> list[str]:
    """Returns the output of a run, or of the run in a workdir, for each text: the continuation of a prompt, or the text
    written for a source.

        >>> tformer.generate('runs/demo', ['transformer'])
        ['T R AE N S F AO R M ER']

    `seed` is that of sampling (config.decode.strategy='sample'). With `cut`, texts longer than the model takes are
    shortened.

    Raises:
      UserError: the family does not generate, or a text is too long and `cut` is False.
    """
    return opened(run).generate(texts, seed, cut=cut)
