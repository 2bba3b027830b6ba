"""Models as trees, and the names of their leaves: the one file that takes Flax models apart.

To the rest of the library a model is a hashable `definition`, which can put it together again, and
three trees: `params`, which the optimizer moves; `streams`, the keys and counts of NNX's random
streams; and `rest`, whatever else it carries, such as running statistics. Trees of NNX modules are
nested dicts; any other model keeps its own structure, with `None` where a leaf belongs to another
of the three.
"""

import collections
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen, nnx
from flax.core import meta
from jax.experimental.layout import Format
from jax.sharding import NamedSharding, PartitionSpec

from shardlib._tree import map_named, named_leaves, path_name
from shardlib.checks import _arguments as check
from shardlib.layouts._flax_rules import Pairs, in_force

Names = tuple[str | None, ...] | PartitionSpec | None
"""The names of a parameter's dims; a `PartitionSpec` speaks of mesh axes directly; None is a
parameter without names.
"""


class ModelParts(NamedTuple):
    """A model taken apart: how to put it together, and the three trees of its leaves.

    `params` are what the optimizer moves, `streams` the keys and counts of NNX's random streams,
    `rest` whatever else the model carries. Names of leaves go by their paths in `params` or `rest`.
    """

    definition: "Definition"
    params: Any
    streams: Any
    rest: Any


@dataclass(frozen=True)
class Definition:
    """How to put a model together again, as a value that can be part of a jit cache key.

    `graph` is NNX's graph definition, or None for a tree; `trainable` says what counts as a
    parameter, as in `take_apart`.
    """

    graph: Any
    trainable: Any

    def merge(self, params: Any, streams: Any, rest: Any) -> Any:
        """The model with these values; a new object at every call."""
        if self.graph is not None:
            return nnx.merge(self.graph, params, streams, rest)
        # Each leaf of the tree is in one of the two, with None in its place in the other.
        return jax.tree.map(
            lambda p, r: r if p is None else p, params, rest, is_leaf=lambda leaf: leaf is None
        )

    def taken_apart(self, model: Any) -> "ModelParts":
        """The arrays of a model that `merge` made, as they are now.

        A loss may have changed them, as by a draw or by running statistics.
        """
        return take_apart(model, self.trainable)[0]


def take_apart(model: Any, trainable: Any = None) -> tuple[ModelParts, dict[str, Names]]:
    """Take a model apart, and read the names of its leaves.

    `trainable` says which leaves are parameters: for NNX a filter (`nnx.Param` by default), for a
    tree a predicate of path and leaf. By default that is Linen's collection `params` where there is
    one, else every floating-point leaf.
    """
    if not is_nnx(model):
        return _take_tree_apart(model, trainable)
    # Each variable goes to the first filter that matches it; `...` matches all that are left.
    graph, *states = nnx.split(model, _filter(trainable), nnx.RngState, ...)
    _check_static(graph)
    # Names are read before the variables become plain arrays, which have none.
    names = {path: names_of_variable(variable) for path, variable in nnx_variables(model)}
    params, streams, rest = map(nnx.to_pure_dict, states)
    return ModelParts(Definition(graph, trainable), params, streams, rest), names


def _take_tree_apart(model: Any, trainable: Any) -> tuple[ModelParts, dict[str, Names]]:
    """Take a model apart that is a tree of arrays, some of which may be in Linen's boxes.

    `params` and `rest` have the tree's structure, each with None in place of the other's leaves.
    """
    if isinstance(model, linen.Module):
        raise ValueError(
            f"The model is a module of Linen, `{type(model).__name__}`, which has no parameters "
            "itself: return its variables, `module.init(key, x)`."
        )
    # Checked first: what Flax knows of a module is lost as soon as JAX takes it apart.
    refuse_modules_in_trees(model)
    leaves = named_leaves(model, is_leaf=is_box)
    _check_leaves(leaves)
    names = _complete_names_of_boxes(leaves)
    tree = jax.tree.map(unbox, model, is_leaf=is_box)
    takes = "a function of a path and a leaf that says whether it is a parameter"
    check.function("init", "trainable", trainable, takes, optional=True)
    is_param = trainable or _default_trainable(tree)
    # None is an empty tree to JAX, so that `params` and `rest` have only their own leaves.
    params = map_named(lambda path, leaf: leaf if is_param(path, leaf) else None, tree)
    rest = map_named(lambda path, leaf: None if is_param(path, leaf) else leaf, tree)
    return ModelParts(Definition(None, is_param), params, {}, rest), names


