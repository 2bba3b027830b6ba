"""Placements: pure functions from the path, shape and spec of a leaf to its spec.

A placement lays a leaf out and never changes its value. It is given the spec that the leaf has so
far, and may refine it:

    P()  --by_names-->  P(None, "model")  --a stage of ZeRO-->  P("data", "model")
"""

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from jax.sharding import PartitionSpec

from shardlib._tree import map_named
from shardlib.layouts._relate import Dims, Relation
from shardlib.layouts._resolve import resolve
from shardlib.layouts._rules import AxisRules
from shardlib.layouts._specs import check_spec

Placement: TypeAlias = Callable[[str, tuple[int, ...], PartitionSpec], PartitionSpec]


def place(placement: Placement, tree: Any) -> Any:
    """The specs that a placement gives a tree of arrays, or of their shapes.

    It begins with leaves that are whole on every device.
    """
    return map_named(lambda path, leaf: placement(path, leaf.shape, PartitionSpec()), tree)


def by_names(
    names: Mapping[str, Any], rules: AxisRules, mesh_shape: Mapping[str, int]
) -> Placement:
    """Lay out leaves by the names of their dims, as the rules say.

    `names` has for each path the names, or a `PartitionSpec` that is taken as it is. A leaf without
    either keeps its spec.

    >>> placement = by_names({"w": ("embed", "mlp")}, AxisRules(embed=None, mlp="model"),
    ...     {"model": 4})
    >>> placement("w", (8, 16), PartitionSpec())
    P(None, 'model')
    """

    def placement(path: str, shape: tuple[int, ...], spec: PartitionSpec) -> PartitionSpec:
        # Names, a spec, or nothing at all.
        match names.get(path):
            case None:
                return spec
            case PartitionSpec() as literal:
                return check_spec(mesh_shape, literal, shape, what=path)
            case dim_names:
                return resolve(rules, mesh_shape, dim_names, shape, what=path).spec

    return placement


def like_parameters(
    relations: Mapping[str, Relation], specs: Mapping[str, PartitionSpec]
) -> Placement:
    """Lay out optimizer state as the parameters that it follows are.

    Each dim is split as the dim of the parameter that it follows; a dim that follows none is whole.
    A leaf that follows no parameter keeps its spec.

    `relations` says what each leaf of the state follows, `specs` how the parameters are laid out.

    >>> relation = Relation("part", "w", (1,))
    >>> like_parameters({"v_col/w": relation}, {"w": PartitionSpec("data", "model")})("v_col/w",
    ...     (8,), PartitionSpec())
    P('model',)
    """

    def placement(path: str, shape: tuple[int, ...], spec: PartitionSpec) -> PartitionSpec:
        relation = relations.get(path)
        if relation is None or relation.parameter is None:
            return spec
        # Placeholders and the like follow no dim, and keep the spec that they have.
        if set(relation.dims) <= {None}:
            return spec
        parameter_spec = specs[relation.parameter]
        if relation.kind == "same":
            return parameter_spec
        return _spec_of_part(relation.dims, parameter_spec)

    return placement


def _spec_of_part(dims: Dims, parameter_spec: PartitionSpec) -> PartitionSpec:
    """The spec of a leaf whose dims follow these dims of a parameter."""
    entries: list[Any] = []
    for position, dim in enumerate(dims):
        # One axis splits one dim: of two that follow the same, the first is split. A spec may be
        # shorter than the parameter's rank, whose last dims then are whole.
        if dim is None or dim in dims[:position] or dim >= len(parameter_spec):
            entries.append(None)
        else:
            entries.append(parameter_spec[dim])
    return PartitionSpec(*entries)
