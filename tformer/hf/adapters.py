"""Low-rank adapters as the hub's package PEFT keeps them: adapter_config.json and adapter_model.safetensors.

The rules of an adapter's two kernels follow from the rule of the kernel that they adapt (Hu et al. 2022, 4.1).
"""

import collections
import pathlib
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from tformer import config as config_lib
from tformer.config import Model, json_files
from tformer.config.tasks import head_parameters
from tformer.errors import UserError, choose, nearest
from tformer.hf import heads, safetensors
from tformer.hf.convert import Stacked, exported, hub_shape, names_of, renamed, stacked
from tformer.hf.models import FAMILIES
from tformer.hf.rules import Rule, axes_of

CONFIG, WEIGHTS = 'adapter_config.json', 'adapter_model.safetensors'
PREFIX = 'base_model.model.'
# The ends of the paths of kernels -> the targets of model.lora_targets.
TARGETS = {
    'attention/query': 'query',
    'attention/query_latent': 'query',
    'attention/key': 'key',
    'attention/value': 'value',
    'attention/out': 'out',
    'mlp/in_0': 'mlp_in',
    'mlp/in_1': 'mlp_in',
    'mlp/out': 'mlp_out',
}
# The names of heads in adapter_config.json.
TASK_TYPES = {'class': 'SEQ_CLS', 'number': 'SEQ_CLS', 'tags': 'TOKEN_CLS', 'spans': 'QUESTION_ANS'}
# What changes the numbers of an adapter and has no counterpart here, with the value that leaves them as they are.
FIXED: dict[str, Any] = {
    'use_rslora': False, 'use_dora': False, 'use_qalora': False, 'bias': 'none', 'rank_pattern': {},
    'alpha_pattern': {}, 'lora_bias': False, 'layers_to_transform': None, 'layer_replication': None,
    'trainable_token_indices': None, 'target_parameters': None, 'alora_invocation_tokens': None,
}  # fmt: skip


# How the numbers of an adapter began, where that left the kernels which it adapts as they were.
STARTS = (True, False, None, 'gaussian', 'eva', 'orthogonal')
# What does not change the numbers of an adapter, or is read of its tensors.
OTHERS = frozenset(
    'peft_type base_model_name_or_path r lora_alpha task_type target_modules modules_to_save fan_in_fan_out '
    'inference_mode lora_dropout auto_mapping revision init_lora_weights megatron_core qalora_group_size peft_version '
    'runtime_config eva_config'.split()
)


def target_of(path: str) -> str | None:
    """Returns the target of model.lora_targets that a kernel is, by its path; None: it takes no adapter."""
    place, _, name = path.rpartition('/')
    return next((target for end, target in TARGETS.items() if name == 'kernel' and place.endswith(end)), None)


def rules_of(rule: Rule) -> tuple[list[Rule], Rule]:
    """Returns the rules of the adapters of a kernel: A [rank, in], one for each of its parts, and B [out, rank].

    Kernels that the hub joins in one have one A there.
    """
    theirs, ours = (axes_of(side) for side in rule.layout.split(' -> '))
    flat = [axis for axes in ours for axis in axes]
    alone = [axis for axis in flat if axis != 'part']
    inner, outer = theirs if alone[: len(theirs[0])] == theirs[0] else theirs[::-1]
    ranked = ['rank' if axis == inner[0] else axis for axis in flat if axis not in inner[1:]]
    hub, into = rule.hub.removesuffix('.weight'), f'rank ({" ".join(inner)}) -> {" ".join(inner)} rank'
    down = [
        rule._replace(hub=f'{hub}.lora_A.weight', ours=_beside(path, 'lora_a'), layout=into, parts=(), shares=())
        for path in rule.paths
    ]
    up = rule._replace(
        hub=f'{hub}.lora_B.weight',
        ours=_beside(rule.ours, 'lora_b'),
        layout=f'({" ".join(outer)}) rank -> {" ".join(ranked)}',
    )
    return down, up


def _beside(path: str, adapter: str) -> str:
    return f'{path.removesuffix("/kernel")}/{adapter}/kernel'


def adapted_rules(family: str, model: Model) -> list[tuple[Rule, list[str]]]:
    """Returns the rules of all kernels that a model adapts, each with the paths of those kernels.

    Raises:
      UserError: they are of experts, which the hub keeps in arrays without adapters.
    """
    found = []
    for rule in choose(FAMILIES, family, 'family').rules:
        paths = [path for path in rule.paths if target_of(path) in model.lora_targets]
        if not paths or not rule.when(model):
            continue
        if '{expert}' in rule.hub:
            raise UserError(
                f'{family}: adapters of {target_of(paths[0])} have no counterpart: the hub keeps {rule.hub} whole; '
                '--merge adds them to the kernels'
            )
        found.append((rule, paths))
    return found