def _check_leaves(leaves: list[tuple[str, Any]]) -> None:
    """Refuse leaves of a tree that are no arrays, and two leaves with the same path.

    The second happens where a key holds a `/`, which is also what is between keys in a path.
    """
    for path, leaf in leaves:
        if not hasattr(unbox(leaf), "dtype"):
            raise ValueError(
                f"`{path or 'the whole'}` of the model is no array. Close over constants and "
                "functions instead."
            )
    # All else goes by path, so that two leaves of one path would be taken for one.
    counts = collections.Counter(path for path, _ in leaves)
    for path, count in counts.items():
        if count > 1:
            raise ValueError(
                f"Two leaves of the model are called `{path}`; rename the keys that hold a `/`."
            )
        # Files have folders for what is before a `/`.
        parent = path.rpartition("/")[0]
        while parent:
            if parent in counts:
                raise ValueError(
                    f"`{path}` of the model seems to be within the leaf `{parent}`; rename the "
                    "keys that hold a `/`."
                )
            parent = parent.rpartition("/")[0]


def _filter(trainable: Any) -> Any:
    """Which variables of a module are parameters, as a filter of Flax's.

    `True` and `...` are filters too, and match everything. They are refused, since the keys of
    random streams cannot be trained.
    """
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
    """What a Flax variable may carry besides the names of its dims: rules of its own, and a mesh.

    Rules are pairs of a name and mesh axes; there are none by default.
    """

    rules: Pairs = ()
    mesh: Any = None


def flax_metadata(model: Any) -> dict[str, FlaxMetadata]:
    """The `sharding_rules` and meshes of variables, by path.

    `model` is a module, its state or a tree. Variables that have neither are left out.
    """
    if is_nnx(model) or is_nnx_state(model):
        leaves = nnx_variables(model)
    else:
        leaves = named_leaves(model, is_leaf=is_box)
    metadata_by_path = {}
    for path, leaf in leaves:
        # Most variables bring nothing along, and need not be looked at again.
        metadata = _flax_metadata_of(leaf)
        if metadata != FlaxMetadata():
            metadata_by_path[path] = metadata
    return metadata_by_path


def _flax_metadata_of(leaf: Any) -> FlaxMetadata:
    """The rules and the mesh of one variable of NNX or one box of Linen's.

    A `NamedSharding` in place of names brings a mesh, which goes before one in the metadata.
    """
    if isinstance(leaf, meta.Partitioned):
        return FlaxMetadata(_hashable_pairs(getattr(leaf, "rules", None)), leaf.mesh)
    metadata = _metadata_of(leaf)
    # A sharding says its own mesh; only names need one from elsewhere.
    sharding = _sharding_of(metadata)
    mesh = sharding.mesh if isinstance(sharding, NamedSharding) else metadata.get("mesh")
    return FlaxMetadata(_hashable_pairs(metadata.get("sharding_rules")), mesh)


def is_nnx_state(model: Any) -> bool:
    """Whether something is the state of a module, its variables without the module.

    `nnx.split` and `nnx.state` make it.
    """
    return isinstance(model, nnx.State)


def named_variables(state: nnx.State) -> tuple[dict[str, Names], dict[str, Any]]:
    """The names and the values of the variables of an `nnx.State`, each by path."""
    variables = nnx_variables(state)
    names = {path: names_of_variable(variable) for path, variable in variables}
    return names, {path: variable.get_value() for path, variable in variables}


