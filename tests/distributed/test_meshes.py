"""Meshes: how devices are laid out."""

import types

import jax
import numpy as np
import pytest

from tformer.config import Mesh
from tformer.distributed import meshes
from tformer.errors import UserError


def test_a_minus_one_takes_what_the_others_leave():
    assert meshes.make_mesh(Mesh(data=-1, tensor=2)).shape['data'] == len(jax.devices()) // 2
    assert meshes.make_mesh(Mesh(data=2)).size == 2
    assert meshes.described(meshes.make_mesh(Mesh(data=2))) == '2 of 8 devices'
    assert meshes.described(meshes.make_mesh(Mesh(data=-1))) == '8 device(s)'
    with pytest.raises(
        UserError,
        match=r'^mesh\.data=-1, mesh\.tensor=3 do not fit the 8 devices there are: 3 .* nearest that does: 2$',
    ):
        meshes.make_mesh(Mesh(data=-1, tensor=3))
    with pytest.raises(UserError, match=r'^mesh\.fsdp=16 do not fit .* there are: 16 are asked for, at most 8 can be$'):
        meshes.make_mesh(Mesh(data=1, fsdp=16))


def test_the_mesh_of_arrays_is_that_which_they_are_on_or_their_device():
    mesh, fourth = meshes.make_mesh(Mesh(data=2, tensor=2)), jax.devices()[3]
    assert meshes.mesh_of([np.zeros(4), jax.device_put(np.zeros(4), meshes.batch_sharding(mesh))]) == mesh
    for arrays, device in ((jax.device_put(np.zeros(4), fourth), fourth), (np.zeros(4), jax.devices()[0])):
        assert meshes.mesh_of(arrays).devices.flatten().tolist() == [device]


def test_devices_without_such_a_layout_are_refused_in_a_line(monkeypatch):
    def arrange(sizes, devices, axis):
        raise NotImplementedError('no axes of a 2x2 torus have 4 devices\nof 8')

    monkeypatch.setattr(meshes, 'arrange', arrange)
    with pytest.raises(UserError, match=r'^mesh\.data=2, mesh\.tensor=4: no axes of a 2x2 torus have 4 devices$'):
        meshes.make_mesh(Mesh(data=2, tensor=4))


def test_devices_that_form_no_torus_are_refused_in_a_line(monkeypatch):
    def arrange(sizes, devices, axis):
        raise AssertionError('jax_devices=[...] dims=(2, 2, 1)')

    monkeypatch.setattr(meshes, 'arrange', arrange)
    with pytest.raises(
        UserError, match=r'^mesh\.data=3: the first 3 of 8 devices do not form a torus; .* takes all of them$'
    ):
        meshes.make_mesh(Mesh(data=3))


class Chip:
    """What a mesh is laid out from: a device of a slice."""

    platform = device_kind = 'cpu'

    def __init__(self, number, slice_index):
        self.id, self.slice_index, self.process_index = number, slice_index, number // 4

    def __repr__(self):
        return f'{self.slice_index}:{self.id}'


def test_one_axis_crosses_slices_and_no_other():
    chips = [Chip(number, number // 8) for number in range(16)]
    sizes = {'pipeline': 1, 'data': 4, 'fsdp': 2, 'expert': 1, 'context': 1, 'tensor': 2}
    laid_out = meshes.arrange(list(sizes.values()), chips, list(sizes).index('data'))
    slices = np.vectorize(lambda chip: chip.slice_index)(laid_out)
    assert laid_out.shape == tuple(sizes.values()) and len({chip.id for chip in laid_out.ravel()}) == 16
    assert slices[0, :, 0, 0, 0, 0].tolist() == [0, 0, 1, 1]
    assert all(len(set(slices[0, row].ravel())) == 1 for row in range(4))
    with pytest.raises(ValueError, match='does not divide into 2 slices'):
        meshes.arrange([1, 4, 1, 1, 1, 4], chips, 5 - 2)


def test_axes_that_share_one_of_a_torus_are_laid_out_too():
    def chip(x, y):
        return types.SimpleNamespace(
            id=4 * x + y, platform='tpu', device_kind='TPU v5 lite', coords=(x, y, 0), core_on_chip=0
        )

    chips = [chip(x, y) for x in range(4) for y in range(4)]
    laid_out = meshes.arrange([1, 2, 1, 1, 4, 2], chips, 1)  # data 2, context 4, tensor 2
    assert laid_out.shape == (1, 2, 1, 1, 4, 2) and len({chip.id for chip in laid_out.ravel()}) == 16
    rings = laid_out.reshape(2, 4, 2).swapaxes(1, 2).reshape(-1, 4)
    assert all(len({chip.coords[0] for chip in ring}) == 1 for ring in rings)  # on one axis of the torus


def test_of_several_devices_of_a_cpu_a_program_has_ended_before_the_next_begins():
    """Products that take a while, on a mesh of two devices."""
    mesh = meshes.make_mesh(Mesh(data=2), jax.devices()[:2])
    slow = jax.jit(lambda x: jax.lax.fori_loop(0, 60, lambda _, y: y @ x / 300, x))
    x = jax.device_put(jax.numpy.ones((300, 300)), meshes.batch_sharding(mesh))
    assert meshes.in_turn(mesh, {'y': slow(x)})['y'].is_ready()
    assert meshes.in_turn(meshes.make_mesh(Mesh(data=1), jax.devices()[:1]), 'anything') == 'anything'
