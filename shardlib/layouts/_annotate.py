"""Annotations: names on the dims of arrays while a function is traced.

A model calls `shard(x, "batch", "embed")`, and the rules in force say what that means:

    with use(rules, mesh)  -->  a scope with the rules  -->  shard: names and shape to a spec,
                                                             and a constraint for the partitioner

The rules in force are the only ambient state of the library. They live in a context that is part of
JAX's jit cache key, so a function traced under one set of rules is traced again under another;
under a plain thread-local the first trace would be reused and the second rules ignored.
"""

import contextlib
import math
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from shardlib.checks import _arguments as check
from shardlib.checks import _arrays as check_arrays
from shardlib.layouts._flax_rules import Pairs, in_force, pairs_in_force, pairs_of
from shardlib.layouts._remat_policy import Remat, checked_remat, kept_by_blocks
from shardlib.layouts._resolve import Resolution, resolve
from shardlib.layouts._rules import AxisRules, ShardingWarning
from shardlib.layouts._specs import as_tuple, check_spec, keep_axes, mesh_text
from shardlib.machine._mesh import slow_axes
from shardlib.machine._torus import TorusDims, torus_dims


@dataclass(frozen=True, eq=False)
class UsedNames:
    """The names that annotations used while a function was traced, to be written down in `names`.

    `losses` has the loss as it was traced last, whose blocks a budget of memory asks for.

    Two of these are never equal, and the one in force is part of JAX's jit cache key. A function
    with a `jax.jit` of its own is therefore traced again for each of them, and each has all the
    names.
    """

    names: set[str] = field(default_factory=set)
    losses: list[Any] = field(default_factory=list)


@dataclass(frozen=True)
class Scope:
    """What annotations read while a function is traced.

    `rules` say what names mean; None is unsharded on purpose. `remat` is what blocks keep of their
    activations, None for everything. `used` is where annotations write down their names, if anyone
    asked for them. `mesh` is the mesh that is really in force where a function is traced as if no
    axis of it were manual, see `all_automatic`. `flax` are Flax's own rules, where the user put
    some in force: Flax's constraints follow them, and otherwise they follow `rules`. `torus` and
    `slow` say where the devices of the mesh are, which JAX's abstract mesh does not know.
    """

    rules: AxisRules | None
    remat: Remat | None = None
    used: UsedNames | None = None
    mesh: AbstractMesh | None = None
    flax: Pairs | None = None
    torus: TorusDims = ()
    slow: tuple[str, ...] = ()

    def record(self, names: Iterable[Any]) -> None:
        """Write down the names that an annotation used, if anyone asked for them.

        Dims without a name, which have None or UNCONSTRAINED, are left out.
        """
        if self.used is not None:
            self.used.names.update(name for name in names if isinstance(name, str))


# Part of the key under which `jax.jit` finds a function that was traced before.
_scope = jax.make_user_context(None)


def current_scope() -> Scope | None:
    """The scope in force, or None outside any.

    Rules come into force with `use`, and a scope without rules with `unsharded`.
    """
    return _scope.value


def current_mesh() -> AbstractMesh:
    """The mesh in force, which says which axes are manual.

    Under `all_automatic` that is the mesh outside it, and not the one that JAX knows of.
    """
    scope = _scope.value or Scope(None)
    return scope.mesh or jax.sharding.get_abstract_mesh()


def sizes_on_torus(axis: str) -> tuple[int, ...]:
    """How many devices an axis has along each dim of a TPU's torus, the outermost first.

    It is one size where the axis lies along one dim, or where there is no torus. An abstract mesh
    has no places of devices: they are those of the mesh that `use` put in force.
    """
    size = jax.sharding.get_abstract_mesh().shape[axis]
    scope = _scope.value
    if scope is not None:
        for name, sizes in scope.torus:
            if name == axis and math.prod(sizes) == size:
                return sizes
    return (size,)


