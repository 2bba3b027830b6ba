"""How `vmap` acts on kernels for attention: by a longer batch."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from shardlib.kernels._attention._reference import Attention, SideInputs
from shardlib.kernels._rows import Role, merged

# What `vmap` does with the arrays besides those that have sequences. Shared ones must be the same
# for the whole batch, or the kernels run in a loop.
_ROLES: dict[str, Role] = {
    "query_segments": "rows",
    "key_segments": "rows",
    "sinks": "shared",
    "starts": "shared",
    "pattern": "shared",
}


def run_merged(
    function: Callable[..., Any],
    sequences: Sequence[jax.Array],
    side: SideInputs,
    attention: Attention,
) -> Any:
    """Call a function of the arrays of an attention, so that `vmap` makes their batch longer.

    Args:
        function: called as `function(side, *sequences)`. Its `side` always says where positions
            start.
        sequences: the arrays that have sequences first.
        side: the other arrays.
        attention: which attention.
    """
    given = _given(side, attention)
    count = len(sequences)

    def run(*arrays: Any) -> Any:
        others = SideInputs(**dict(zip(given, arrays[count:], strict=True)))
        return function(others, *arrays[:count])

    roles: list[Role] = ["rows"] * count
    for name in given:
        roles.append(_ROLES[name])
    return merged(run, *roles)(*sequences, *given.values())


def _given(side: SideInputs, attention: Attention) -> dict[str, jax.Array]:
    """The arrays besides queries, keys and values that there are, and where positions start."""
    starts = side.starts
    if attention.starts is not None:
        starts = jnp.array(attention.starts, jnp.int32)
    named = side._replace(starts=starts)._asdict()
    return {name: named[name] for name in _ROLES if named[name] is not None}
