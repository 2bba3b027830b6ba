"""What was traced inside a `shard_map`, traced again outside of it.

The collectives of a traced block name manual axes, which are known inside a `shard_map` over them
alone. So where a block is traced once more, as a plan does, it is in one over the same axes.
"""

from collections.abc import Callable
from typing import TypeVar

import jax
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

T = TypeVar("T")


def in_manual_axes(mesh: AbstractMesh | None, function: Callable[[], T]) -> T:
    """Call a function that traces others where the manual axes of a mesh are known.

    Nothing is computed, and the function may return anything that is not traced itself.

    Args:
        mesh: in which something was traced; None if it was not in a `shard_map`.
        function: without arguments.
    """
    manual = frozenset() if mesh is None else frozenset(mesh.manual_axes)
    if mesh is None or manual <= set(jax.sharding.get_abstract_mesh().manual_axes):
        return function()
    found: list[T] = []

    def body() -> tuple[()]:
        found.append(function())
        return ()

    automatic = tuple(AxisType.Auto for _ in mesh.axis_names)
    mapped = jax.shard_map(
        body,
        mesh=AbstractMesh(mesh.axis_sizes, mesh.axis_names, axis_types=automatic),
        in_specs=(),
        out_specs=PartitionSpec(),
        axis_names=set(manual),
        check_vma=False,
    )
    jax.eval_shape(mapped)
    return found[0]