def with_values(state: nnx.State, values: Mapping[str, Any]) -> nnx.State:
    """The same state with other values, by path; each variable keeps its kind and metadata."""
    replaced = []
    for path, variable in nnx.to_flat_state(state):
        replaced.append((path, variable.replace(values["/".join(map(str, path))])))
    return nnx.from_flat_state(replaced)


def building() -> Any:
    """The context to build models in, where variables with names do not ask for a mesh.

    What is built in it is laid out later, when the names of all leaves are known.
    """
    return in_force((), eager=False)


def refuse_modules_in_trees(model: Any) -> None:
    """Refuse a dict, a list or another tree that holds NNX modules or variables.

    To JAX these are nodes of the tree, so they would be taken apart without Flax, which would lose
    what they share and what kind each variable is.
    """
    if is_nnx(model):
        return
    kinds = nnx.Module | nnx.Variable
    leaves = jax.tree_util.tree_leaves_with_path(
        model, is_leaf=lambda leaf: isinstance(leaf, kinds)
    )
    for path, leaf in leaves:
        if isinstance(leaf, kinds):
            raise ValueError(
                f"The model is a {type(model).__name__} that holds NNX's "
                f"`{type(leaf).__name__}` at `{path_name(path)}`. Make it a module, "
                "`nnx.Dict(...)` or `nnx.List(...)`, or it loses what Flax knows of its variables."
            )


def is_nnx(model: Any) -> bool:
    """Whether a model is an NNX module."""
    return isinstance(model, nnx.Module)


def _check_static(graph: Any) -> None:
    """Refuse a definition that has no hash, and name the attribute of the module to blame.

    The definition is part of the jit cache key. If no attribute explains the error, it is raised as
    it is.
    """
    try:
        hash(graph)
    except TypeError as error:
        for name, attribute in getattr(graph, "attributes", ()):
            value = getattr(attribute, "value", None)
            # `_pytree__nodes` is Flax's own account of the other attributes.
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
    """The variables of an NNX model, or of its state, with their paths, such as `up/kernel`."""
    state = model if is_nnx_state(model) else nnx.state(model)
    return [("/".join(map(str, path)), variable) for path, variable in nnx.to_flat_state(state)]


def is_box(leaf: Any) -> bool:
    """Whether a leaf is an array in a box of Linen's, which carries names or other metadata."""
    return isinstance(leaf, meta.AxisMetadata)


def unbox(leaf: Any) -> Any:
    """The array in a box of Linen's; what is in no box stays as it is."""
    if isinstance(leaf, meta.Partitioned):
        # A box that knows a mesh would lay its array out as it is taken out.
        return leaf.unbox(apply_constraint=False)
    if is_box(leaf):
        return leaf.unbox()
    return leaf


def _metadata_of(variable: Any) -> Mapping[str, Any]:
    """What Flax keeps besides the value of an NNX variable.

    A variable may also be in a box that Linen holds, as `nnx.bridge.ToLinen` makes them. Anything
    else has no metadata.
    """
    if isinstance(variable, nnx.Variable):
        return variable.get_metadata()
    if hasattr(variable, "to_nnx_variable"):
        return variable.metadata
    return {}


def _sharding_of(metadata: Mapping[str, Any]) -> Any:
    """What a variable's metadata has in place of names: a tuple of names, a spec or a sharding.

    A `Format` is a sharding with an order of dims in memory, which is no concern here.
    """
    sharding = metadata.get("out_sharding")
    if isinstance(sharding, Format):
        return getattr(sharding, "sharding", None)
    return sharding


