"""Names on parameters, and models as trees: the one file that takes Flax models apart.

To the rest of the library a model is a hashable `definition`, which can put it together again, and
three trees: `params`, which the optimizer moves; `streams`, the keys and counts of NNX's random
streams; and `rest`, whatever else it carries, such as running statistics. Trees of NNX modules are
nested dicts; any other model keeps its own structure, with `None` where a leaf belongs to another
of the three.
"""

import collections
import functools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from flax import linen, nnx
from flax.core import meta
from jax.experimental.layout import Format
from jax.sharding import NamedSharding, PartitionSpec

from shardlib._tree import map_named, named_leaves, path_name
from shardlib.checks import _arguments as check
from shardlib.checks import _arrays as check_arrays
from shardlib.layouts._flax_rules import Pairs, in_force, laid_out_eagerly

Model = TypeVar("Model")
Names = tuple[str | None, ...] | PartitionSpec | None
"""The names of a parameter's dims; a `PartitionSpec` speaks of mesh axes directly; None is a
parameter without names.
"""


def logical(initializer: Callable[..., Any], *names: str | None) -> Callable[..., Any]:
    """Name the dims of the parameter that an NNX initializer makes.

    The names ride on the `nnx.Variable`, and `nnx.vmap` and `nnx.scan` with `transform_metadata`
    keep them in line with stacked dims. (In Linen, Flax's own `nn.with_logical_partitioning` does
    this.) What is built by `sl.init` is born sharded; what is built under `sl.use(rules, mesh)` is
    laid out by its names as it is made.

    >>> kernel_init = logical(nnx.initializers.lecun_normal(), "embed", "mlp")
    >>> nnx.Linear(4, 8, kernel_init=kernel_init, rngs=nnx.Rngs(0)).kernel.out_sharding
    ('embed', 'mlp')
    """
    check.function(
        "logical",
        "initializer",
        initializer,
        "an initializer, a function of a key, a shape and a dtype",
    )
    if strange := [name for name in names if not (name is None or isinstance(name, str))]:
        raise ValueError(
            '`logical(initializer, ...)` takes the names one by one, `"embed", "mlp"`; got '
            f"{check.shown(strange[0])}."
        )
    # Eager sharding demands rules and a mesh as soon as the variable exists: without them, names
    # are for later.

    @functools.wraps(initializer)
    def named(*args: Any, **kwargs: Any) -> Any:
        mesh = jax.sharding.get_abstract_mesh()
        eager = laid_out_eagerly(not mesh.empty and not mesh.manual_axes)
        return nnx.with_metadata(initializer, out_sharding=names, eager_sharding=eager)(
            *args, **kwargs
        )

    return named


def annotate(model: Model, names: Mapping[str, tuple[str | None, ...] | PartitionSpec]) -> Model:
    """Name the parameters of a model that cannot be edited.

    Names go by patterns, which match the whole of a parameter's path.

    NNX modules are changed in place and returned; any other tree is returned with its leaves boxed,
    as Linen's `nn.with_logical_partitioning` would have. A pattern that matches nothing is an
    error, and so are two that name one parameter differently.

    >>> params = annotate({"up": {"kernel": jnp.zeros((4, 8)), "bias": jnp.zeros(8)}},
    ...     {"up/kernel": ("embed", "mlp")})
    >>> params["up"]["kernel"].names
    ('embed', 'mlp')
    """
    check.kind(
        "annotate", "names", names, Mapping, "a mapping from patterns of paths to the names of dims"
    )
    _refuse_modules_in_trees(model)
    of_module = dict(nnx_variables(model)) if is_nnx(model) else None
    leaves = of_module or dict(named_leaves(model, is_leaf=_is_box))
    alone = leaves.get("")  # a model may be one array, whose path is empty
    if not leaves or (alone is not None and not hasattr(_unbox(alone), "shape")):
        takes = "a model: an NNX module, or a tree of arrays with paths, such as Linen's variables"
        raise check.refusal("annotate", "model", model, takes)
    chosen: dict[str, Names] = {}
    for pattern, value in names.items():
        check.pattern("annotate", "names", pattern)
        named = isinstance(value, tuple) and all(isinstance(name, str | None) for name in value)
        if not named and not isinstance(value, PartitionSpec):
            raise ValueError(
                f"`annotate` names dims by a tuple of names or a `PartitionSpec`; `{pattern}` has "
                f"{check.shown(value)}."
            )
        matched = [path for path in leaves if re.fullmatch(pattern, path)]
        if not matched:
            raise ValueError(
                f"`annotate`: the pattern `{pattern}` matches no parameter. The paths are: "
                f"{', '.join(leaves)}."
            )
        for path in matched:
            if chosen.setdefault(path, value) != value:
                raise ValueError(
                    f"`{path}` is named {chosen[path]} by one pattern and {value} by `{pattern}`."
                )
            check_arrays.array("annotate", path, _unbox(leaves[path]), abstract=True)
            _check_rank(path, value, jnp.shape(_unbox(leaves[path])))
    if of_module is not None:
        for path, value in chosen.items():
            of_module[path].set_metadata(out_sharding=value)
        return model
    return map_named(
        lambda path, leaf: _box(leaf, chosen[path]) if path in chosen else leaf,
        model,
        is_leaf=_is_box,
    )