def mesh_of_shards() -> AbstractMesh:
    """The mesh in force, for what runs on each device's own shard, in a `shard_map` of its own.

    An error under `all_automatic`, where such a `shard_map` would take axes for automatic that are
    manual already.
    """
    scope = _scope.value
    if scope is not None and scope.mesh is not None:
        raise ValueError(
            "The loss has a constraint that names an axis of the data, over which the step is "
            "manual, besides a layer that runs on each device's own shard (a kernel, experts, "
            "`gather_batch`); JAX cannot trace the two together. Write the constraint as "
            "`sl.shard(x, names)`, or leave the axes of the data out of it."
        )
    return jax.sharding.get_abstract_mesh()


def slow_axes_in_scope() -> tuple[str, ...]:
    """The axes of the mesh that `use` put in force along which the slow network joins devices."""
    return (_scope.value or Scope(None)).slow


@contextlib.contextmanager
def all_automatic(mesh: AbstractMesh) -> Iterator[None]:
    """Trace as if no axis were manual, on `mesh`, in a `with` statement.

    Constraints may then name any axis. What asks for `current_mesh` sees the mesh that is really in
    force, with its manual axes.
    """
    scope = replace(_scope.value or Scope(None), mesh=jax.sharding.get_abstract_mesh())
    with jax.sharding.use_abstract_mesh(mesh), _scope(scope):
        yield


@contextlib.contextmanager
def use(
    rules: AxisRules, mesh: Mesh | None = None, *, remat: str | Remat = "none"
) -> Iterator[Scope]:
    """Put rules, and a mesh if given, in force: annotations inside mean what these rules say.

    Flax's own constraints, `nn.with_logical_constraint`, go by them too, unless other rules were
    put in force for Flax, with `nn.logical_axis_rules`. With a mesh, NNX modules built inside are
    laid out by the names of their variables as these are made; without one, they are not laid out.
    `remat` is what blocks marked with `sl.remat` keep, by default everything.

    >>> import shardlib as sl
    >>> with sl.use(sl.AxisRules(batch="data"), sl.make_mesh("data=8")):
    ...     sl.shard(jnp.zeros((16, 4)), "batch", None).sharding.spec
    P('data', None)
    """
    if not isinstance(rules, AxisRules) or not isinstance(mesh, Mesh | None):
        raise ValueError(
            "`use(rules, mesh)` takes `AxisRules` and a mesh, `sl.make_mesh(...)`; got "
            f"{check.shown(rules)} and {check.shown(mesh)}. For no sharding on purpose there is "
            "`sl.unsharded()`; of a strategy, `strategy.scope()`."
        )
    kept = kept_by_blocks(checked_remat("use", "remat", remat))
    if kept is not None and kept.chain is not None:
        raise ValueError(
            f"`use(remat={check.shown(remat)})`: loops over blocks keep few of their inputs in a "
            'step, `Strategy(remat=...)`; outside of it they keep all, `remat="full"`.'
        )
    with put_in_force(rules, mesh, kept) as scope:
        yield scope


@contextlib.contextmanager
def put_in_force(
    rules: AxisRules, mesh: Mesh | None, kept: Remat | None, slow: tuple[str, ...] | None = None
) -> Iterator[Scope]:
    """Put rules, a mesh if given, and what marked blocks keep in force, as `use` does.

    The axes along which the slow network joins devices are read off the mesh where `slow` is None.
    """
    if mesh is not None:
        rules.check_mesh(mesh.shape)
    outer = _scope.value
    # What the user chose for Flax stays in force; what an outer `use` set for it does not.
    flax = _rules_of_flax(outer)
    scope = Scope(rules, kept, flax=flax)
    if outer is not None:
        scope = replace(scope, mesh=outer.mesh, torus=outer.torus, slow=outer.slow)
    if mesh is not None:
        slow = slow_axes(mesh) if slow is None else slow
        scope = replace(scope, torus=torus_dims(mesh), slow=slow)
    # Flax's variables cannot be laid out as they are made where there is no mesh.
    no_mesh = mesh is None and jax.sharding.get_abstract_mesh().empty
    pairs = pairs_of(rules) if flax is None else flax
    flax_rules = in_force(pairs, eager=False if no_mesh else None)
    mesh_in_force = contextlib.nullcontext() if mesh is None else _mesh_in_force(mesh)
    with mesh_in_force, _scope(scope), flax_rules:
        yield scope


