"""Names on parameters, and models as trees: the one file that takes Flax models apart.

To the rest of the library a model is a hashable `definition`, which can put it together again, and three trees:
`params`, which the optimizer moves; `streams`, the keys and counts of NNX's random streams; and `rest`, whatever else
it carries, such as running statistics. Trees of NNX modules are nested dicts; any other model keeps its own structure,
with `None` where a leaf belongs to another of the three.
"""

import collections
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from flax import linen, nnx
from flax.core import meta
from jax.sharding import PartitionSpec

from shardlib import _arguments as check
from shardlib import _arrays as check_arrays
from shardlib._tree import map_named, named_leaves, path_name

Model = TypeVar("Model")
Names = tuple[str | None, ...] | PartitionSpec | None
"""The names of a parameter's dims; a `PartitionSpec` speaks of mesh axes directly; None is a parameter without names."""


def logical(initializer: Callable[..., Any], *names: str | None) -> Callable[..., Any]:
    """Name the dims of the parameter that an NNX initializer makes.

    The names ride on the `nnx.Variable`, and `nnx.vmap` and `nnx.scan` with `transform_metadata` keep them in line
    with stacked dims. (In Linen, Flax's own `nn.with_logical_partitioning` does this.)

    >>> kernel_init = logical(nnx.initializers.lecun_normal(), "embed", "mlp")
    >>> nnx.Linear(4, 8, kernel_init=kernel_init, rngs=nnx.Rngs(0)).kernel.out_sharding
    ('embed', 'mlp')
    """
    check.function("logical", "initializer", initializer, "an initializer, a function of a key, a shape and a dtype")
    if strange := [name for name in names if not (name is None or isinstance(name, str))]:
        raise ValueError(
            f'`logical(initializer, ...)` takes the names one by one, `"embed", "mlp"`; got {check.shown(strange[0])}.'
        )
    # Eager sharding would demand a mesh with axes of these names as soon as the variable exists.
    return nnx.with_metadata(initializer, out_sharding=names, eager_sharding=False)


def annotate(model: Model, names: Mapping[str, tuple[str | None, ...] | PartitionSpec]) -> Model:
    """Name the parameters of a model that cannot be edited, by patterns that match the whole of a parameter's path.

    NNX modules are changed in place and returned; any other tree is returned with its leaves boxed, as Linen's
    `nn.with_logical_partitioning` would have. A pattern that matches nothing is an error, and so are two that name
    one parameter differently.

    >>> params = annotate({"up": {"kernel": jnp.zeros((4, 8)), "bias": jnp.zeros(8)}}, {"up/kernel": ("embed", "mlp")})
    >>> params["up"]["kernel"].names
    ('embed', 'mlp')
    """
    check.kind("annotate", "names", names, Mapping, "a mapping from patterns of paths to the names of dims")
    _refuse_modules_in_trees(model)
    nnx_variables = dict(_nnx_variables(model)) if _is_nnx(model) else None
    leaves = nnx_variables or dict(named_leaves(model, is_leaf=_is_box))
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
                f"`annotate` names dims by a tuple of names or a `PartitionSpec`; `{pattern}` has {check.shown(value)}."
            )
        matched = [path for path in leaves if re.fullmatch(pattern, path)]
        if not matched:
            raise ValueError(
                f"`annotate`: the pattern `{pattern}` matches no parameter. The paths are: {', '.join(leaves)}."
            )
        for path in matched:
            if chosen.setdefault(path, value) != value:
                raise ValueError(f"`{path}` is named {chosen[path]} by one pattern and {value} by `{pattern}`.")
            check_arrays.array("annotate", path, _unbox(leaves[path]), abstract=True)
            _check_rank(path, value, jnp.shape(_unbox(leaves[path])))
    if nnx_variables is not None:
        for path, value in chosen.items():
            nnx_variables[path].set_metadata(out_sharding=value)
        return model
    return map_named(lambda path, leaf: _box(leaf, chosen[path]) if path in chosen else leaf, model, is_leaf=_is_box)


class ModelParts(NamedTuple):
    """A model taken apart; `names` go by the path of a leaf in `params` or `rest`."""

    definition: "Definition"
    params: Any
    streams: Any
    rest: Any


