"""TFDS sets by name: downloaded and written by their own code. Nothing else in the project downloads."""

import contextlib
import importlib
import importlib.util
import io
import logging
import os
import resource
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import absl.logging

from tformer.errors import UserError, nearest

_FAMILIES = ('question_answering', 'structured', 'summarization', 'text', 'text_simplification', 'translate')
_OPEN_FILES = 2048  # TFDS sorts what is over 1 GB in a thousand of them

# What TFDS asks of TensorFlow while it unpacks archives and sorts records: files.
_FILES = SimpleNamespace(
    io=SimpleNamespace(gfile=SimpleNamespace(GFile=open, exists=os.path.exists, remove=os.remove, copy=shutil.copy)),
    compat=SimpleNamespace(as_text=os.fsdecode),
    errors=SimpleNamespace(ResourceExhaustedError=OSError, UnimplementedError=OSError),
)


def write(name: str, directory: str | None, say: Callable[[str], None]) -> bool:
    """Whether set `name` was written to `directory` as array_record, by the code that TFDS or an imported module has.

    Where TensorFlow is absent, Python's own files do for archives and for what is sorted on disk.

    Returns:
      False where it is there already.

    Raises:
      UserError: no such set, or its code fails: without TensorFlow, without the network, for want of manual files.
    """
    build = f'tfds build {name} --file_format=array_record' + (f' --data_dir={directory}' if directory else '')
    try:
        with quiet(), _local_files():
            builder = _builder(name, directory)
            if Path(builder.data_dir).exists():
                return False
            say(f'downloading and preparing {name} in {builder.data_dir}')
            _write(builder)
    except UserError:
        raise
    except Exception as error:  # whatever the set's own code, or the network, may raise
        missing = _missing(error)
        if missing:
            elsewhere = f'run `{build}` where it is installed, and set data.tfds_dir to what it wrote'
            raise UserError(f'{name} needs {missing} to be written: {elsewhere}') from error
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(f'{name} cannot be prepared: {reason[:200]}') from error
    return True


def _write(builder: Any) -> None:
    import tensorflow_datasets as tfds

    options = tfds.download.DownloadConfig(try_download_gcs=False)
    soft, hard = limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= soft < _OPEN_FILES:
        resource.setrlimit(resource.RLIMIT_NOFILE, (_OPEN_FILES if hard < 0 else min(_OPEN_FILES, hard), hard))
    try:
        builder.download_and_prepare(file_format='array_record', download_config=options)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def _builder(name: str, directory: str | None) -> Any:
    """The set's own builder. TFDS gives up on its older ones where a module of pictures or sound lacks a package."""
    import tensorflow_datasets as tfds

    try:
        return tfds.builder(name, data_dir=directory)
    except tfds.core.DatasetNotFoundError:
        for family in _FAMILIES:
            importlib.import_module(f'tensorflow_datasets.{family}')
    try:
        return tfds.builder(name, data_dir=directory)
    except tfds.core.DatasetNotFoundError:
        hint = nearest(name.partition('/')[0].partition(':')[0], tfds.core.registered.list_imported_builders())
        raise UserError(f'TFDS has no set {name!r}, or no code for it here (data.tfds_name){hint}') from None


def _missing(error: BaseException | None) -> str | None:
    """The package for want of which an error was raised, itself or one behind it."""
    while error is not None:
        if isinstance(error, ImportError):
            return 'TensorFlow' if error.name == 'tensorflow' else error.name
        error = error.__cause__ or error.__context__
    return None


@contextlib.contextmanager
def _local_files() -> Iterator[None]:
    """TFDS without TensorFlow opens files as Python does."""
    from tensorflow_datasets.core import shuffle
    from tensorflow_datasets.core.download import extractor

    if importlib.util.find_spec('tensorflow') is not None:
        yield
        return
    before = {module: module.tf for module in (shuffle, extractor)}
    try:
        for module in before:
            module.tf = _FILES
        yield
    finally:
        for module, tensorflow in before.items():
            module.tf = tensorflow


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """TFDS prints, logs, and draws bars: bars on a terminal are all that is left of it."""
    import tensorflow_datasets as tfds

    if not sys.stderr.isatty():
        tfds.disable_progress_bar()
    before = absl.logging.get_verbosity()
    absl.logging.set_verbosity(absl.logging.ERROR)
    logging.getLogger('urllib3').setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        absl.logging.set_verbosity(before)