@contextlib.contextmanager
def recording(used: UsedNames) -> Iterator[None]:
    """Have annotations under the rules in force write down their names in `used`.

    A function that is traced inside is traced anew, even if it was traced under these rules before.
    """
    with _scope(replace(_required_scope("recording"), used=used)):
        yield


def _rules_of_flax(outer: Scope | None) -> Pairs | None:
    """Flax's rules in force, if the user put them there; None if an outer `use` did, or none are.

    `outer` is the scope in force.
    """
    pairs = pairs_in_force()
    pairs_of_outer: Pairs = ()
    if outer is not None and outer.flax is None:
        pairs_of_outer = pairs_of(outer.rules)
    if pairs in ((), pairs_of_outer):
        return None
    return pairs


def _mesh_in_force(mesh: Mesh) -> Any:
    """A context in which a mesh is in force, or an error inside a trace under another one."""
    try:
        return jax.set_mesh(mesh)
    except ValueError as error:
        # Inside a trace the mesh cannot be set, and need not be where it is in force already.
        traced_under = jax.sharding.get_abstract_mesh()
        if traced_under.shape == mesh.shape:
            return contextlib.nullcontext()
        # Under an abstract mesh, `jax.jit` would run on one device whatever has no sharding, and
        # ignore every annotation.
        situation = "no mesh is in force"
        if traced_under.shape:
            situation = f"the mesh `{dict(traced_under.shape)}` is in force"
        raise ValueError(
            f"The mesh `{dict(mesh.shape)}` cannot come into force inside a traced function, where "
            f"{situation}. Put it in force around the call: `with strategy.scope(): "
            "jax.jit(function)(...)`, or `with sl.use(rules, mesh):`; so too around `lax.scan` and "
            "`jax.make_jaxpr`."
        ) from error


@contextlib.contextmanager
def mesh_of_step(mesh: Mesh) -> Iterator[None]:
    """Let a mesh come into force inside a trace without one, in a `with` statement.

    That is safe for a `jax.jit` whose shardings name the mesh's devices. Outside a trace, and under
    another mesh, it does nothing.
    """
    tracing = _mesh_outside_traces() is None
    # The shardings say where everything is, so no annotation is ignored under an abstract mesh.
    if tracing and jax.sharding.get_abstract_mesh().empty:
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            yield
    else:
        yield


@contextlib.contextmanager
def unsharded() -> Iterator[None]:
    """Say that there are no rules here, on purpose, in a `with` statement.

    Annotations then check that every dim has a name, and return the array as it is.

    >>> import shardlib as sl
    >>> with sl.unsharded():
    ...     sl.shard(jnp.ones(3), "anything").shape
    (3,)
    """
    with _scope(Scope(None)), in_force((), eager=False):
        yield