def write(
    directory: pathlib.Path,
    family: str,
    params: Mapping[str, Any],
    model: Model,
    base: str | None,
    others: Collection[str] = (),
) -> dict[str, Any]:
    """Writes adapter_model.safetensors, and returns the fields of adapter_config.json.

    Where the hub joins kernels in one, their adapters are one of the sum of their ranks, and so are all others of the
    model, filled up with zeros.

    Args:
      directory: where to.
      family: a hub's model_type.
      params: by path, the adapters and the heads, which were trained with them, among them.
      model: with adapters.
      base: the directory or the name of the hub's model that the adapters are for.
      others: paths of parameters that are not those of `base`, and are written whole.

    Raises:
      UserError: an adapter has no counterpart, or one of `others` is inside of a layer.
    """
    assert model.lora_rank is not None
    rules, table = adapted_rules(family, model), FAMILIES[family]
    rank = model.lora_rank * max((len(paths) for _, paths in rules), default=1)
    taken = [_beside(path, adapter) for _, paths in rules for path in paths for adapter in ('lora_a', 'lora_b')]
    if lost := [path for path in params if '/lora_' in path and path not in taken]:
        raise UserError(f'{family}: the adapter {lost[0]} has no counterpart; --merge adds it to its kernel')
    if lost := [path for path in taken if path not in params]:
        raise UserError(f'{family}: there is no parameter {lost[0]}{nearest(lost[0], params, listed=0)}')
    tensors: dict[str, np.ndarray] = {}
    for rule, paths in rules:
        tensors |= _joined(family, rule, paths, params, model, rank)
    adapted = {name.removesuffix('.lora_A.weight') for name in tensors if name.endswith('.lora_A.weight')}
    chosen = heads.exported(table, model, params)
    among = [rule for rule in table.rules if rule.ours in params and rule.head in chosen]
    saved = [rule for rule in among if rule.ours.split('/')[0] in head_parameters() or rule.ours in others]
    if lost := sorted({*others} - {rule.ours for rule in saved if '{' not in rule.hub}):
        raise UserError(f'the adapters are for {base}, and {lost[0]} is not what it is there: --merge writes all')
    tensors |= exported(family, saved, params, model)[0]
    tensors = {PREFIX + name: np.ascontiguousarray(array) for name, array in tensors.items()}
    shapes = {name: (array.dtype, array.shape) for name, array in tensors.items()}
    safetensors.write(directory / WEIGHTS, shapes, tensors.__getitem__)
    modules = {name.removesuffix('.weight') for rule in table.rules for name in names_of(rule, model)[0]}
    top = {rule.hub.removeprefix(table.prefix).split('.')[0] for rule in saved if rule.ours not in others}
    inner = {rule.hub.rpartition('.')[0] for rule in saved if rule.ours in others}
    return {
        'peft_type': 'LORA',
        'base_model_name_or_path': base,
        'r': rank,
        'lora_alpha': model.lora_alpha * rank / model.lora_rank,
        'lora_dropout': 0.0,
        'target_modules': ends_of(adapted, modules - adapted),
        'modules_to_save': sorted({*top, *ends_of(inner, modules - inner)}) or None,
        'bias': 'none',
        'fan_in_fan_out': family == 'gpt2',
        'inference_mode': True,
        'task_type': next((kind for head, kind in TASK_TYPES.items() if head in chosen), None),
    }


def _joined(
    family: str, rule: Rule, paths: list[str], params: Mapping[str, Any], model: Model, rank: int
) -> dict[str, np.ndarray]:
    """Returns the hub's tensors of the adapters of one rule's kernels: those of its parts side by side along the rank,
    each adding to its own part alone."""
    down, up = rules_of(rule)
    grid = names_of(up, model)[1]
    parts = [Stacked(family, up, part, grid, (), {}, model) for part in range(len(up.paths))]
    nothing = {path: np.zeros(part.shape, np.float32) for path, part in zip(up.paths, parts, strict=True)}
    found: dict[str, list[np.ndarray]] = {}
    for path in paths:
        own = {place: params[place] for place in (_beside(path, 'lora_a'), _beside(path, 'lora_b'))}
        both = [down[rule.paths.index(path)], up]
        for name, array in exported(family, both, nothing | own, model)[0].items():
            found.setdefault(name, []).append(array)
    tensors = {}
    for name, arrays in found.items():
        axis = 0 if '.lora_A.' in name else 1
        whole = np.concatenate(arrays, axis)
        more = rank - whole.shape[axis]
        tensors[name] = np.pad(whole, [(0, more), (0, 0)] if axis == 0 else [(0, 0), (0, more)])
    return tensors


