"""Named values inside a model: read them, and replace them by others.

A name is a module's path, as in the parameters: 'decoder.stack.layers.attention' is the output of the attention of
every layer, with a leading layer axis, 'decoder.stack.layers.3.attention' that of one layer,
'decoder.stack.layers.attention.probabilities' its probabilities, computed by the reference kernel, and
'decoder.stack.layers.output' the output of recurrent layers. 'output' is what the model returns.
"""

import functools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import flax
import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from tformer.errors import UserError, nearest
from tformer.layers.layer_stack import PerLayer

OUTPUT = 'output'
_CALL = '__call__'
_ONE_LAYER = re.compile(r'(?<=\blayers)\.(\d+)(?=\.|$)')

Replacement = Callable[[jax.Array], Any] | jax.Array | np.ndarray | float
Batch = Mapping[str, Any]


class Forward(NamedTuple):
    """A model, and what maps it and a batch to outputs: the name of a method, or a function."""

    model: nn.Module
    method: str | Callable[..., Any]


def _place(name: str) -> tuple[str, int | None]:
    """Returns a value's name without a layer's number, and that number; None if it means all layers."""
    found = _ONE_LAYER.search(name)
    return _ONE_LAYER.sub('', name, count=1), int(found[1]) if found else None


def activations(
    forward: Forward,
    variables: Any,
    batch: Batch,
    wanted: Sequence[str],
    replace: Mapping[str, Replacement] | None = None,
) -> dict[str, Any]:
    """Returns the values that `wanted` names, computed without dropout and with the replacements in place.

    Names are as this module's docstring describes them. A module that runs several times gives a tuple of its values.
    `replace` gives by name an array that broadcasts to the value, or a function of the value, which in scanned layers
    gets one layer's value at a time.

    Raises:
      UserError: a name does not exist or cannot be replaced, or a replacement's shape does not fit.
    """
    replace, shapes = dict(replace or {}), _shapes(forward, variables, batch)
    for name in [*wanted, *replace]:
        _check(name, shapes)
    arrays = {name: _array(name, value, shapes) for name, value in replace.items() if not callable(value)}
    for name in replace:
        if name == OUTPUT:
            raise UserError(f'{name} can be read and not replaced; replace the output of a module instead')
    functions = tuple((name, value) for name, value in replace.items() if callable(value))
    return dict(_computed(forward, tuple(wanted), functions, variables, dict(batch), arrays))


def names(forward: Forward, variables: Any, batch: Batch) -> dict[str, Any]:
    """Returns the shape of every named value, a tuple of shapes if a module runs several times; nothing is computed."""
    return jax.tree.map(lambda x: x.shape, _shapes(forward, variables, batch))


def _shapes(forward: Forward, variables: Any, batch: Batch) -> dict[str, Any]:
    return jax.eval_shape(lambda variables, batch: _values(forward, variables, batch, {}), variables, dict(batch))


def _check(name: str, shapes: Mapping[str, Any]) -> None:
    path, layer = _place(name)
    if path not in shapes:
        hint = nearest(path, shapes, listed=20)
        raise UserError(f'the model has no activation {name!r}{hint}; run.activation_names(batch) lists all')
    if layer is not None and isinstance(shapes[path], tuple):
        raise UserError(f'the model has no activation {name!r}: {path} has several values, and no layer axis')
    if layer is not None and layer >= shapes[path].shape[0]:
        raise UserError(f'the model has no activation {name!r}: it has {shapes[path].shape[0]} layers')