def shard(x: jax.Array, *names: Any) -> jax.Array:
    """Name every dim of an array; the rules in force decide how the partitioner lays it out.

    A name is a string the rules know, `None` for a dim that is not split, or
    `PartitionSpec.UNCONSTRAINED` to leave a dim to the partitioner. On a mesh with explicit axes
    the array is resharded. Inside a `shard_map` the batch leaves out the axes it is split over
    already; any other name that would lose its axis is an error.

    >>> import shardlib as sl
    >>> with sl.use(sl.AxisRules(batch="data", act_mlp="model"), sl.make_mesh("data=2,model=4")):
    ...     sl.shard(jnp.zeros((8, 16)), "batch", "act_mlp").sharding.spec
    P('data', 'model')
    """
    scope = _required_scope("shard")
    check_arrays.array(
        "shard", "x", x, "one array, and a name for each of its dims; map it over a tree"
    )
    if scope.rules is None:
        # The one thing that can be checked without rules.
        if len(names) != x.ndim:
            raise ValueError(
                f"An array of shape {x.shape} was given {len(names)} names {check.shown(names)}: "
                "name every dim once."
            )
        return x
    mesh = _required_mesh("shard")
    scope.record(names)
    resolution = resolve(
        scope.rules,
        mesh.shape,
        names,
        x.shape,
        what="the annotated array",
        manual=frozenset(mesh.manual_axes),
    )
    warn(resolution.said)
    if resolution.padded_shape == x.shape:
        return constrain(x, resolution.spec)
    return _constrain_padded(x, resolution)


def _constrain_padded(x: jax.Array, resolution: Resolution) -> jax.Array:
    """Lay out an array unevenly, which its last shards do not fill.

    It is padded for the layout and cut back for the value: the partitioner keeps the shards where
    the padding put them.
    """
    widths: list[tuple[int, int]] = []
    for size, padded_size in zip(x.shape, resolution.padded_shape, strict=True):
        widths.append((0, padded_size - size))
    padded = jnp.pad(x, widths)
    return lax.slice(constrain(padded, resolution.spec), (0,) * x.ndim, x.shape)


def split(
    x: jax.Array, dim: int, parts: int, *, axis: str | tuple[str, ...] | None = None
) -> jax.Array:
    """Split one dim into `parts`, every other dim whole: GShard's `split`.

    The axes are the mesh's own: the one whose size is `parts`, or all of them together. Where
    several would do, say which: `axis="model"`.

    >>> import shardlib as sl
    >>> with sl.use(sl.AxisRules(), sl.make_mesh("data=2,model=4")):
    ...     sl.split(jnp.zeros((8, 16)), 1, 4).sharding.spec
    P(None, 'model')
    """
    scope = _required_scope("split")
    check_arrays.array("split", "x", x)
    check.whole("split", "dim", dim)
    check.whole("split", "parts", parts, "a number of parts", least=1)
    if axis is not None and not isinstance(axis, str):
        check.texts("split", "axis", axis, "an axis of the mesh, or a tuple of several")
    if scope.rules is None:
        return x
    mesh = _required_mesh("split")
    if not -x.ndim <= dim < x.ndim:
        raise ValueError(
            f"`split(x, dim={dim}, ...)` on an array of shape {x.shape}, which has {x.ndim} dims."
        )
    axes = as_tuple(axis)
    if axis is None:
        axes = _axes_of_size(mesh, parts)
    entries: list[Any] = [None] * x.ndim
    entries[dim] = axes or None
    spec = PartitionSpec(*entries)
    # Over manual axes the array is split already, so they count as unknown here.
    check_spec(_automatic_sizes(mesh), spec, x.shape, what="the array to split")
    devices = math.prod(map(mesh.shape.__getitem__, axes))
    # Which is so of axes that were given, and of none that were found by their size.
    if devices != parts:
        raise ValueError(f"`split(..., parts={parts}, axis={axis!r})`: that is {devices} devices.")
    return constrain(x, spec)


def replicate(x: jax.Array) -> jax.Array:
    """Lay out the whole array on every device: GShard's `replicate`.

    Inside a `shard_map` that means every device along its automatic axes.

    >>> import shardlib as sl
    >>> with sl.use(sl.AxisRules(), sl.make_mesh("data=2,model=4")):
    ...     sl.replicate(jnp.zeros((8, 16))).sharding.is_fully_replicated
    True
    """
    scope = _required_scope("replicate")
    check_arrays.array("replicate", "x", x)
    if scope.rules is None:
        return x
    _required_mesh("replicate")
    return constrain(x, PartitionSpec(*[None] * x.ndim))


