"""Names on parameters: given as a parameter is made, or afterwards to a model as it is.

A name says what a dim is, and rules say over which mesh axes what is called so is split. An NNX
variable carries its names in its metadata. A leaf of any other tree is put in a box that carries
them, one of Linen's.
"""

import functools
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import linen, nnx
from flax.core import meta
from jax.sharding import PartitionSpec

from shardlib._tree import map_named, named_leaves
from shardlib.checks import _arguments as check
from shardlib.checks import _arrays as check_arrays
from shardlib.layouts._flax_rules import laid_out_eagerly
from shardlib.modeling._flax import (
    Names,
    is_box,
    is_nnx,
    nnx_variables,
    refuse_modules_in_trees,
    unbox,
)

Model = TypeVar("Model")


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
    for name in names:
        if name is not None and not isinstance(name, str):
            raise ValueError(
                '`logical(initializer, ...)` takes the names one by one, `"embed", "mlp"`; got '
                f"{check.shown(name)}."
            )

    @functools.wraps(initializer)
    def named(*args: Any, **kwargs: Any) -> Any:
        # Eager sharding demands rules and a mesh as soon as the variable exists: without them,
        # names are for later.
        mesh = jax.sharding.get_abstract_mesh()
        eager = laid_out_eagerly(not mesh.empty and not mesh.manual_axes)
        return nnx.with_metadata(initializer, out_sharding=names, eager_sharding=eager)(
            *args, **kwargs
        )

    return named


def annotate(model: Model, names: Mapping[str, tuple[str | None, ...] | PartitionSpec]) -> Model:
    """Name the dims of the parameters of a model that cannot be edited.

    - `model`: an NNX module, which is changed in place and returned; or any other tree of arrays,
      which is returned with its leaves boxed, as Linen's `nn.with_logical_partitioning` would have.
    - `names`: from patterns, which match the whole of a parameter's path, to the names of its dims:
      a tuple with a name or None for each dim, or a `PartitionSpec` of mesh axes.

    A pattern that matches nothing is a `ValueError`, and so are two that name one parameter
    differently.

    >>> params = annotate({"up": {"kernel": jnp.zeros((4, 8)), "bias": jnp.zeros(8)}},
    ...     {"up/kernel": ("embed", "mlp")})
    >>> params["up"]["kernel"].names
    ('embed', 'mlp')
    """
    check.kind(
        "annotate", "names", names, Mapping, "a mapping from patterns of paths to the names of dims"
    )
    # Modules first: as leaves of a tree they would lose what Flax knows of them.
    refuse_modules_in_trees(model)
    variables = dict(nnx_variables(model)) if is_nnx(model) else None
    # A module without variables is looked at as any other tree.
    leaves = variables or dict(named_leaves(model, is_leaf=is_box))
    _check_is_model(model, leaves)
    chosen = _names_by_path(names, leaves)
    if variables is None:
        return _boxed(model, chosen)
    for path, dim_names in chosen.items():
        variables[path].set_metadata(out_sharding=dim_names)
    return model


def _boxed(model: Model, names: Mapping[str, Names]) -> Model:
    """A tree whose leaves of these paths are in boxes that carry their names.

    The tree itself is left as it is: leaves without a box have no place for names.
    """

    def boxed(path: str, leaf: Any) -> Any:
        if path not in names:
            return leaf
        return _box(leaf, names[path])

    return map_named(boxed, model, is_leaf=is_box)


def _check_is_model(model: Any, leaves: Mapping[str, Any]) -> None:
    """Refuse what has no leaves, and what is a leaf itself and no array.

    A model may be one array, whose path is empty.
    """
    # Only what is a leaf itself has the empty path.
    whole_model = leaves.get("")
    is_strange = whole_model is not None and not hasattr(unbox(whole_model), "shape")
    if not leaves or is_strange:
        takes = "a model: an NNX module, or a tree of arrays with paths, such as Linen's variables"
        raise check.refusal("annotate", "model", model, takes)


def _names_by_path(patterns: Mapping[str, Any], leaves: Mapping[str, Any]) -> dict[str, Names]:
    """The names of each leaf that a pattern matches, by the leaf's path.

    Each pattern must match something, the names must be as many as the leaf has dims, and two
    patterns that match one leaf must agree.
    """
    chosen: dict[str, Names] = {}
    for pattern, names in patterns.items():
        check.pattern("annotate", "names", pattern)
        if not _are_names(names):
            raise ValueError(
                f"`annotate` names dims by a tuple of names or a `PartitionSpec`; `{pattern}` has "
                f"{check.shown(names)}."
            )
        # The whole path must match, so that `kernel` does not name `up/kernel` by accident.
        matched = [path for path in leaves if re.fullmatch(pattern, path)]
        # A pattern without a match is a misspelt path, whose parameter would stay without names.
        if not matched:
            raise ValueError(
                f"`annotate`: the pattern `{pattern}` matches no parameter. The paths are: "
                f"{', '.join(leaves)}."
            )
        for path in matched:
            if chosen.setdefault(path, names) != names:
                raise ValueError(
                    f"`{path}` is named {chosen[path]} by one pattern and {names} by `{pattern}`."
                )
            array = unbox(leaves[path])
            check_arrays.array("annotate", path, array, abstract=True)
            _check_rank(path, names, jnp.shape(array))
    return chosen


def _are_names(value: Any) -> bool:
    """Whether a value can be the names of an array's dims: a tuple of names, or a spec."""
    if isinstance(value, PartitionSpec):
        return True
    return isinstance(value, tuple) and all(isinstance(name, str | None) for name in value)


def _check_rank(path: str, names: Any, shape: tuple[int, ...]) -> None:
    """Refuse a tuple with more or fewer names than dims; a `PartitionSpec` may be shorter."""
    if not isinstance(names, PartitionSpec) and len(names) != len(shape):
        raise ValueError(
            f"`{path}` of shape {shape} has {len(shape)} dims and was given "
            f"{len(names)} names {names}."
        )


def _box(leaf: Any, names: Any) -> Any:
    """A leaf in one of Linen's boxes, in place of the one it may be in.

    Linen has two kinds, for names of dims and for mesh axes.
    """
    box = meta.Partitioned if isinstance(names, PartitionSpec) else linen.LogicallyPartitioned
    return box(unbox(leaf), names=tuple(names))
