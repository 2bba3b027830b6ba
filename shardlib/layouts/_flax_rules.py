"""Flax's own ambient settings, set from the library's rules.

Flax's constraints and variables read two: its logical axis rules, and whether NNX variables are
sharded eagerly, which is as soon as they are made.
"""

import contextlib
from collections.abc import Iterator
from typing import Any, TypeAlias

from flax import linen, nnx

from shardlib.layouts._rules import AxisRules

Pairs: TypeAlias = tuple[tuple[str, Any], ...]
"""Flax's rules: a name and what splits it, in order of precedence."""


def pairs_of(rules: AxisRules | None) -> Pairs:
    """The same rules in Flax's form.

    Candidates become pairs of the same name. `None` as a last resort is left out: to Flax, what no
    rule fits is whole. Without rules there are no pairs.

    >>> pairs_of(AxisRules(batch=("data", "fsdp"), heads=["model", None], embed=None))
    (('batch', ('data', 'fsdp')), ('heads', 'model'), ('embed', None))
    """
    pairs: list[tuple[str, Any]] = []
    if rules is None:
        return ()
    for name, candidates in rules.items():
        splitting = [axes for axes in candidates if axes is not None]
        # A name that nothing splits keeps its pair, by which Flax knows the name.
        for axes in splitting or [None]:
            pairs.append((name, axes))
    return tuple(pairs)


def pairs_in_force() -> Pairs:
    """Flax's rules in force, in a form that has a hash.

    Flax also takes lists of axes, which have none; they become tuples.
    """
    pairs: list[tuple[str, Any]] = []
    for name, axes in linen.get_logical_axis_rules():
        if isinstance(axes, list):
            axes = tuple(axes)
        pairs.append((name, axes))
    return tuple(pairs)


@contextlib.contextmanager
def in_force(pairs: Pairs, *, eager: bool | None = None) -> Iterator[None]:
    """Put rules in force for Flax, in a `with` statement.

    `eager` says whether NNX variables are laid out as soon as they are made; with None that stays
    as it is.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(linen.logical_axis_rules(pairs))
        if eager is not None:
            stack.enter_context(nnx.use_eager_sharding(eager))
        yield


def laid_out_eagerly(mesh_in_scope: bool) -> bool:
    """Whether a variable that is made here, with names of its dims, is laid out at once.

    Flax does so where there is a mesh, there are rules, and eager sharding is on.
    """
    return mesh_in_scope and bool(linen.get_logical_axis_rules()) and nnx.using_eager_sharding()
