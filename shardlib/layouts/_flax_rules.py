"""Flax's own ambient settings, which its constraints and variables read: logical axis rules, and
eager sharding.
"""

import contextlib
from collections.abc import Iterator
from typing import Any, TypeAlias

from flax import linen, nnx

from shardlib.layouts._rules import AxisRules

Pairs: TypeAlias = tuple[tuple[str, Any], ...]
"""Flax's rules: a name and what splits it, in order of precedence."""


def pairs_of(rules: AxisRules | None) -> Pairs:
    """The same rules in Flax's form. `None` as a last resort is left out: to Flax, what no rule
    fits is whole.

    >>> pairs_of(AxisRules(batch=("data", "fsdp"), heads=["model", None], embed=None))
    (('batch', ('data', 'fsdp')), ('heads', 'model'), ('embed', None))
    """
    pairs: list[tuple[str, Any]] = []
    for name, candidates in ({} if rules is None else rules).items():
        split = [axes for axes in candidates if axes is not None]
        pairs.extend((name, axes) for axes in split or [None])
    return tuple(pairs)


def pairs_in_force() -> Pairs:
    """Flax's rules in force, in a form that has a hash."""
    pairs = linen.get_logical_axis_rules()
    return tuple((name, tuple(axes) if isinstance(axes, list) else axes) for name, axes in pairs)


@contextlib.contextmanager
def in_force(pairs: Pairs, *, eager: bool | None = None) -> Iterator[None]:
    """Put rules in force for Flax; with `eager`, say whether NNX variables are laid out as soon as
    they are made.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(linen.logical_axis_rules(pairs))
        if eager is not None:
            stack.enter_context(nnx.use_eager_sharding(eager))
        yield


def laid_out_eagerly(mesh_in_scope: bool) -> bool:
    """Whether a variable that is made here, with names of its dims, is laid out at once."""
    return mesh_in_scope and bool(linen.get_logical_axis_rules()) and nnx.using_eager_sharding()