def ends_of(adapted: Collection[str], others: Collection[str]) -> list[str]:
    """Returns the shortest ends of the names of adapted modules that no other module has: PEFT takes a module by any
    end of its name, in whole parts."""

    def end_of(name: str) -> str:
        parts = name.split('.')
        ends = ('.'.join(parts[-length:]) for length in range(1, len(parts)))
        return next((end for end in ends if not any(f'.{other}'.endswith(f'.{end}') for other in others)), name)

    return sorted({end_of(name) for name in adapted})


def read_config(directory: pathlib.Path) -> dict[str, Any]:
    """Returns the fields of adapter_config.json. Raises a `UserError` if it is not of low-rank adapters as ours are."""
    found = json_files.read(directory / CONFIG)
    if found.get('peft_type') != 'LORA':
        raise UserError(f'{directory / CONFIG}: peft_type={found.get("peft_type")!r} has no counterpart; valid: LORA')
    for name, value in FIXED.items():
        if found.get(name, value) not in (value, None):
            raise UserError(f'{directory / CONFIG}: {name}={found[name]!r} has no counterpart; valid: {value!r}')
    if (start := found.get('init_lora_weights')) not in STARTS:
        valid = ', '.join(map(str, STARTS))
        raise UserError(f'{directory / CONFIG}: init_lora_weights={start!r} has no counterpart; valid: {valid}')
    if unread := [name for name, value in found.items() if value and name not in OTHERS and name not in FIXED]:
        raise UserError(f'{directory / CONFIG}: {unread[0]}={found[unread[0]]!r} has no counterpart; leave it out')
    if type(found.get('r')) is not int or found['r'] < 1:
        raise UserError(f'{directory / CONFIG}: r={found.get("r")!r} is not a whole number of at least 1')
    return found


def base_of(directory: pathlib.Path) -> str:
    """Returns the directory or the name of the model that adapters are for. Raises a `UserError` as `read_config`."""
    base = read_config(directory).get('base_model_name_or_path')
    if not isinstance(base, str):
        raise UserError(f'{directory / CONFIG} has no base_model_name_or_path')
    return base


def num_classes_of(directory: pathlib.Path, family: str) -> int | None:
    """Returns the number of classes of the head beside the adapters; None: there is none."""
    tensors = safetensors.open_files([directory / WEIGHTS])
    rows = [f'{PREFIX}{rule.hub}' for rule in FAMILIES[family].rules if rule.ours in heads.CLASSES]
    return next((len(tensors[name]) for name in rows if name in tensors and tensors[name].ndim), None)


def with_adapters(
    directory: pathlib.Path, family: str, model: Model, head: str | None = None
) -> tuple[Model, dict[str, Stacked]]:
    """Returns (the model with the adapters of a directory, their parameters by path, unread).

    `head` is the model's; None: that of the tensors beside the adapters.

    Raises:
      UserError: the adapters have no counterpart, or some of their tensors are missing or not mapped.
    """
    fields, table = read_config(directory), FAMILIES[family]
    tensors = safetensors.open_files([directory / WEIGHTS])
    names = {
        name: f'{PREFIX}{original}'
        for name, original in renamed(table, [name.removeprefix(PREFIX) for name in tensors]).items()
    }
    present = [rule for rule in table.rules if rule.when(model) and _is_adapted(rule, model, names)]
    targets = dict.fromkeys(target for rule in present for path in rule.paths if (target := target_of(path)))
    alpha = config_lib.coerce(float, fields.get('lora_alpha', 8), 'lora_alpha')
    model = config_lib.override(
        config_lib.Config(model=model),
        {'model.lora_rank': fields['r'], 'model.lora_alpha': alpha, 'model.lora_targets': tuple(targets)},
    ).model
    rules = [rule for rule in heads.imported(table, model, names, head) if rule.hub in names]
    zeros: dict[str, np.ndarray] = {}
    for rule, _ in adapted_rules(family, model):
        down, up = rules_of(rule)
        rules += [*down, up]
        if rule not in present:  # as if it had an adapter that adds nothing, and is never trained
            for each in (*down, up):
                nothing = np.broadcast_to(np.float32(0), hub_shape(each, model))
                zeros |= dict.fromkeys(names_of(each, model)[0], nothing)
    source = collections.ChainMap(zeros, tensors), names | {name: name for name in zeros}  # type: ignore[arg-type]
    found, taken = stacked(family, rules, source, model)
    if others := [original for name, original in names.items() if name not in taken]:
        raise UserError(f'{directory / WEIGHTS}: no rule reads the tensor {others[0]}')
    return model, found


def _is_adapted(rule: Rule, model: Model, names: Collection[str]) -> bool:
    if not any(map(target_of, rule.paths)) or '{expert}' in rule.hub:
        return False
    return any(name in names for name in names_of(rules_of(rule)[1], model)[0])
