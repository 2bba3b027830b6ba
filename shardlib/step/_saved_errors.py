"""How a checkpoint stores what a compressed exchange left over: for each worker, in the shape of
the parameter.

In a state, each device has the errors of its own pieces. In a checkpoint, those of a parameter are
two arrays that no longer depend on how the mesh cut them:

    worker    (workers, *shape of the parameter)
    server    (*shape of the parameter)

As many workers as there were get back exactly what they had, however the rest of the mesh has
changed. The mean of messages is owed the mean of the workers' errors and that of the servers. So
another number of workers each get the mean of what those before had, and the same is owed.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from shardlib.collectives._compressed import Errors
from shardlib.collectives._exact import Parameter
from shardlib.layouts._specs import axes_without, parts_over, spec_axes
from shardlib.step._exchange import pieces
from shardlib.step._layer_order import Mover, reordered, stacked_dim
from shardlib.step._saved_workers import like_saved_workers, with_these_workers
from shardlib.step._state import Layout, State
from shardlib.step._strategy import Strategy

ErrorsByPath = dict[str, Errors]


def saved(state: State) -> State:
    """A state as a checkpoint stores it: layers in the model's order, errors by worker."""
    state = reordered(state, natural=True)
    if not state.errors:
        return state
    # A tuple, since it is part of the key by which the program is remembered.
    parameters = tuple(_exchanged_parameters(state).values())
    conversion = _Conversion(state.layout.strategy, parameters)
    errors = _program(conversion, by_worker=True)(state.errors)
    return state.replaced(errors=_reordered_errors(state.layout, errors, natural=True))


def saved_like(state: State, shapes: Mapping[str, tuple[int, ...]]) -> State:
    """What to read from a checkpoint in order to make a state like this one of it.

    Args:
        state: the state that is wanted, of which only shapes and shardings are used.
        shapes: the shapes of all arrays of the checkpoint, by path.

    The result is what `from_saved` takes. A checkpoint of a run without compression has no errors,
    and one of another number of workers has more or fewer of them.
    """
    state = like_saved_workers(state, shapes)
    if not state.errors:
        return state
    if not any(path.startswith("errors/") for path in shapes):
        return state.replaced(errors={})
    mesh, exchange = state.layout.strategy.device_mesh, state.layout.strategy.exchange
    errors: ErrorsByPath = {}
    for path, parameter in _exchanged_parameters(state).items():
        over = exchange.over(parameter)
        workers = parts_over(mesh.shape, over)
        # Without anything in the checkpoint there are as many as now, with errors of zero.
        stored_workers = workers
        stored_shape = shapes.get(f"errors/{path}/worker", ())
        if stored_shape and stored_shape[1:] == parameter.shape:
            stored_workers = stored_shape[0]
        # Errors of a number of workers that the devices cannot share evenly are read whole.
        split_over = over if stored_workers % workers == 0 else None
        by_worker = PartitionSpec(split_over, *parameter.stored)
        errors[path] = Errors(
            _abstract((stored_workers, *parameter.shape), NamedSharding(mesh, by_worker)),
            _abstract(parameter.shape, NamedSharding(mesh, parameter.stored)),
        )
    return state.replaced(errors=errors)


def from_saved(state: State, like: State) -> State:
    """The state that `saved` made this one of, on the mesh of `like`.

    If there were other workers then, or no compression, it is a state that owes as much.
    """
    state = with_these_workers(reordered(state, natural=False), like)
    if not like.errors:
        return state
    if not state.errors:
        return state.replaced(errors=_zeros_like(like.errors))
    errors = _reordered_errors(state.layout, state.errors, natural=False)
    parameters = tuple(_exchanged_parameters(like).values())
    conversion = _Conversion(state.layout.strategy, parameters)
    return state.replaced(errors=_program(conversion, by_worker=False)(errors))


def _abstract(shape: tuple[int, ...], sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    # Errors are float32 whatever the parameter is: what a code leaves out is small.
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)


def _zeros_like(errors: ErrorsByPath) -> ErrorsByPath:
    """Zeros, each made in its place on the mesh."""

    def zeros() -> ErrorsByPath:
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), errors)

    shardings = jax.tree.map(lambda x: x.sharding, errors)
    return jax.jit(zeros, out_shardings=shardings)()


def _exchanged_parameters(state: State) -> dict[str, Parameter]:
    """The parameters of which the exchange has errors, by path."""
    parameters: dict[str, Parameter] = {}
    for path, parameter in state.layout.parameters(state.params).items():
        if path in state.errors:
            parameters[path] = parameter
    return parameters