@dataclass(frozen=True)
class Definition:
    """How to put a model together: NNX's graph definition, or None for a tree; and what counts as a parameter."""

    graph: Any
    trainable: Any

    def merge(self, params: Any, streams: Any, rest: Any) -> Any:
        """The model with these values; a new object at every call."""
        if self.graph is not None:
            return nnx.merge(self.graph, params, streams, rest)
        return jax.tree.map(lambda p, r: r if p is None else p, params, rest, is_leaf=lambda leaf: leaf is None)

    def state_of(self, model: Any) -> tuple[Any, Any]:
        """The streams and the rest of a model that `merge` made, as they are now."""
        parts = take_apart(model, self.trainable)[0]
        return parts.streams, parts.rest


def take_apart(model: Any, trainable: Any = None) -> tuple[ModelParts, dict[str, Names]]:
    """Take a model apart, and read the names of its leaves.

    `trainable` says which leaves are parameters: for NNX a filter (`nnx.Param` by default), for a tree a predicate of
    path and leaf. By default that is Linen's collection `params` where there is one, else every floating-point leaf.
    """
    if _is_nnx(model):
        graph, *states = nnx.split(model, _filter(trainable), nnx.RngState, ...)
        _check_static(graph)
        names = {
            path: variable.get_metadata().get("out_sharding") if isinstance(variable, nnx.Variable) else None
            for path, variable in _nnx_variables(model)
        }
        params, streams, rest = (nnx.to_pure_dict(state) for state in states)
        return ModelParts(Definition(graph, trainable), params, streams, rest), names
    _refuse_modules_in_trees(model)
    found = named_leaves(model, is_leaf=_is_box)
    names = {path: _names_of_box(leaf) for path, leaf in found}
    if len(names) < len(found):
        twice = next(path for path, count in collections.Counter(path for path, _ in found).items() if count > 1)
        raise ValueError(f"Two leaves of the model are called `{twice}`; rename the keys that hold a `/`.")
    if strange := [path for path, leaf in found if not hasattr(_unbox(leaf), "dtype")]:
        raise ValueError(
            f"`{strange[0] or 'the whole'}` of the model is no array. Close over constants and functions instead."
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


def building() -> Any:
    """The context to build models in: variables that carry names must not ask for a mesh while they are made."""
    return nnx.use_eager_sharding(False)


def _is_nnx(model: Any) -> bool:
    return isinstance(model, nnx.Module)


def _refuse_modules_in_trees(model: Any) -> None:
    if _is_nnx(model):
        return
    kinds = nnx.Module | nnx.Variable
    found = jax.tree_util.tree_leaves_with_path(model, is_leaf=lambda leaf: isinstance(leaf, kinds))
    if inside := [(path, leaf) for path, leaf in found if isinstance(leaf, kinds)]:
        raise ValueError(
            f"The model is a {type(model).__name__} that holds NNX's `{type(inside[0][1]).__name__}` at "
            f"`{path_name(inside[0][0])}`. Make it a module, `nnx.Dict(...)` or `nnx.List(...)`, or it loses what Flax "
            "knows of its variables."
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
                f"The module's attribute `{name}` holds a {type(value).__name__}, which Flax keeps as part of the module's "
                "definition and which has no hash. Keep an array in a variable, `nnx.Variable(...)`, or say that it is "
                "one, `nnx.data(...)`; make a list a tuple or an `nnx.List`, a dict an `nnx.Dict`, a dataclass frozen."
            ) from error
        raise


def _hashable(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


def _nnx_variables(model: Any) -> list[tuple[str, nnx.Variable]]:
    state = nnx.state(model)
    return [("/".join(map(str, path)), variable) for path, variable in nnx.to_flat_state(state)]


def _is_box(leaf: Any) -> bool:
    return isinstance(leaf, meta.AxisMetadata)


def _unbox(leaf: Any) -> Any:
    return (
        leaf.unbox(apply_constraint=False)
        if isinstance(leaf, meta.Partitioned)
        else leaf.unbox()
        if _is_box(leaf)
        else leaf
    )


def _box(leaf: Any, names: Any) -> Any:
    box = meta.Partitioned if isinstance(names, PartitionSpec) else linen.LogicallyPartitioned
    return box(_unbox(leaf), names=tuple(names))


def _names_of_box(leaf: Any) -> Names:
    if isinstance(leaf, linen.LogicallyPartitioned):
        return tuple(leaf.names)
    if isinstance(leaf, meta.Partitioned):
        return PartitionSpec(*leaf.names)  # Linen's `with_partitioning` speaks of mesh axes
    return None


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
        raise ValueError(f"`{path}` of shape {shape} has {len(shape)} dims and was given {len(names)} names {names}.")
