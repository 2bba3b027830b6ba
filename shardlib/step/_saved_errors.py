"""How a checkpoint stores what a compressed exchange left over: for each worker, in the shape of
the parameter.

In a state, each device has the errors of its own pieces. In a checkpoint, those of a parameter are
arrays that no longer depend on how the mesh cut them, see `_error_forms`:

    worker, or error    (workers, *shape of the parameter)
    server              (*shape of the parameter)

As many workers as there were get back exactly what they had, however the rest of the mesh has
changed. The mean of messages is owed the mean of the workers' errors and that of the servers. So
another number of workers each get the mean of what those before had, and the same is owed.

What a checkpoint lacks is zero: nothing was left out of an exact sum, or of codes without feedback.
The factor from which the next one is found, `warm`, is owed to nobody. It is dropped where it does
not fit, and another one begins from nothing. All else that a state has no place for is refused.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from shardlib.collectives._exact import Parameter
from shardlib.collectives._feedback import Feedback
from shardlib.step._error_forms import OWN, WARM, ErrorForm, form_of
from shardlib.step._exchange import ErrorsByPath
from shardlib.step._layer_order import Mover, reordered, stacked_dim
from shardlib.step._saved_workers import like_saved_workers, with_these_workers
from shardlib.step._state import Layout, State
from shardlib.step._strategy import Strategy
from shardlib.step._workers import spread, workers_in


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

    The result is what `from_saved` takes. It has errors only of what the checkpoint has: a run
    without compression has none, and one of another number of workers more or fewer of them.
    """
    had_workers, has_workers = workers_in(shapes) is not None, state.workers is not None
    saved_fields = [path for path in shapes if path.startswith("errors/")]
    is_owed = any(not path.endswith(f"/{WARM}") for path in saved_fields)
    if is_owed and had_workers != has_workers:
        raise ValueError(
            "The checkpoint has what codes have left out of "
            f"{'moves of workers' if had_workers else 'gradients'}, and in the state there would "
            f"be what they leave out of {'moves of workers' if has_workers else 'gradients'}: one "
            "is not owed to the other. Restore it under its own exchange, and go on from its "
            "parameters, `state.with_weights`."
        )
    state = like_saved_workers(state, shapes)
    strategy = state.layout.strategy
    errors: ErrorsByPath = {}
    for path, parameter in _exchanged_parameters(state).items():
        wanted = _like_stored(strategy, parameter, shapes)
        fields = {}
        for name, leaf in wanted._asdict().items():
            fields[name] = leaf if f"errors/{path}/{name}" in shapes else None
        if any(leaf is not None for leaf in fields.values()):
            errors[path] = type(wanted)(**fields)
    # Factors that fit nothing are read whole, as they are.
    whole = NamedSharding(strategy.device_mesh, PartitionSpec())
    for path in saved_fields:
        parameter_path, _, field = path.removeprefix("errors/").rpartition("/")
        found = errors.get(parameter_path, Feedback(None, None))
        if field != WARM or not isinstance(found, Feedback):
            continue
        if found.warm is None or found.warm.shape != shapes[path]:
            errors[parameter_path] = found._replace(warm=_abstract(shapes[path], whole))
    return state.replaced(errors=errors)


def _like_stored(
    strategy: Strategy, parameter: Parameter, shapes: Mapping[str, tuple[int, ...]]
) -> Any:
    """What is stored of a parameter's errors, by as many workers as a checkpoint has of them."""
    form = form_of(strategy, parameter)
    # Without anything in the checkpoint there are as many as now, with errors of zero.
    workers = form.workers
    stored_shape = shapes.get(f"errors/{parameter.path}/{form.own}", ())
    if stored_shape and stored_shape[1:] == parameter.shape:
        workers = stored_shape[0]
    # Errors of a number of workers that the devices cannot share evenly are read whole.
    is_split = workers % form.workers == 0
    return jax.tree.map(
        lambda shape, spec: _abstract(shape, NamedSharding(strategy.device_mesh, spec)),
        form.shapes(workers),
        form.specs(is_split=is_split),
        is_leaf=lambda node: type(node) is tuple,
    )


