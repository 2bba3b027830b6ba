"""The order in which the positions of a sequence are laid out over the devices of a ring.

Under a causal mask the last positions see all others, and the first see hardly any. So that the
devices of a ring have equal work, each has an early and a late stretch of the sequence ("zigzag"):

    device      0      1      2      3
    stretches   0 7    1 6    2 5    3 4

A model arranges its tokens, and all else that has one entry for each position, before the first
layer; and attention is told so. Positions themselves are arranged like anything else.
"""

import math
import warnings

import jax
import jax.numpy as jnp

from shardlib.checks import _arguments as check
from shardlib.checks import _arrays as check_arrays
from shardlib.layouts._annotate import current_mesh, current_scope
from shardlib.layouts._rules import SEQUENCE, AxisRules, ShardingWarning
from shardlib.layouts._specs import as_tuple, axes_within, parts_over, product_text


def arrange(x: jax.Array, dim: int = 1, *, name: str = SEQUENCE) -> jax.Array:
    """An array in the order in which the rules in force lay positions out over devices.

    The order only changes if the rules have a ring in zigzag order, `sl.rules.context("ring")`, on
    a mesh with several devices along the ring's axes. Arrange the tokens of a model before they are
    embedded, along with targets, masks, segments and positions, and call
    `sl.kernels.attention(..., arranged=True)`. A sum over positions, such as a loss, does not
    depend on their order. `restore` undoes it.

    Args:
        x: the array, with the positions of all devices.
        dim: the dim of the positions.
        name: the name of the dim. Its policy, `AxisRules.indivisible`, decides what happens to a
            length that is not a multiple of twice the number of devices: it is refused, or stays in
            its order.

    >>> import shardlib as sl
    >>> with sl.use(sl.rules.context("ring"), sl.make_mesh("data=2,context=4")):
    ...     arrange(jnp.arange(16), 0)
    Array([ 0,  1, 14, 15,  2,  3, 12, 13,  4,  5, 10, 11,  6,  7,  8,  9],      dtype=int32)
    """
    stretches = _stretches("arrange", x, dim, name)
    if stretches is None:
        return x
    # The late stretches, the last one first, each after the early one of its device.
    early, late = jnp.split(stretches, 2, dim)
    pairs = jnp.stack([early, jnp.flip(late, dim)], dim + 1)
    return pairs.reshape(x.shape)


def restore(x: jax.Array, dim: int = 1, *, name: str = SEQUENCE) -> jax.Array:
    """An array in the order of positions, from that of `arrange`.

    Args:
        x: the array, with the positions of all devices.
        dim: the dim of the positions.
        name: what the rules call the dim.

    >>> import shardlib as sl
    >>> with sl.use(sl.rules.context("ring"), sl.make_mesh("data=2,context=4")):
    ...     restore(arrange(jnp.arange(8), 0), 0)
    Array([0, 1, 2, 3, 4, 5, 6, 7], dtype=int32)
    """
    stretches = _stretches("restore", x, dim, name)
    if stretches is None:
        return x
    count = stretches.shape[dim]
    pairs = stretches.reshape(*x.shape[:dim], count // 2, 2, *stretches.shape[dim + 1 :])
    early, late = jnp.split(pairs, 2, dim + 1)
    both = [early.squeeze(dim + 1), jnp.flip(late.squeeze(dim + 1), dim)]
    return jnp.concatenate(both, dim).reshape(x.shape)


def _stretches(op: str, x: jax.Array, dim: int, name: str) -> jax.Array | None:
    """An array whose dim of positions is cut in two, stretches and the positions of each.

    None where positions stay in their order.
    """
    check_arrays.array(op, "x", x, "an array with a dim of positions")
    most = max(x.ndim - 1, 0)
    dim = check.whole(op, "dim", dim, "the dim of the positions", least=0, most=most)
    check.text(op, "name", name, "the name of the dim of positions")
    rules = _rules_in_force()
    devices = zigzag_devices()
    if rules is None or devices == 1:
        return None
    mesh = current_mesh()
    axes = axes_within(rules.zigzag_axes, mesh.axis_names)
    manual = [axis for axis in axes if axis in mesh.manual_axes]
    if manual:
        raise ValueError(
            f"`sl.context.{op}` inside a `shard_map` over `{manual[0]}`, where a device has its "
            "own positions only: call it outside, on the positions of all devices."
        )
    length, divisor = x.shape[dim], _divisor(rules, name)
    if length % divisor:
        _refuse_length(rules, op, name, length, product_text(mesh.shape, axes), divisor)
        return None
    return x.reshape(*x.shape[:dim], 2 * devices, length // (2 * devices), *x.shape[dim + 1 :])


def _refuse_length(
    rules: AxisRules, op: str, name: str, length: int, over: str, divisor: int
) -> None:
    """Refuse a length, or warn of it, as the policy for its dim says."""
    said = (
        f"`sl.context.{op}`: {length} positions over {over} in zigzag order, in which each device "
        f"has two stretches, and {divisor} does not divide {length}."
    )
    if rules.policy(name) == "error":
        longer = math.ceil(length / divisor) * divisor
        raise ValueError(
            f"{said} Pad the sequence to {longer}, leave it in its order, "
            f'`sl.rules.context("ring", order="sequence")`, or say that it may be, '
            f'`rules.indivisible({name}="replicate")`.'
        )
    warnings.warn(f"{said} They stay in their order.", ShardingWarning, stacklevel=4)


def _rules_in_force() -> AxisRules | None:
    """The rules in force; None where there are none."""
    scope = current_scope()
    return None if scope is None else scope.rules


def zigzag_devices() -> int:
    """How many devices have two stretches of a sequence each; one where there is no such order."""
    rules = _rules_in_force()
    if rules is None:
        return 1
    sizes = current_mesh().shape
    return math.prod(sizes.get(axis, 1) for axis in rules.zigzag_axes)


def _divisor(rules: AxisRules, name: str) -> int:
    """What divides a length that is arranged: twice the ring, and all that splits the dim."""
    sizes = current_mesh().shape
    parts = 1
    if name in rules:
        # Of several candidates the first that divides is taken.
        axes = axes_within(as_tuple(rules[name][0]), sizes)
        parts = parts_over(sizes, axes)
    return math.lcm(2 * zigzag_devices(), parts)


def is_arranged(length: int, name: str = SEQUENCE) -> bool:
    """Whether `arrange` changes the order of so many positions, under the rules in force.

    Args:
        length: how many positions there are, on all devices.
        name: what the rules call their dim.
    """
    check.whole("is_arranged", "length", length, "a number of positions", least=0)
    check.text("is_arranged", "name", name, "the name of the dim of positions")
    rules = _rules_in_force()
    if rules is None or zigzag_devices() == 1:
        return False
    return length % _divisor(rules, name) == 0
