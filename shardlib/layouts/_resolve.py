"""From the names of an array's dims, its shape and a mesh to a `PartitionSpec`.

    names of an array's dims    ("batch",  "heads",         "embed")
    rules                       "data"     ["model", None]  None
    shape, on data=2, model=4   (8,        6,               64)
    spec, from `resolve`        P("data",  None,            None)

Here 4 devices do not divide 6 heads, so the second candidate of `heads` is taken. Where no
candidate divides a dim, the policy of its name decides what happens, see `AxisRules.indivisible`.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from jax.sharding import PartitionSpec

from shardlib._text import listed
from shardlib.checks import _arguments as check
from shardlib.layouts._rules import BATCH, AxisRules, Policy, require_known
from shardlib.layouts._specs import Axes, as_tuple, parts_over, product_text, spec_entry


@dataclass(frozen=True)
class Resolution:
    """What the names and the shape of an array resolve to on a mesh.

    `padded_shape` is the shape that the spec splits evenly, which differs from the array's only
    under the policy `pad`. `said` are remarks on what policies did, to be given as warnings.
    """

    spec: PartitionSpec
    padded_shape: tuple[int, ...]
    said: tuple[str, ...] = ()


def resolve(
    rules: AxisRules,
    mesh_shape: Mapping[str, int],
    names: tuple[object, ...],
    shape: tuple[int, ...],
    *,
    what: str = "array",
    manual: frozenset[str] = frozenset(),
    parts: bool = False,
) -> Resolution:
    """Turn the names of an array's dims into a spec, or say exactly why that cannot be.

    For each dim the first candidate is taken whose axes are free, which means that no dim before
    uses them, and divide the dim. If none divides it, the policy of the name decides.

    Args:
        rules: candidates and policies, by name.
        mesh_shape: the size of each axis of the mesh.
        names: for each dim a name, None (not split) or `PartitionSpec.UNCONSTRAINED`.
        shape: the shape of the array.
        what: what messages call the array.
        manual: the axes over which the surrounding `shard_map` is manual. The batch is split over
            them already, so they are left out of its axes.
        parts: whether the array is known to be a device's own part, so that every dim, not only the
            batch, is split over the manual axes already.

    >>> rules = AxisRules(batch="data", heads=["model", None], embed=None)
    >>> resolve(rules, {"data": 2, "model": 4}, ("batch", "heads", "embed"), (8, 6, 64)).spec
    P('data', None, None)
    """
    array = f"`{what}` of shape {shape}"
    if len(names) != len(shape):
        raise ValueError(
            f"{array} has {len(shape)} dims and was given {len(names)} names {check.shown(names)}: "
            "name every dim once."
        )
    rules.check_mesh(mesh_shape)
    require_known(rules, (n for n in names if isinstance(n, str)), f" for a dim of {array}")
    resolving = _Resolving(rules, mesh_shape, array, manual, parts)
    for dim, (name, size) in enumerate(zip(names, shape, strict=True)):
        if isinstance(name, str):
            resolving.add_named(dim, name, size)
        else:
            # None or UNCONSTRAINED asks for no axis, so nothing can clash or fail to divide.
            resolving.add(_literal(name, array), size)
    return resolving.result()


@dataclass
class _Resolving:
    """The resolution of an array while its dims are gone through, from the first to the last.

    The first five fields are arguments of `resolve`, with `array` as messages call it.
    `name_of_axis` has the name of the dim that each used axis splits.
    """

    rules: AxisRules
    mesh_shape: Mapping[str, int]
    array: str
    manual: frozenset[str]
    parts: bool
    entries: list[object] = field(default_factory=list)
    padded_shape: list[int] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    name_of_axis: dict[str, str] = field(default_factory=dict)

    def add(self, entry: object, size: int) -> None:
        """Add a dim with its entry in the spec, and its size after padding."""
        self.entries.append(entry)
        self.padded_shape.append(size)

    def add_named(self, dim: int, name: str, size: int) -> None:
        """Add a dim that has a name, split as the rules say."""
        where = f"dim {dim}, `{name}`={size}, of {self.array}"
        candidates: list[tuple[str, ...]] = []
        for axes in self.rules[name]:
            candidates.append(_outside_manual(name, axes, self.manual, where, self.parts))
        free = _free_candidates(name, candidates, self.name_of_axis, self.array)
        split = _split(self.rules.policy(name), self.mesh_shape, free, size, where)
        # Later dims of the array may no longer use these axes.
        self.name_of_axis.update(dict.fromkeys(split.axes, name))
        self.add(spec_entry(split.axes), split.padded_size)
        self.remarks.extend(split.remarks)

    def result(self) -> Resolution:
        """What all dims together resolve to."""
        spec = PartitionSpec(*self.entries)
        return Resolution(spec, tuple(self.padded_shape), tuple(self.remarks))


@dataclass(frozen=True)
class _Split:
    """How one dim is split: over which axes, and to which size it is padded before.

    `remarks` tell the user what a policy did, where no candidate divides the dim.
    """

    axes: tuple[str, ...]
    padded_size: int
    remarks: tuple[str, ...] = ()


def _free_candidates(
    name: str, candidates: list[tuple[str, ...]], name_of_axis: Mapping[str, str], array: str
) -> list[tuple[str, ...]]:
    """The candidates of a dim whose axes split no dim before it; an error if there is none.

    `name_of_axis` has the names of the dims that axes split already, `array` describes the array.
    """
    free = [axes for axes in candidates if name_of_axis.keys().isdisjoint(axes)]
    if free:
        return free
    # Every candidate uses some axis twice, so the first one does.
    clash = next(axis for axis in candidates[0] if axis in name_of_axis)
    raise ValueError(
        f"`{name}` and `{name_of_axis[clash]}`, two dims of {array}, both map to the mesh axis "
        f"`{clash}`. One axis splits one dim: give them different axes, or name weights "
        "and activations differently."
    )


def _split(
    policy: Policy,
    mesh_shape: Mapping[str, int],
    candidates: list[tuple[str, ...]],
    size: int,
    where: str,
) -> _Split:
    """Split a dim by the first candidate that divides it, or as the policy says if none does.

    Args:
        policy: what is to happen if none divides it.
        mesh_shape: the size of each axis of the mesh.
        candidates: axes that may split the dim.
        size: the size of the dim.
        where: the dim in words, for the remark or the error.
    """
    for axes in candidates:
        # No axes split into one part, so the candidate None always fits.
        if size % parts_over(mesh_shape, axes) == 0:
            return _Split(axes, size)
    return _indivisible(policy, mesh_shape, candidates, size, where)


def _literal(name: object, array: str) -> object:
    """The entry of a spec for a name that is no text: it stands for itself, or is refused."""
    if name is None or name is PartitionSpec.UNCONSTRAINED:
        return name
    raise ValueError(
        f"{array} was given the name {check.shown(name)}; a name is a string, or None for a dim "
        "that is not split."
    )


def _outside_manual(
    name: str, axes: Axes, manual: frozenset[str], where: str, parts: bool
) -> tuple[str, ...]:
    """The axes of a candidate that an annotation inside a `shard_map` can still split over.

    Args:
        name: the name of the dim.
        axes: one candidate of its rule.
        manual: the axes over which the surrounding `shard_map` is manual.
        where: the dim in words, for the message.
        parts: whether the array is a device's own part, in which the dim is split over the manual
            axes already. The batch always is; another dim may not lose its axis unnoticed.
    """
    automatic: list[str] = []
    for axis in as_tuple(axes):
        if axis not in manual:
            automatic.append(axis)
        elif name != BATCH and not parts:
            raise ValueError(
                f"{where} asks for the mesh axis `{axis}`, which is manual here: each device "
                "already holds its own part, so an annotation can no longer split over it. Inside "
                "a `shard_map` (the train step is one over its data axes) give that dim `None`, or "
                f"map `{name}` to an axis that stays automatic."
            )
    # What is left may be empty: then the dim is whole within each device's part.
    return tuple(automatic)


def _indivisible(
    policy: Policy,
    mesh_shape: Mapping[str, int],
    candidates: list[tuple[str, ...]],
    size: int,
    where: str,
) -> _Split:
    """Split a dim that no candidate divides as its policy says; an error under `error`.

    Args:
        policy: what is to happen.
        mesh_shape: the size of each axis of the mesh.
        candidates: axes that may split the dim, of which the first counts.
        size: the size of the dim.
        where: the dim in words, for the remark or the error.
    """
    axes = candidates[0]
    count = parts_over(mesh_shape, axes)
    tried = " or ".join(product_text(mesh_shape, candidate) for candidate in candidates)
    problem = f"{where}: {tried} does not divide {size}"
    match policy:
        case "replicate":
            # Without axes the dim is whole on every device.
            return _Split((), size, (f"{problem}; replicated.",))
        case "drop":
            # This ends with no axes at the latest, whose product is one.
            while size % parts_over(mesh_shape, axes):
                axes = axes[:-1]
            over = listed(axes) or "nothing"
            return _Split(axes, size, (f"{problem}; split over {over} instead.",))
        case "pad":
            # Up to the next multiple; the caller pads the array, and cuts the result back.
            padded = math.ceil(size / count) * count
            return _Split(axes, padded, (f"{problem}; padded to {padded}.",))
        case _:
            raise ValueError(
                f"{problem}. Use a multiple of {count}, another "
                'mesh, a candidate that fits (`["axis", None]`), or say what should happen: '
                '`rules.indivisible(name="replicate")`, `"drop"` or `"pad"`.'
            )