class ModelParts(NamedTuple):
    """A model taken apart; `names` go by the path of a leaf in `params` or `rest`."""

    definition: "Definition"
    params: Any
    streams: Any
    rest: Any


@dataclass(frozen=True)
class Definition:
    """How to put a model together: NNX's graph definition, or None for a tree; and what counts as a
    parameter.
    """

    graph: Any
    trainable: Any

    def merge(self, params: Any, streams: Any, rest: Any) -> Any:
        """The model with these values; a new object at every call."""
        if self.graph is not None:
            return nnx.merge(self.graph, params, streams, rest)
        return jax.tree.map(
            lambda p, r: r if p is None else p, params, rest, is_leaf=lambda leaf: leaf is None
        )

    def state_of(self, model: Any) -> tuple[Any, Any]:
        """The streams and the rest of a model that `merge` made, as they are now."""
        parts = take_apart(model, self.trainable)[0]
        return parts.streams, parts.rest


def take_apart(model: Any, trainable: Any = None) -> tuple[ModelParts, dict[str, Names]]:
    """Take a model apart, and read the names of its leaves.

    `trainable` says which leaves are parameters: for NNX a filter (`nnx.Param` by default), for a
    tree a predicate of path and leaf. By default that is Linen's collection `params` where there is
    one, else every floating-point leaf.
    """
    if is_nnx(model):
        graph, *states = nnx.split(model, _filter(trainable), nnx.RngState, ...)
        _check_static(graph)
        names = {path: _names_of_variable(variable) for path, variable in nnx_variables(model)}
        params, streams, rest = (nnx.to_pure_dict(state) for state in states)
        return ModelParts(Definition(graph, trainable), params, streams, rest), names
    _refuse_modules_in_trees(model)
    found = named_leaves(model, is_leaf=_is_box)
    if strange := [path for path, leaf in found if not hasattr(_unbox(leaf), "dtype")]:
        raise ValueError(
            f"`{strange[0] or 'the whole'}` of the model is no array. Close over constants and "
            "functions instead."
        )
    names = _complete_names_of_boxes(found)
    if len(names) < len(found):
        twice = next(
            path
            for path, count in collections.Counter(path for path, _ in found).items()
            if count > 1
        )
        raise ValueError(
            f"Two leaves of the model are called `{twice}`; rename the keys that hold a `/`."
        )
    tree = jax.tree.map(_unbox, model, is_leaf=_is_box)
    takes = "a function of a path and a leaf that says whether it is a parameter"
    check.function("init", "trainable", trainable, takes, optional=True)
    is_param = trainable or _default_trainable(tree)
    params = map_named(lambda path, leaf: leaf if is_param(path, leaf) else None, tree)
    rest = map_named(lambda path, leaf: None if is_param(path, leaf) else leaf, tree)
    return ModelParts(Definition(None, is_param), params, {}, rest), names


def _filter(trainable: Any) -> Any:
    """Which variables of a module are parameters, as Flax has filters."""
    if trainable is None:
        return nnx.Param
    try:
        if trainable is True or trainable is ...:
            raise ValueError("random streams are no parameters")
        nnx.filterlib.to_predicate(trainable)
    except (TypeError, ValueError) as error:
        takes = "of NNX modules, a filter such as `nnx.Param` or `nnx.PathContains(...)`"
        raise check.refusal("init", "trainable", trainable, takes) from error
    return trainable


