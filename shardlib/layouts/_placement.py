"""Placements: pure functions from the path, shape and spec of a leaf to its spec. Chain them.

A placement lays a leaf out and never changes its value. Names come first, and what shards further
(ZeRO's stages, say) is one more link in the chain.
"""

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from jax.sharding import PartitionSpec

from shardlib._tree import map_named
from shardlib.layouts._relate import Relation
from shardlib.layouts._resolve import resolve
from shardlib.layouts._rules import AxisRules, check_spec

Placement: TypeAlias = Callable[[str, tuple[int, ...], PartitionSpec], PartitionSpec]


def chain(*placements: Placement) -> Placement:
    """One placement after the other.

    >>> chain()("w", (4,), PartitionSpec("data"))
    P('data',)
    """

    def placed(path: str, shape: tuple[int, ...], spec: PartitionSpec) -> PartitionSpec:
        for placement in placements:
            spec = placement(path, shape, spec)
        return spec

    return placed


def place(placement: Placement, tree: Any) -> Any:
    """The specs of a tree of arrays, or of their shapes."""
    return map_named(lambda path, leaf: placement(path, leaf.shape, PartitionSpec()), tree)


def by_names(
    names: Mapping[str, Any], rules: AxisRules, mesh_shape: Mapping[str, int]
) -> Placement:
    """Lay out what has names by the rules; what carries a `PartitionSpec` by that; anything else as
    it was.

    >>> placement = by_names({"w": ("embed", "mlp")}, AxisRules(embed=None, mlp="model"),
    ...     {"model": 4})
    >>> placement("w", (8, 16), PartitionSpec())
    P(None, 'model')
    """

    def placement(path: str, shape: tuple[int, ...], spec: PartitionSpec) -> PartitionSpec:
        match names.get(path):
            case None:
                return spec
            case PartitionSpec() as literal:
                return check_spec(mesh_shape, literal, shape, what=path)
            case of_dims:
                return resolve(rules, mesh_shape, of_dims, shape, what=path).spec

    return placement


def like_parameters(
    relations: Mapping[str, Relation], specs: Mapping[str, PartitionSpec]
) -> Placement:
    """Lay out optimizer state as the parameters are that it follows: each dim as the dim it
    follows, any other whole.

    >>> relation = Relation("part", "w", (1,))
    >>> like_parameters({"v_col/w": relation}, {"w": PartitionSpec("data", "model")})("v_col/w",
    ...     (8,), PartitionSpec())
    P('model',)
    """

    def placement(path: str, shape: tuple[int, ...], spec: PartitionSpec) -> PartitionSpec:
        relation = relations.get(path)
        if (
            relation is None
            or relation.parameter is None
            or not any(dim is not None for dim in relation.dims)
        ):
            return spec
        theirs = specs[relation.parameter]
        if relation.kind == "same":
            return theirs
        taken: set[int] = set()
        entries: list[Any] = []
        for dim in relation.dims:
            usable = dim is not None and dim not in taken and dim < len(theirs)
            entries.append(theirs[dim] if usable else None)
            taken.update(() if dim is None else (dim,))
        return PartitionSpec(*entries)

    return placement
