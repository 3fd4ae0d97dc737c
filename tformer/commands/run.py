"""A trained run: load it, apply its model, generate, evaluate, and read or replace its activations."""

import dataclasses
import pathlib
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import linen as nn

from tformer import checks
from tformer import config as config_lib
from tformer.commands import scoring, text_batches
from tformer.commands import texts as texts_lib
from tformer.config import Config
from tformer.config import extensions as extensions_lib
from tformer.data.tokenizers.chat import Messages
from tformer.data.tokenizers.tokenizers import Tokenizers
from tformer.decode.generate import STRATEGIES, read_together
from tformer.decode.text import Output, Share, best
from tformer.distributed import meshes, sharding
from tformer.errors import UserError, choose
from tformer.evaluation import activations as activations_lib
from tformer.model import build, quantized
from tformer.objectives import OBJECTIVES
from tformer.optim.parameters import path_names
from tformer.training import checkpoint, writers
from tformer.training import workdir as workdir_lib
from tformer.training.state import count_parameters


@dataclasses.dataclass(frozen=True, repr=False)
class Run:
    """A trained run, with the parameters of one checkpoint or the mean of several.

        >>> run = tformer.load_run('runs/demo')
        >>> run
        Run('runs/demo', step=2600, family='encoder_decoder', parameters=940,416)
        >>> run.generate(['transformer'])
        >>> logits = run.apply(run.batch(['transformer'], ['T R AE N S']))

    Attributes:
      workdir: its directory.
      config: resolved.
      tokenizers: of both sides.
      variables: what `model.apply` takes: `params`, and `statistics` if the model keeps some.
      step: the number of updates behind the parameters.
      draft: a smaller run that drafts tokens; None: none does.
      chosen: how the parameters are others than those of the best checkpoint: {'checkpoint': 'latest'}, or {'average':
        the number of checkpoints}.
    """

    workdir: pathlib.Path
    config: Config
    tokenizers: Tokenizers
    variables: dict[str, Any]
    step: int
    draft: 'Run | None' = None
    chosen: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @classmethod
    def load(
        cls,
        workdir: str | pathlib.Path,
        overrides: Mapping[str, str] | None = None,
        which: str = 'best',
        average: int | None = None,
        placed: bool = False,
        extensions: Sequence[str] = (),
        headless: bool = False,
        draft: str | pathlib.Path | None = None,
    ) -> 'Run':
        """Returns the run of a workdir with its best or latest parameters, or the mean of the newest checkpoints.

        `overrides` are config fields to change, such as {'decode.strategy': 'beam'}. `which` is best or latest, and
        `average` the number of checkpoints to average. If `placed`, the parameters go where config.mesh says; otherwise
        they are whole on the first device. `extensions` are files that add rows to tables; a workdir made with
        extensions needs them. With `headless`, an imported checkpoint may lack the head of its objective, as encoders
        that only embed texts do. `draft` is the workdir of a run that drafts tokens.

        Raises:
          UserError: the directory is not a workdir, it has no checkpoint, or an override, an extension or a draft does
            not fit.
        """
        choose(dict.fromkeys(('best', 'latest')), which, 'which')
        if average is not None and which != 'best':
            raise UserError(f'--average={average} is of the newest checkpoints, --checkpoint={which} of one: give one')
        extensions_lib.import_files(extensions)
        home = pathlib.Path(workdir)
        config = workdir_lib.changed_config(home, overrides or {})
        checks.check_here(config)
        tokens = workdir_lib.load_tokenizers(home)
        if average is not None and config.model.norm == 'batchnorm':
            raise UserError(f'--average={average}: the statistics of model.norm=batchnorm belong to one checkpoint')
        places = scoring.shardings(config, meshes.make_mesh(config.mesh)) if placed else None
        if average is None:
            variables, step = checkpoint.load_variables(home, which, places)
            other = which != 'best' and step != checkpoint.best(home)
            chosen: dict[str, Any] = {'checkpoint': which} if other else {}
        else:
            variables, step = checkpoint.load_average(home, average, config.train.keep_last, places)
            chosen = {'average': average}
        if step == 0 and not headless:  # of the hub, where checkpoints without a head are common
            _check_complete(home, config, variables)
        run = cls(home, config, tokens, variables, step, chosen=chosen)
        return run if draft is None else dataclasses.replace(run, draft=_drafting(draft, run, placed))

    def __repr__(self) -> str:
        family, size = self.config.model.family, self.num_parameters
        return f'Run({str(self.workdir)!r}, step={self.step}, family={family!r}, parameters={size:,})'

    @property
    def model(self) -> nn.Module:
        """The Linen module."""
        return build(self.config.model)

    @property
    def params(self) -> Any:
        """The model's parameters, a tree of arrays."""
        return self.variables['params']

    @property
    def num_parameters(self) -> int:
        """The number of scalars in the parameters."""
        return count_parameters(self.variables.get('params', {}))

    @property
    def results(self) -> dict[str, dict[str, float]]:
        """The content of result.json: the scores of each split that was evaluated; {} before any was."""
        return writers.results(self.workdir)

    def batch(self, texts: Sequence[str], targets: Sequence[str] | None = None) -> dict[str, np.ndarray]:
        """Returns a batch of texts, one a row, as the model reads them: tokens and positions, padded to the longest.

        They are read as the run's objective predicts or writes of them, with the special tokens around them and, where
        a decoder sees a given text whole, `prefix`; `decode.gap` is text. An encoder-decoder that writes has the texts
        in its encoder, and data.start and the `targets`, if given, in its decoder.

        Raises:
          UserError: there are no texts, there are more or fewer targets than texts, a text is longer than
            model.max_len, the run writes no targets, or its objective reads more than a text.
        """
        return text_batches.batch_of(self.config, self.tokenizers, texts, targets)

    def apply(self, batch: Mapping[str, Any], replace: Mapping[str, activations_lib.Replacement] | None = None) -> Any:
        """Returns the model's outputs for a batch, without dropout: the logits [B, T, V] of a language model.

        The batch has the fields that the objective reads, as those of `batch` do. `replace` is as in `activations`.
        """
        return self.activations(batch, [activations_lib.OUTPUT], replace)[activations_lib.OUTPUT]

    def activations(
        self,
        batch: Mapping[str, Any],
        names: Sequence[str],
        replace: Mapping[str, activations_lib.Replacement] | None = None,
    ) -> dict[str, Any]:
        """Returns named values inside the model, and replaces some of them.

            >>> batch = run.batch(['transformer'])
            >>> layers = 'decoder.stack.layers'
            >>> run.activations(batch, [f'{layers}.attention', f'{layers}.0.mlp', 'output'])
            >>> run.activations(batch, ['output'], replace={f'{layers}.1.attention': lambda x: 0 * x})

        A name is a module's path, as `tformer inspect` prints it; its value is the module's output. Modules in
        `layers` have a leading layer axis, and a number after `layers` names one layer. `output` is what `apply`
        returns. `activation_names` lists all names.

        `replace` gives by name an array in the place of the value, or a function of the value. Everything computed
        after it uses the replacement, and so does the value that is returned under its name.

        Raises:
          UserError: a name does not exist, or a replacement has another shape.
        """
        return activations_lib.activations(self._forward, self.variables, batch, names, replace)

    def activation_names(self, batch: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        """Returns the shape of every value that `activations` names, by name. Nothing is computed."""
        return activations_lib.names(self._forward, self.variables, batch)

    @property
    def _forward(self) -> activations_lib.Forward:
        method = OBJECTIVES[self.config.train.objective].method
        return activations_lib.Forward(self.model, method)

    def generate(self, texts: Sequence[str | Messages], seed: int = 0, *, cut: bool = False) -> list[str]:
        """Returns the output for each text: the continuation of a prompt, the text written for a source, or the reply
        to a chat, a list of {'role': 'user', 'content': TEXT}.

        `seed` is that of sampling. With `cut`, texts longer than the model takes are shortened. A line on standard
        error names characters that training had none of.

        Raises:
          UserError: the family does not generate, or a text is too long and `cut` is False.
        """
        reader = texts_lib.reader(self.config, self.tokenizers)
        texts_lib.say_unknown(reader, texts_lib.contents(texts_lib.several(texts)))
        return best(self.write(texts, seed, cut=cut))

    def write(
        self,
        texts: Sequence[str | Messages],
        seed: int = 0,
        *,
        cut: bool = False,
        done: Container[int] = (),
        share: Share = (0, 1),
    ) -> Iterator[tuple[int, list[Output]]]:
        """Yields the number of each text and all of its outputs, best first, as they are written.

            >>> run = tformer.load_run('runs/demo', {'decode.num_outputs': '3'}, placed=True)
            >>> dict(run.write(['transformer']))
            {0: [Output(text='T R AE N S F AO R M ER', score=-0.31, length=11), ...]}

        Texts of about the same length are written together; those whose numbers are `done` are left out. A `share`
        (number, count) is that of one of several processes, which together write all. Rows go where the parameters
        are. Otherwise like `generate`.
        """
        options: dict[str, Any] = {'cut': cut, 'done': done, 'share': share}
        if self.draft is None:
            return scoring.write(self.config, self.tokenizers, self.variables, texts, seed, **options)
        both = {**self.variables, 'draft': self.draft.variables}
        return scoring.write(self.config, self.tokenizers, both, texts, seed, **options, draft=self.draft.config.model)

    def for_writing(self) -> 'Run':
        """Returns the run with the integers of `decode.quantization` in the place of its kernels, which are let go of
        where nothing else holds them; the run as it is where there are to be none."""
        kind, mesh = self.config.decode.quantization, meshes.mesh_of(self.variables)
        if kind is None:
            return self
        with sharding.placed(mesh, self.config.mesh):
            drafts = self.draft and dataclasses.replace(
                self.draft, variables=quantized(self.draft.model, self.draft.variables, kind)
            )
            return dataclasses.replace(self, variables=quantized(self.model, self.variables, kind), draft=drafts)

    def evaluate(self, split: str = 'test') -> dict[str, float]:
        """Returns the scores on a split. `tformer.evaluate` also prints them and writes result.json."""
        quiet = config_lib.override(self.config, {'evaluate.samples': 0})
        return scoring.score(quiet, self.tokenizers, self.variables, split, workdir=self.workdir).scores


def _drafting(draft: str | pathlib.Path, run: Run, placed: bool) -> Run:
    """Returns a run that drafts tokens for another, on the same mesh."""
    strategy = run.config.decode.strategy
    if 'draft' not in STRATEGIES[strategy].fields:
        valid = ', '.join(name for name, row in STRATEGIES.items() if 'draft' in row.fields)
        raise UserError(f'--draft: decode.strategy={strategy} reads no drafts; valid: {valid}')
    mesh = {f'mesh.{axis}': str(getattr(run.config.mesh, axis)) for axis in meshes.AXES} if placed else {}
    found = Run.load(draft, mesh, placed=placed)
    check_draft(found, run)
    return found


def check_draft(draft: Run, run: Run) -> None:
    """Raises a `UserError` where a run cannot draft tokens for another."""
    line = f'--draft={draft.workdir}'
    for what, fact in _OF_DRAFTS.items():
        if fact(draft) != fact(run):
            raise UserError(f'{line} has other {what}: {fact(draft)} there, {fact(run)} here')
    theirs, ours = draft.config.model, run.config.model
    if theirs.max_len < ours.max_len:
        raise UserError(f'{line} has model.max_len={theirs.max_len}, below {ours.max_len} here')
    if whole := read_together(ours):
        raise UserError(f'{line}: {whole} of {run.workdir} needs the tokens of a step by themselves')
    for each in (draft, run):
        if (kind := each.config.model.recurrence) is not None:
            raise UserError(f'{line}: model.recurrence={kind} of {each.workdir} cannot forget a token')


_OF_DRAFTS: dict[str, Callable[[Run], Any]] = {
    'tokenizers': lambda run: run.tokenizers.target.fingerprint,
    'source tokenizers': lambda run: (run.tokenizers.source or run.tokenizers.target).fingerprint,
    'model.family': lambda run: run.config.model.family,
    'model.vocab_size': lambda run: run.config.model.vocab_size,
    'data.start': lambda run: run.config.data.start,
}


def _check_complete(home: pathlib.Path, config: Config, variables: Any) -> None:
    """Raises a `UserError` that names the parameters which the run's objective needs and a checkpoint does not have."""
    there, needed = (
        {path_names(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)}
        for tree in (variables, sharding.unboxed(scoring.abstract(config)))
    )
    if lacking := sorted({names[1] for names in needed - there}):
        needs = f'train.objective={config.train.objective} needs'
        raise UserError(f'{home} was imported without {", ".join(lacking)}, which {needs}: use train.init_from={home}')


def opened(run: Run | str | pathlib.Path, headless: bool = False) -> Run:
    """Returns a run, loaded with its best parameters if it is given by its workdir; `headless` is as of `Run.load`."""
    return run if isinstance(run, Run) else Run.load(run, headless=headless)