@dataclass(frozen=True)
class FlaxMetadata:
    """What a variable of Flax may have beside the names of its dims: rules of its own, and a
    mesh.
    """

    rules: Pairs = ()
    mesh: Any = None


def flax_metadata(model: Any) -> dict[str, FlaxMetadata]:
    """The `sharding_rules` and meshes of variables, by path; variables without either are left
    out.
    """
    found: dict[str, FlaxMetadata] = {}
    of_nnx = is_nnx(model) or is_nnx_state(model)
    for path, leaf in nnx_variables(model) if of_nnx else named_leaves(model, is_leaf=_is_box):
        if isinstance(leaf, meta.Partitioned):
            found[path] = FlaxMetadata(_hashable_pairs(getattr(leaf, "rules", None)), leaf.mesh)
            continue
        metadata = _metadata_of(leaf)
        sharding = _sharding_of(metadata)
        mesh = sharding.mesh if isinstance(sharding, NamedSharding) else metadata.get("mesh")
        found[path] = FlaxMetadata(_hashable_pairs(metadata.get("sharding_rules")), mesh)
    return {path: metadata for path, metadata in found.items() if metadata != FlaxMetadata()}


def is_nnx_state(model: Any) -> bool:
    """Whether something is what `nnx.split` and `nnx.state` make of a module: variables without the
    module.
    """
    return isinstance(model, nnx.State)


def named_variables(state: nnx.State) -> tuple[dict[str, Names], dict[str, Any]]:
    """The names and the values of the variables of an `nnx.State`, by path."""
    found = nnx_variables(state)
    names = {path: _names_of_variable(variable) for path, variable in found}
    return names, {path: variable.get_value() for path, variable in found}


def with_values(state: nnx.State, values: Mapping[str, Any]) -> nnx.State:
    """The same state with other values, by path."""
    flat = nnx.to_flat_state(state)
    return nnx.from_flat_state(
        [(path, variable.replace(values["/".join(map(str, path))])) for path, variable in flat]
    )


def building() -> Any:
    """The context to build models in: what carries names is laid out later, and must not ask for a
    mesh while it is made.
    """
    return in_force((), eager=False)


def is_nnx(model: Any) -> bool:
    """Whether a model is an NNX module."""
    return isinstance(model, nnx.Module)


def _refuse_modules_in_trees(model: Any) -> None:
    if is_nnx(model):
        return
    kinds = nnx.Module | nnx.Variable
    found = jax.tree_util.tree_leaves_with_path(model, is_leaf=lambda leaf: isinstance(leaf, kinds))
    if inside := [(path, leaf) for path, leaf in found if isinstance(leaf, kinds)]:
        raise ValueError(
            f"The model is a {type(model).__name__} that holds NNX's "
            f"`{type(inside[0][1]).__name__}` at `{path_name(inside[0][0])}`. Make it a module, "
            "`nnx.Dict(...)` or `nnx.List(...)`, or it loses what Flax knows of its variables."
        )


def _check_static(graph: Any) -> None:
    """A definition is part of the jit cache key; name what in it cannot be."""
    try:
        hash(graph)
    except TypeError as error:
        for name, attribute in getattr(graph, "attributes", ()):
            value = getattr(attribute, "value", None)
            if name == "_pytree__nodes" or _hashable(value):
                continue
            raise ValueError(
                f"The module's attribute `{name}` holds a {type(value).__name__}, which Flax keeps "
                "as part of the module's definition and which has no hash. Keep an array in a "
                "variable, `nnx.Variable(...)`, or say that it is one, `nnx.data(...)`; make a "
                "list a tuple or an `nnx.List`, a dict an `nnx.Dict`, a dataclass frozen."
            ) from error
        raise