def constrain(x: jax.Array, spec: PartitionSpec) -> jax.Array:
    """Lay out an array as a spec says, whatever the type of the mesh axes in scope.

    A concrete array is moved, wherever it is now. A traced one is resharded over explicit axes and
    constrained over automatic ones. Manual axes must not be in the spec.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if not isinstance(x, Tracer):
        devices = _mesh_outside_traces()
        if devices is not None:
            # No partitioner will decide about what is left to it.
            entries = [None if entry is PartitionSpec.UNCONSTRAINED else entry for entry in spec]
            return jax.device_put(x, NamedSharding(devices, PartitionSpec(*entries)))
    if mesh.explicit_axes:
        x = jax.sharding.reshard(x, keep_axes(_constrained(spec), mesh.explicit_axes))
    if mesh.auto_axes:
        if mesh.explicit_axes:
            # A constraint names only axes of its own type.
            spec = keep_axes(_constrained(spec), mesh.auto_axes)
        x = lax.with_sharding_constraint(x, spec)
    return x


def _mesh_outside_traces() -> Mesh | None:
    """The mesh of devices in force, or None while a function is being traced.

    In a trace an array may be concrete all the same: a constant of the function.
    """
    try:
        return jax.sharding.get_mesh()
    except ValueError:  # what JAX raises inside a trace
        return None


def warn(remarks: tuple[str, ...], depth: int = 1) -> None:
    """Warn of what policies did, once per place that asked for it.

    The warning points at the caller of the public function, which is `depth` calls above this one.
    """
    for remark in remarks:
        warnings.warn(remark, ShardingWarning, stacklevel=depth + 2)


def _constrained(spec: PartitionSpec) -> PartitionSpec:
    """The spec, if it says how every dim is split, as explicit axes need it."""
    if any(entry is PartitionSpec.UNCONSTRAINED for entry in spec):
        raise ValueError(
            f"{spec} leaves a dim to the partitioner; on a mesh with explicit axes "
            "every dim is named."
        )
    return spec


def _required_scope(verb: str) -> Scope:
    """The scope in force, or an error that names the function which needs one."""
    scope = _scope.value
    if scope is None:
        raise ValueError(
            f"`{verb}` outside any rules: nothing says what the names mean. Trace the model under "
            "`with sl.use(rules, mesh):`, as `sl.init` and `sl.train_step` do, or say that there "
            "is no sharding on purpose: `with sl.unsharded():`."
        )
    return scope


def _required_mesh(verb: str) -> AbstractMesh:
    """The mesh in force, or an error that names the function which needs one."""
    mesh = current_mesh()
    # Without a mesh there would be nothing to lay out, and no word about it.
    if mesh.empty:
        raise ValueError(
            f"`{verb}` has rules and no mesh in scope. Give both: `with sl.use(rules, mesh):`."
        )
    return mesh


def _automatic_sizes(mesh: AbstractMesh) -> dict[str, int]:
    """The sizes of the axes over which no surrounding `shard_map` is manual."""
    return {axis: size for axis, size in mesh.shape.items() if axis not in mesh.manual_axes}


def _axes_of_size(mesh: AbstractMesh, parts: int) -> tuple[str, ...]:
    """The axes that split into so many parts, or an error where several or none do.

    They are one axis, or else all axes together.
    """
    usable = _automatic_sizes(mesh)
    if parts == 1:  # no axes, rather than one of size one
        return ()
    candidates = [(axis,) for axis, size in usable.items() if size == parts]
    if not candidates and math.prod(usable.values()) == parts:
        candidates = [tuple(usable)]
    if len(candidates) == 1:
        return candidates[0]
    which = "several axes have" if candidates else "no axis has"

    raise ValueError(
        f"`split(..., parts={parts})`: {which} {parts} devices on the mesh {mesh_text(usable)}. "
        "Name the axes: `axis=...`."
    )
