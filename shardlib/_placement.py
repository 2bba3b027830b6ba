"""Placements: pure functions from the path, shape and spec of a leaf to its spec. Chain them.

A placement lays a leaf out and never changes its value. Names come first, and what shards further (ZeRO's stages, say)
is one more link in the chain.
"""

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from jax.sharding import PartitionSpec

from shardlib._rules import AxisRules, check_spec, resolve
from shardlib._tree import map_named

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


def by_names(names: Mapping[str, Any], rules: AxisRules, mesh_shape: Mapping[str, int]) -> Placement:
    """Lay out what has names by the rules; what carries a `PartitionSpec` by that; anything else as it was.

    >>> placement = by_names({"w": ("embed", "mlp")}, AxisRules(embed=None, mlp="model"), {"model": 4})
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


def like_parameters(shapes: Mapping[str, tuple[int, ...]], specs: Mapping[str, PartitionSpec]) -> Placement:
    """Lay out optimizer state as its parameters are: a leaf whose path ends in a parameter's, and has its shape.

    Such a leaf stands where that parameter stands in a copy of the tree of parameters, whatever the copy is called.
    Anything else (counts, factored moments) is left as it was.
    """

    def placement(path: str, shape: tuple[int, ...], spec: PartitionSpec) -> PartitionSpec:
        parts = path.split("/")
        for start in range(len(parts) + 1):  # a model that is a single array has the empty path
            tail = "/".join(parts[start:])
            if shapes.get(tail) == shape:
                return specs[tail]
        return spec

    return placement
