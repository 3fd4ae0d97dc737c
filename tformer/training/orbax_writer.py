"""Orbax's asynchronous writer of checkpoints, which get the digests of their files before their names."""

import os
import pathlib
from collections.abc import Mapping
from typing import Any

import orbax.checkpoint as ocp

from tformer.distributed import processes
from tformer.training import checkpoint, copies, digests


class Handler(ocp.CompositeCheckpointHandler):
    """Adds the digests once all files are written; only then does the directory get its final name."""

    async def async_save(self, directory: Any, args: Any) -> list[Any]:
        sending = copies.Sending(pathlib.Path(os.fspath(directory)), checkpoint.ARRAYS)
        return [*(await super().async_save(directory, args) or ()), sending]  # Orbax waits in this order

    def finalize(self, directory: Any) -> None:
        place = pathlib.Path(os.fspath(directory))
        if processes.first():
            copies.receive(place)
        super().finalize(directory)
        if processes.first():
            digests.write(place)


@ocp.args.register_with_handler(Handler, for_save=True, for_restore=True)
class Items(ocp.args.Composite):
    pass


class Writer(ocp.AsyncCheckpointer):
    """Writes checkpoints, one at a time."""

    def __init__(self) -> None:
        # Compression costs more time than it saves space: trained numbers are close to random bits.
        handlers = {name: ocp.PyTreeCheckpointHandler(use_compression=False) for name in checkpoint.ARRAYS}
        super().__init__(Handler(run=ocp.JsonCheckpointHandler(), **handlers))

    def begin(self, directory: pathlib.Path, run: Mapping[str, Any], items: Mapping[str, Any]) -> None:
        """Starts writing a JSON object and trees of arrays; returns once the arrays are copied off the devices."""
        arrays = {name: ocp.args.PyTreeSave(item) for name, item in items.items()}
        self.save(directory, args=Items(run=ocp.args.JsonSave(run), **arrays))