def _hashable(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


def nnx_variables(model: Any) -> list[tuple[str, nnx.Variable]]:
    """The variables of an NNX model, or of its state, with their paths."""
    state = model if is_nnx_state(model) else nnx.state(model)
    return [("/".join(map(str, path)), variable) for path, variable in nnx.to_flat_state(state)]


def _is_box(leaf: Any) -> bool:
    return isinstance(leaf, meta.AxisMetadata)


def _unbox(leaf: Any) -> Any:
    if isinstance(leaf, meta.Partitioned):
        return leaf.unbox(apply_constraint=False)
    return leaf.unbox() if _is_box(leaf) else leaf


def _box(leaf: Any, names: Any) -> Any:
    box = meta.Partitioned if isinstance(names, PartitionSpec) else linen.LogicallyPartitioned
    return box(_unbox(leaf), names=tuple(names))


def _metadata_of(variable: Any) -> Mapping[str, Any]:
    """What Flax keeps beside the value of an NNX variable; or of a box in which Linen holds one,
    `nnx.bridge.ToLinen`.
    """
    if isinstance(variable, nnx.Variable):
        return variable.get_metadata()
    return variable.metadata if hasattr(variable, "to_nnx_variable") else {}


def _sharding_of(metadata: Mapping[str, Any]) -> Any:
    sharding = metadata.get("out_sharding")
    return getattr(sharding, "sharding", None) if isinstance(sharding, Format) else sharding


def _names_of_variable(variable: Any) -> Names:
    """The names on an NNX variable. What has rules of its own is named, in whatever form."""
    metadata = _metadata_of(variable)
    sharding = _sharding_of(metadata)
    if isinstance(sharding, NamedSharding):
        sharding = sharding.spec
    if isinstance(sharding, PartitionSpec):
        return tuple(sharding) if metadata.get("sharding_rules") else sharding
    return tuple(sharding) if sharding else None


def _hashable_pairs(pairs: Any) -> Pairs:
    return tuple(
        (name, tuple(axes) if isinstance(axes, list) else axes) for name, axes in pairs or ()
    )


def is_short(of_dims: Names, shape: tuple[int, ...]) -> bool:
    """Whether there are fewer names than dims."""
    return isinstance(of_dims, tuple) and len(of_dims) < len(shape)


def padded_names(of_dims: Names, shape: tuple[int, ...]) -> tuple[Any, ...]:
    """A name for each dim, None for those that follow the names there are."""
    assert of_dims is not None
    return (*of_dims, *[None] * (len(shape) - len(of_dims)))


def _complete_names_of_boxes(leaves: list[tuple[str, Any]]) -> dict[str, Names]:
    """The names of Linen's boxes, made as many as dims: to Flax, the dims that follow are whole.

    Flax's own transforms keep the names of its boxes in line with dims, or refuse. Two things do
    not, and what they leave short is refused: `jax.vmap` around a whole `init`, by which all that
    lies beside a parameter gets the same first dim; and boxes that hold an NNX variable, whose
    names Linen's transforms leave alone.
    """
    shapes = {path: jnp.shape(_unbox(leaf)) for path, leaf in leaves}
    names: dict[str, Names] = {}
    for path, leaf in leaves:
        of_dims, shape = _names_of_box(leaf), shapes[path]
        keeps = isinstance(leaf, meta.Partitioned) and not _looks_stacked(path, shapes)
        names[path] = (
            padded_names(of_dims, shape) if keeps and is_short(of_dims, shape) else of_dims
        )
    return names


def _looks_stacked(path: str, shapes: dict[str, tuple[int, ...]]) -> bool:
    """Whether all that lies beside a parameter, in the smallest part of the model with more than
    one, has its first dim.
    """
    parts = path.split("/")
    for depth in range(len(parts) - 1, -1, -1):
        folder = "/".join([*parts[:depth], ""]) if depth else ""
        beside = [
            shape for other, shape in shapes.items() if other.startswith(folder) and other != path
        ]
        if beside:
            return all(shape[:1] == shapes[path][:1] for shape in beside)
    return False


def _names_of_box(leaf: Any) -> Names:
    if isinstance(leaf, linen.LogicallyPartitioned):
        return tuple(leaf.names)
    if isinstance(leaf, meta.Partitioned):
        return PartitionSpec(*leaf.names)  # Linen's `with_partitioning` speaks of mesh axes
    return _names_of_variable(leaf)


def _default_trainable(tree: Any) -> Callable[[str, Any], bool]:
    if isinstance(tree, Mapping) and "params" in tree:
        return _in_params
    return _is_inexact


def _in_params(path: str, leaf: Any) -> bool:
    return path.split("/", 1)[0] == "params"


def _is_inexact(path: str, leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.inexact)


def _check_rank(path: str, names: Any, shape: tuple[int, ...]) -> None:
    if not isinstance(names, PartitionSpec) and len(names) != len(shape):
        raise ValueError(
            f"`{path}` of shape {shape} has {len(shape)} dims and was given "
            f"{len(names)} names {names}."
        )