def names_of_variable(variable: Any) -> Names:
    """The names on an NNX variable.

    A spec speaks of mesh axes, and stays a spec; but the entries of a variable with rules of its
    own are names, in whatever form they are written.
    """
    metadata = _metadata_of(variable)
    sharding = _sharding_of(metadata)
    # A sharding is a mesh and a spec; the mesh is read by `flax_metadata`.
    if isinstance(sharding, NamedSharding):
        sharding = sharding.spec
    if isinstance(sharding, PartitionSpec):
        return tuple(sharding) if metadata.get("sharding_rules") else sharding
    return tuple(sharding) if sharding else None


def _hashable_pairs(pairs: Any) -> Pairs:
    """Rules of a variable as a tuple, with tuples of axes: users also write lists, or None."""
    hashable = []
    for name, axes in pairs or ():
        if isinstance(axes, list):
            axes = tuple(axes)
        hashable.append((name, axes))
    return tuple(hashable)


def is_short(names: Names, shape: tuple[int, ...]) -> bool:
    """Whether there are fewer names than dims; a spec may be shorter and means the same."""
    return isinstance(names, tuple) and len(names) < len(shape)


def padded_names(names: Names, shape: tuple[int, ...]) -> tuple[Any, ...]:
    """A name for each dim, with None for the dims behind those that have names."""
    assert names is not None
    missing = len(shape) - len(names)
    return (*names, *[None] * missing)


def _complete_names_of_boxes(leaves: list[tuple[str, Any]]) -> dict[str, Names]:
    """The names of Linen's boxes, made as many as dims: to Flax, the dims that follow are whole.

    Flax's own transforms keep the names of its boxes in line with dims, or refuse. Two things do
    not, and what they leave short is refused: `jax.vmap` around a whole `init`, by which all that
    lies beside a parameter gets the same first dim; and boxes that hold an NNX variable, whose
    names Linen's transforms leave alone.
    """
    shapes = {path: jnp.shape(unbox(leaf)) for path, leaf in leaves}
    names_by_path: dict[str, Names] = {}
    for path, leaf in leaves:
        names, shape = _names_of_box(leaf), shapes[path]
        # Only where Flax itself keeps names in line with dims do missing names mean whole dims.
        in_line = isinstance(leaf, meta.Partitioned) and not _looks_stacked(path, shapes)
        if in_line and is_short(names, shape):
            names = padded_names(names, shape)
        names_by_path[path] = names
    return names_by_path


def _looks_stacked(path: str, shapes: dict[str, tuple[int, ...]]) -> bool:
    """Whether a parameter looks as if `jax.vmap` had given it and its neighbours a first dim.

    Its neighbours are all that is beside it, in the smallest part of the model with more than one
    parameter; each must have the same first dim.
    """
    parts = path.split("/")
    # From the innermost folder to the whole model.
    for depth in range(len(parts) - 1, -1, -1):
        folder = "/".join([*parts[:depth], ""]) if depth else ""
        neighbours = []
        for other, shape in shapes.items():
            if other.startswith(folder) and other != path:
                neighbours.append(shape)
        if neighbours:
            return all(shape[:1] == shapes[path][:1] for shape in neighbours)
    return False


def _names_of_box(leaf: Any) -> Names:
    """The names on a leaf of a tree: of one of Linen's boxes, or of one that holds a variable."""
    if isinstance(leaf, linen.LogicallyPartitioned):
        return tuple(leaf.names)
    if isinstance(leaf, meta.Partitioned):
        return PartitionSpec(*leaf.names)  # Linen's `with_partitioning` speaks of mesh axes
    return names_of_variable(leaf)


def _default_trainable(tree: Any) -> Callable[[str, Any], bool]:
    """Which leaves of a tree are parameters, unless the user says so.

    They are those of Linen's collection `params`; in a tree without one, all floats.
    """
    if isinstance(tree, Mapping) and "params" in tree:
        return _in_params
    return _is_inexact


def _in_params(path: str, leaf: Any) -> bool:
    return path.split("/", 1)[0] == "params"


def _is_inexact(path: str, leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.inexact)