@dataclass(frozen=True)
class _Conversion:
    """What is needed to lay out errors by worker, and from there by device again.

    It is the key of compiled programs, so two states that are cut alike share them.

    Attributes:
        strategy: the strategy of the state, with its mesh and its exchange.
        parameters: the parameters that have errors.
    """

    strategy: Strategy
    parameters: tuple[Parameter, ...]

    def workers(self, parameter: Parameter) -> tuple[str, ...]:
        """The axes along which devices are the workers of a parameter."""
        return self.strategy.exchange.over(parameter)

    def shared(self, parameter: Parameter) -> tuple[str, ...]:
        """The axes along which devices hold the same, so that each sends a part of it."""
        # Axes that split the parameter hold different parts of it, and workers send their own.
        taken = (*self.workers(parameter), *spec_axes(parameter.stored))
        return axes_without(self.strategy.device_mesh.shape, taken)

    def specs_by_worker(self) -> dict[str, Errors]:
        """How errors are laid out as a checkpoint stores them."""
        specs = {}
        for parameter in self.parameters:
            # A dim of workers in front, split over them, and then the dims of the parameter.
            worker = PartitionSpec(self.workers(parameter), *parameter.stored)
            specs[parameter.path] = Errors(worker, parameter.stored)
        return specs

    def specs_by_device(self) -> dict[str, Errors]:
        """How they are laid out in a state: a leading dim of devices, of which each has one."""
        every_device = PartitionSpec(self.strategy.every_axis)
        return {parameter.path: Errors(every_device, every_device) for parameter in self.parameters}

    def by_worker(self, errors: ErrorsByPath) -> ErrorsByPath:
        """What a device stores of them in a checkpoint, from the rows that it has."""
        stored = {}
        for parameter in self.parameters:
            stored[parameter.path] = self._whole(parameter, errors[parameter.path])
        return stored

    def by_device(self, errors: ErrorsByPath) -> ErrorsByPath:
        """The rows that a device has of them, from what is stored."""
        rows = {}
        for parameter in self.parameters:
            rows[parameter.path] = self._rows(parameter, errors[parameter.path])
        return rows

    def _whole(self, parameter: Parameter, errors: Errors) -> Errors:
        workers, shared = self.workers(parameter), self.shared(parameter)
        cut = pieces(self.strategy.exchange, parameter, self.strategy.device_mesh.shape)
        sharding = NamedSharding(self.strategy.device_mesh, parameter.stored)
        local_shape = sharding.shard_shape(parameter.shape)
        worker = _gathered(errors.worker, shared)
        # A server has one row of one part. Gathered over the workers, which are the servers too,
        # rows are that part; and then all parts are put together.
        part = _gathered(errors.server, workers)
        server = _gathered(part[None], shared)
        return Errors(cut.whole(worker, local_shape)[None], cut.whole(server, local_shape))

    def _rows(self, parameter: Parameter, errors: Errors) -> Errors:
        workers, shared = self.workers(parameter), self.shared(parameter)
        cut = pieces(self.strategy.exchange, parameter, self.strategy.device_mesh.shape)
        # Without devices that hold the same, there is one part.
        # Each of the devices that hold the same took its part of the rows; here it takes them back.
        part = lax.axis_index(shared) if shared else 0
        worker = cut.all_rows(errors.worker)[part]
        server = cut.all_rows(errors.server)[part]
        return Errors(worker[None], server[lax.axis_index(workers)][None])

    def for_these_workers(self, errors: ErrorsByPath) -> ErrorsByPath:
        """Errors by worker for as many workers as there are now.

        If there were others, each worker has what the mean of those was owed.
        """
        spread = {}
        for parameter in self.parameters:
            worker, server = errors[parameter.path]
            # How many workers there are on this mesh.
            sizes = self.strategy.device_mesh.shape
            count = parts_over(sizes, self.workers(parameter))
            # What is owed is the mean over workers, and it stays the same if each has that mean.
            if worker.shape[0] != count:
                worker = jnp.broadcast_to(jnp.mean(worker, 0), (count, *worker.shape[1:]))
            spread[parameter.path] = Errors(worker, server)
        return spread


@lru_cache(maxsize=64)
def _program(conversion: _Conversion, *, by_worker: bool) -> Callable[[ErrorsByPath], ErrorsByPath]:
    """The compiled program that lays errors out by worker, or from there by device.

    It is remembered, since a run saves a checkpoint many times.
    """
    mesh = conversion.strategy.device_mesh
    # A checkpoint has the errors of each worker as a whole; on the mesh each device has a part.
    specs_by_worker = conversion.specs_by_worker()
    specs_by_device = conversion.specs_by_device()
    if by_worker:
        on_devices = jax.shard_map(
            conversion.by_worker,
            mesh=mesh,
            in_specs=(specs_by_device,),
            out_specs=specs_by_worker,
            check_vma=False,
        )
        return jax.jit(on_devices)
    on_devices = jax.shard_map(
        conversion.by_device,
        mesh=mesh,
        in_specs=(specs_by_worker,),
        out_specs=specs_by_device,
        check_vma=False,
    )

    def spread_by_device(errors: ErrorsByPath) -> ErrorsByPath:
        return on_devices(conversion.for_these_workers(errors))

    return jax.jit(spread_by_device)


def _gathered(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """The arrays of all devices along some axes, one after the other in their first dim."""
    if not axes:
        return x
    return lax.all_gather(x, axes, axis=0, tiled=True)


def _reordered_errors(layout: Layout, errors: ErrorsByPath, natural: bool) -> ErrorsByPath:
    """Errors by worker, with layers in the model's order or in that of a pipeline's stages."""
    if layout.strategy.pipeline is None:
        return errors
    names = dict(layout.names)
    move = Mover(layout.strategy, names, natural)
    moved: ErrorsByPath = {}
    for path, (worker, server) in errors.items():
        dim = stacked_dim(names.get(path))
        # A worker's errors have a dim of workers before those of the parameter.
        dim_of_worker = None if dim is None else dim + 1
        moved[path] = Errors(move(worker, path, dim_of_worker), move(server, path, dim))
    return moved