def _array(name: str, value: Any, shapes: Mapping[str, Any]) -> jax.Array:
    path, layer = _place(name)
    shape = shapes[path]
    if isinstance(shape, tuple):
        raise UserError(f'{name} has several values: replace it by a function')
    due = shape.shape if layer is None else shape.shape[1:]
    try:
        return jnp.broadcast_to(jnp.asarray(value, shape.dtype), due)
    except ValueError as error:
        raise UserError(f'{name} has shape {due}, which {jnp.shape(value)} does not fit') from error


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _computed(
    forward: Forward,
    wanted: tuple[str, ...],
    functions: tuple[tuple[str, Callable[[jax.Array], Any]], ...],
    variables: Any,
    batch: Batch,
    arrays: Mapping[str, jax.Array],
) -> dict[str, Any]:
    values = _values(forward, variables, batch, {**dict(functions), **arrays})
    places = {name: _place(name) for name in wanted}
    return {name: values[path] if layer is None else values[path][layer] for name, (path, layer) in places.items()}


def _values(forward: Forward, variables: Any, batch: Batch, replace: Mapping[str, Any]) -> dict[str, Any]:
    replaced: dict[str, list[tuple[int | None, Any]]] = {}
    for name, value in replace.items():
        path, layer = _place(name)
        replaced.setdefault(path, []).append((layer, value))
    with nn.intercept_methods(_Interceptor(replaced)):
        output, found = forward.model.apply(variables, batch, method=forward.method, mutable=['intermediates'])
    values: dict[str, Any] = {}
    for path, calls in flax.traverse_util.flatten_dict(found.get('intermediates', {})).items():
        arrays = [call for call in map(_only, calls) if call is not None]
        if arrays:
            name = '.'.join(key for key in path if key != _CALL)
            values[name] = arrays[0] if len(arrays) == 1 else tuple(arrays)
    return {**values, OUTPUT: output}


def _only(value: Any) -> Any:
    """Returns the array of a value that holds just one; None if it holds none; otherwise the value."""
    leaves = jax.tree.leaves(value)
    return (leaves or [None])[0] if len(leaves) <= 1 else value


class _Interceptor:
    """Sows the output of every module's `__call__`, after replacing it if asked to.

    A lifted module (nn.scan, nn.remat) runs `__call__` inside `__call__` on one path: only the innermost counts, which
    in a scan is that of one layer.
    """

    def __init__(self, replaced: Mapping[str, Iterable[tuple[int | None, Any]]]):
        self._replaced = replaced
        self._running: list[list[Any]] = []  # [path, whether a call on the same path ran inside it]
        self._layers: list[Any] = []  # the number of the layer that runs

    def __call__(
        self, function: Callable[..., Any], args: Any, kwargs: Any, context: nn.module.InterceptorContext
    ) -> Any:
        module, method = context.module, context.method_name
        if method == 'each_layer':
            each = function(*args, **kwargs)
            return each.replace(number=jnp.arange(module.num_layers))
        if method != _CALL or not module.path:
            return function(*args, **kwargs)
        numbers = [x.number for x in args if isinstance(x, PerLayer)]  # one of a layer, none of another module
        self._running.append([module.path, False])
        self._layers += numbers
        number = self._layers[-1] if self._layers else None
        try:
            value = function(*args, **kwargs)
        finally:
            _, inside = self._running.pop()
            if numbers:
                self._layers.pop()
        for outer in self._running:
            outer[1] = outer[1] or outer[0] == module.path
        if inside:
            return value
        for layer, replacement in self._replaced.get('.'.join(module.path), ()):
            value = _changed(value, replacement, layer, number)
        module.sow('intermediates', _CALL, value)
        return value


def _changed(value: Any, replacement: Any, layer: int | None, number: Any) -> Any:
    """Returns a value with its one array replaced: in all layers, or in one of them where `number` is that layer's."""
    leaves, tree = jax.tree.flatten(value)
    if len(leaves) != 1:
        raise UserError(f'only a module with one output array can be replaced, and this one has {len(leaves)}')
    (x,) = leaves
    if callable(replacement):
        new = jnp.asarray(replacement(x), x.dtype)
        if new.shape != x.shape:
            raise UserError(f'a replacement has shape {new.shape}, and the value has {x.shape}')
    else:
        new = replacement if number is None or layer is not None else replacement[number]
    if layer is not None:
        new = jnp.where(number == layer, new, x)
    return jax.tree.unflatten(tree, [new])
