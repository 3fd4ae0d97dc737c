"""TFDS sets by name: their own code downloads and writes them. Nothing else in the project downloads.

TFDS unpacks archives and sorts records through TensorFlow's file API, even when it writes ArrayRecord files, and has no
setting for this. Where TensorFlow is not installed, Python's own files replace that API in the two modules that use it.
"""

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
_OPEN_FILES = 2048  # TFDS sorts more than 1 GB of records in a thousand files

# The part of TensorFlow's API that TFDS uses to unpack archives and sort records.
_FILES = SimpleNamespace(
    io=SimpleNamespace(gfile=SimpleNamespace(GFile=open, exists=os.path.exists, remove=os.remove, copy=shutil.copy)),
    compat=SimpleNamespace(as_text=os.fsdecode),
    errors=SimpleNamespace(ResourceExhaustedError=OSError, UnimplementedError=OSError),
)


def write(name: str, directory: str | None, say: Callable[[str], None]) -> bool:
    """Writes the set `name` to `directory` (None: TFDS's default) by its own code; returns False if the set exists.

    Raises:
      UserError: there is no such set, or its code fails, e.g. without TensorFlow, the network, or files that must be
        downloaded by hand.
    """
    build = f'tfds build {name} --file_format=array_record' + (f' --data_dir={directory}' if directory else '')
    try:
        with quiet():
            builder = _builder(name, directory)
            if Path(builder.data_dir).exists():
                return False
            say(f'downloading and preparing {name} in {builder.data_dir}')
            _write(builder)
    except UserError:
        raise
    except Exception as error:  # the set's own code and the network may raise anything
        if missing := _missing(error):
            elsewhere = f'run `{build}` where it is installed, and set data.tfds_dir to what it wrote'
            raise UserError(f'{name} needs {missing} to be written: {elsewhere}') from error
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(f'{name} cannot be prepared: {reason[:200]}') from error
    return True


def _write(builder: Any) -> None:
    """Downloads and writes a set, by Python's own files where TensorFlow is not installed."""
    import tensorflow_datasets as tfds
    from tensorflow_datasets.core import shuffle
    from tensorflow_datasets.core.download import extractor

    if importlib.util.find_spec('tensorflow') is None:
        shuffle.tf = extractor.tf = _FILES
    options = tfds.download.DownloadConfig(try_download_gcs=False)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= soft < _OPEN_FILES:
        resource.setrlimit(resource.RLIMIT_NOFILE, (_OPEN_FILES if hard < 0 else min(_OPEN_FILES, hard), hard))
    builder.download_and_prepare(file_format='array_record', download_config=options)


def _builder(name: str, directory: str | None) -> Any:
    """Returns the set's own builder."""
    import tensorflow_datasets as tfds

    # TFDS does not find some older sets if an image or audio module lacks a package.
    for family in _FAMILIES:
        importlib.import_module(f'tensorflow_datasets.{family}')
    try:
        return tfds.builder(name, data_dir=directory)
    except tfds.core.DatasetNotFoundError:
        hint = nearest(name.partition('/')[0].partition(':')[0], tfds.core.registered.list_imported_builders())
        raise UserError(f'TFDS has no set {name!r}, or no code for it here (data.tfds_name){hint}') from None


def _missing(error: BaseException | None) -> str | None:
    """Returns the missing package behind an error or one of its causes, None where nothing is missing."""
    while error is not None:
        if isinstance(error, ImportError):
            return 'TensorFlow' if error.name == 'tensorflow' else error.name
        error = error.__cause__ or error.__context__
    return None


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silences TFDS, except for its progress bars on a terminal."""
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
