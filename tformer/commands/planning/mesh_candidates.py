"""Which meshes `plan` compares: those over all of some devices that a config allows."""

import collections
import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

from tformer import checks
from tformer import config as config_lib
from tformer.config import AXES, Config
from tformer.distributed.devices import Target
from tformer.distributed.meshes import nearest_size
from tformer.errors import UserError

MOST = 8  # along `tensor`, whose products get too small; along `pipeline`, whose stages wait; along `context`
MOST_EXPERT = 32
LONG = 8192  # tokens of a row from which it may be split


class Refusal(NamedTuple):
    """Why a config cannot have a mesh."""

    stage: int  # of the checks: the mesh has passed those before
    line: str


def meshes(config: Config, target: Target, fixed: set[str]) -> list[dict[str, int]]:
    """Returns the sizes of meshes over all devices that the config allows; axes in `fixed` keep their sizes.

    Raises:
      UserError: there is none; the line says what is wrong with the config, or else with most of the meshes that came
        nearest.
    """
    refusals: list[Refusal] = []
    for wide in (False, True):
        found = list(candidates(config, target, fixed, wide=wide, refusals=refusals))
        if found:
            return found
    checks.check(config)
    last = max((each.stage for each in refusals), default=0)
    why = collections.Counter(each.line for each in refusals if each.stage == last).most_common(1)
    own = {axis: getattr(config.mesh, axis) for axis in AXES if axis in fixed}
    given = ', '.join(f'mesh.{axis}={size}' for axis, size in own.items())
    nearest = nearest_size(math.prod(max(size, 1) for size in own.values()), target.count)
    raise UserError(why[0][0] if why else f'{given} do not fit the {target.count:,} devices of {target}{nearest}')


def candidates(
    config: Config, target: Target, fixed: set[str], *, wide: bool = False, refusals: list[Refusal] | None = None
) -> Iterator[dict[str, int]]:
    """Yields `meshes`, and tells `refusals` why others are none. With `wide`, `tensor` may also be larger than is
    sensible, or not divide the heads, and short rows may be split, too."""
    model, count = config.model, target.count
    divisors = [size for size in range(1, count + 1) if count % size == 0]
    few = [size for size in divisors if size <= MOST]
    splits = {
        'pipeline': [1] if model.recurrence or model.layer_sharing else few,
        'tensor': divisors if wide else [size for size in few if model.num_heads % size == 0],
        'context': few if (wide or config.data.length >= LONG) and not model.recurrence else [1],
        'expert': [size for size in divisors if size <= MOST_EXPERT and (model.num_experts or 1) % size == 0],
    }
    own = {axis: getattr(config.mesh, axis) for axis in fixed}
    splits |= {axis: divisors if own[axis] == -1 else [own[axis]] for axis in own.keys() & splits.keys()}
    for sizes in itertools.product(*splits.values()):
        mesh = dict(zip(splits, sizes, strict=True))
        if min(sizes) < 1 or count % math.prod(sizes):
            continue
        left = count // math.prod(sizes)
        for fsdp in (size for size in range(1, left + 1) if left % size == 0):
            mesh |= {'fsdp': fsdp, 'data': left // fsdp}
            if not all(own[axis] in (mesh[axis], -1) for axis in own):
                continue
            refusal = _refusal(config, target, mesh)
            if refusal is None:
                yield dict(mesh)
            elif refusals is not None:
                refusals.append(refusal)


def _refusal(config: Config, target: Target, mesh: dict[str, int]) -> Refusal | None:
    """Returns why a config cannot have a mesh; None if it can."""
    try:
        checks.check(config_lib.override(config, {f'mesh.{axis}': size for axis, size in mesh.items()}))
    except UserError as error:
        return Refusal(0, str(error))
    across = config.mesh.dcn_axis
    if mesh[across] % target.slices:
        line = f'no mesh of {target} has a mesh.{across} that its {target.slices} slices divide (mesh.dcn_axis)'
        return Refusal(1, line)
    ways = mesh['data'] * mesh['fsdp'] * mesh['expert'] * mesh['pipeline'] * config.train.microbatches
    if config.data.batch_tokens is None and config.train.batch_size % ways:
        line = (
            f'train.batch_size={config.train.batch_size} is not a multiple of the rows that a mesh of {target.count:,} '
            f'devices and train.microbatches={config.train.microbatches} divide; nearest that is: '
            f'{max(round(config.train.batch_size / ways), 1) * ways}'
        )
        return Refusal(2, line)
    return None


def first(meshes: list[dict[str, int]], most: int) -> list[dict[str, int]]:
    """Returns the meshes to compile, of the sorted ones: the best, and those of `data` or `fsdp` alone."""
    plain = [mesh for mesh in meshes if math.prod(mesh.values()) in (mesh['data'], mesh['fsdp'])]
    chosen = [*meshes[: max(most - len(plain), 1)], *plain, *meshes]
    return [mesh for number, mesh in enumerate(chosen) if mesh not in chosen[:number]][:most]