def from_saved(state: State, like: State) -> State:
    """The state that `saved` made this one of, on the mesh of `like`.

    If there were other workers then, or no compression, it is a state that owes as much.
    """
    # The mean of workers is in the model's order, as all that is saved.
    state = reordered(with_these_workers(state, like), natural=False)
    if not like.errors:
        return state.replaced(errors=like.errors)
    if not state.errors:
        return state.replaced(errors=_zeros_like(like.errors))
    parameters = tuple(_exchanged_parameters(like).values())
    errors = _completed(state.layout.strategy, parameters, state.errors)
    errors = _reordered_errors(state.layout, errors, natural=False)
    conversion = _Conversion(state.layout.strategy, parameters)
    return state.replaced(errors=_program(conversion, by_worker=False)(errors))


def _completed(
    strategy: Strategy, parameters: tuple[Parameter, ...], read: ErrorsByPath
) -> ErrorsByPath:
    """All that is stored of some parameters' errors: what was read of it, and zeros else."""
    errors: ErrorsByPath = {}
    missing: dict[tuple[str, str], jax.ShapeDtypeStruct] = {}
    for parameter in parameters:
        path = parameter.path
        wanted = _like_stored(strategy, parameter, {})
        fields: dict[str, Any] = {}
        for name, leaf in wanted._asdict().items():
            found = getattr(read.get(path), name, None)
            fields[name] = found if leaf is not None else None
            if leaf is not None and (found is None or (name == WARM and found.shape != leaf.shape)):
                missing[path, name] = leaf
        errors[path] = type(wanted)(**fields)
    if missing:
        # One program makes all of them.
        for (path, name), zeros in _zeros_like(missing).items():
            errors[path] = errors[path]._replace(**{name: zeros})
    return errors


def _abstract(shape: tuple[int, ...], sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    # Errors are float32 whatever the parameter is: what a code leaves out is small.
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)


def _zeros_like(errors: Any) -> Any:
    """Zeros, each made in its place on the mesh."""

    def zeros() -> Any:
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

    def specs_by_worker(self) -> dict[str, Any]:
        """How errors are laid out as a checkpoint stores them."""
        return {form.parameter.path: form.specs() for form in self.forms}

    def specs_by_device(self) -> dict[str, Any]:
        """How they are laid out in a state: a leading dim of devices, of which each has one."""
        every_device = PartitionSpec(self.strategy.every_axis)
        specs = {}
        for form in self.forms:
            specs[form.parameter.path] = jax.tree.map(lambda _: every_device, form.specs())
        return specs

    @property
    def forms(self) -> list[ErrorForm]:
        """The form in which the errors of each parameter are stored."""
        return [form_of(self.strategy, parameter) for parameter in self.parameters]

    def by_worker(self, errors: ErrorsByPath) -> ErrorsByPath:
        """What a device stores of them in a checkpoint, from what it has."""
        stored = {}
        for form in self.forms:
            own = jax.tree.map(lambda x: x[0], errors[form.parameter.path])
            stored[form.parameter.path] = form.stored(own)
        return stored

    def by_device(self, errors: ErrorsByPath) -> ErrorsByPath:
        """What a device has of them, from what is stored."""
        local = {}
        for form in self.forms:
            own = form.local(errors[form.parameter.path])
            local[form.parameter.path] = jax.tree.map(lambda x: x[None], own)
        return local

    def for_these_workers(self, errors: ErrorsByPath) -> ErrorsByPath:
        """Errors by worker for as many workers as there are now.

        If there were others, each worker has what the mean of those was owed: what is owed is the
        mean over workers, and it stays the same if each has that mean.
        """
        spread_errors = {}
        for form in self.forms:
            stored: Any = errors[form.parameter.path]
            own = getattr(stored, form.own)
            if own is not None:
                stored = stored._replace(**{form.own: spread(own, form.workers)})
            spread_errors[form.parameter.path] = stored
        return spread_errors


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


def _reordered_errors(layout: Layout, errors: ErrorsByPath, natural: bool) -> ErrorsByPath:
    """Errors by worker, with layers in the model's order or in that of a pipeline's stages."""
    if layout.strategy.pipeline is None:
        return errors
    names = dict(layout.names)
    move = Mover(layout.strategy, names, natural)
    moved: ErrorsByPath = {}
    for path, stored in errors.items():
        dim = stacked_dim(names.get(path))
        leaves: dict[str, Any] = {}
        for name, leaf in stored._asdict().items():
            # A worker's errors have a dim of workers before those of the parameter.
            has_workers = name in OWN
            moved_dim = dim if dim is None or not has_workers else dim + 1
            leaves[name] = None if leaf is None else move(leaf, path, moved_dim)
        moved[path] = stored._replace(**leaves)
    return moved
