"""Tensors of torch's files, `pytorch_model.bin` or several of an index, which torch reads weights-only."""

import importlib
import pathlib
import zipfile
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from tformer.errors import UserError
from tformer.hf import safetensors


class Pickled(Mapping[str, np.ndarray]):
    """The tensors of torch's files by name, which torch maps into memory."""

    def __init__(self, tensors: Mapping[str, Any]):
        self._tensors = tensors

    def __getitem__(self, name: str) -> np.ndarray:
        tensor, torch = self._tensors[name], importlib.import_module('torch')
        narrow = tensor.dtype == torch.bfloat16
        try:
            array = np.asarray((tensor.view(torch.int16) if narrow else tensor).numpy())
        except (TypeError, RuntimeError) as error:  # sparse ones, those without numbers, those of 8 bits
            raise UserError(f'tensor {name} of {tensor.dtype} is not read: {" ".join(str(error).split())}') from error
        return array.view(safetensors.DTYPES['BF16']) if narrow else array

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def open_directory(path: pathlib.Path) -> Pickled | None:
    """Returns the tensors of pytorch_model.bin, or of the files of its index; None where there is none.

    torch reads them with weights_only, which runs nothing that is in them.

    Raises:
      UserError: torch is not installed, or a file holds anything else than tensors.
    """
    whole, index = path / 'pytorch_model.bin', path / 'pytorch_model.bin.index.json'
    if whole.is_file():
        files = [whole]
    elif index.is_file():
        files = [path / name for name in sorted(set(safetensors.read_index(index).values()))]
    else:
        return None
    try:
        torch = importlib.import_module('torch')
    except ImportError as error:
        raise UserError(f'{files[0]} is a pickle, which only torch reads: install torch, or use safetensors') from error
    found: dict[str, Any] = {}
    for file in files:
        try:
            tensors = torch.load(file, map_location='cpu', weights_only=True, mmap=zipfile.is_zipfile(file))
        except Exception as error:  # pickle's, torch's and the system's
            raise UserError(f'{file} cannot be read weights-only: {" ".join(str(error).split())[:160]}') from error
        if not isinstance(tensors, Mapping) or not all(isinstance(each, torch.Tensor) for each in tensors.values()):
            raise UserError(f'{file} holds other things than tensors by name')
        if twice := found.keys() & tensors.keys():
            raise UserError(f'{file}: tensor {min(twice)} is in another file as well')
        found |= {str(name): tensor.detach() for name, tensor in tensors.items()}
    return Pickled(found)
