"""Rules from names to mesh axes, and the one function that turns names and a shape into a
`PartitionSpec`.

Vocabulary: a *dim* is a dimension of an array, a *name* is what the model calls it, an *axis* is an
axis of the mesh.
"""

import difflib
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from jax.sharding import PartitionSpec

from shardlib.checks import _arguments as check

Axes: TypeAlias = str | tuple[str, ...] | None
"""What one candidate says: one axis, several axes together, or None for replicated."""

Policy: TypeAlias = Literal["error", "drop", "pad", "replicate"]
POLICIES = ("error", "drop", "pad", "replicate")

BATCH = "batch"
"""The dim of examples, a name with a meaning to the library: the axes that split it are data
axes.
"""

EXPERTS = "experts"
"""The first dim of experts' weights, the other such name: an axis of data may split it, and each
device uses its own part.
"""

LAYERS = "layers"
"""The dim along which layers are stacked: under a pipeline the axis that splits it is that of the
stages. A model with several loops over layers tells them apart: `encoder_layers`."""


def counts_layers(name: object) -> bool:
    """Whether a name is of a dim along which layers are stacked: `layers`, `encoder_layers`."""
    return isinstance(name, str) and (name == LAYERS or name.endswith(f"_{LAYERS}"))


class ShardingWarning(UserWarning):
    """Something asked for could not be done as asked, and the stated policy did something else."""


class AxisRules(Mapping[str, tuple[Axes, ...]]):
    """An ordered, immutable map from the names of dims to the mesh axes that split them.

    A name maps to an axis, to a tuple of axes that split it together, to `None` (replicated), or to
    a list of such candidates, of which the first wins whose axes are free in the array and divide
    the dim. `|` unites two sets of rules; where both speak of a name, the right one wins.

    >>> rules = AxisRules(batch=("pod", "data"), embed=None, heads=["model", None], mlp="model")
    >>> rules | AxisRules(mlp=None)
    AxisRules(batch=('pod', 'data'), embed=None, heads=['model', None], mlp=None)

    A name may also be *known* without a rule: it is replicated, and any rule for it, on either side
    of a `|`, wins.

    >>> AxisRules.knowing("embed", "seq") | AxisRules(seq="model")
    AxisRules(seq='model', known={'embed'})
    """

    __slots__ = ("_hash", "_known", "_policies", "_rules")
    _rules: dict[str, tuple[Axes, ...]]
    _known: frozenset[str]
    _policies: dict[str | None, Policy]
    _hash: int

    def __init__(self, rules: Mapping[str, object] | None = None, /, **more: object) -> None:
        if rules is not None and not isinstance(rules, Mapping):
            raise ValueError(
                f"`AxisRules` takes a mapping or keywords; got {check.shown(rules)}. Of Flax's "
                "pairs, in which the first that fits wins, make candidates: "
                '`AxisRules(heads=["model", None])`.'
            )
        self._set(
            {name: _candidates(name, value) for name, value in {**(rules or {}), **more}.items()}
        )

    def _set(
        self,
        rules: dict[str, tuple[Axes, ...]],
        known: Iterable[str] = (),
        policies: Mapping[str | None, Policy] | None = None,
    ) -> "AxisRules":
        self._rules = rules
        self._known = frozenset(known).difference(rules)
        self._policies = dict(policies or {})
        self._hash = hash((tuple(rules.items()), self._known, frozenset(self._policies.items())))
        return self

    def __reduce__(self) -> Any:
        # Hashes of text differ from process to process.
        return _rebuilt, (self._rules, self._known, self._policies)

    @classmethod
    def knowing(cls, *names: str) -> "AxisRules":
        """Names that a model may use and that are replicated until a rule says otherwise."""
        for name in names:
            check.text("AxisRules.knowing", "names", name, "names of dims, one by one")
        return cls.__new__(cls)._set({}, names)

    def indivisible(self, policy: Policy | None = None, /, **policies: Policy) -> "AxisRules":
        """State what happens to a dim that no candidate divides: for every name, or name by name.

        `error` (the default) refuses. `replicate` leaves the dim whole. `drop` leaves out axes,
        last first, until the rest divides. `pad` splits unevenly: the last shard is padded for as
        long as the array is laid out so; a stored parameter cannot be padded. Whatever happens is
        said in a `ShardingWarning` and in `describe`.

        >>> AxisRules(heads="model", batch="data").indivisible(heads="replicate").policy("heads")
        'replicate'
        """
        chosen: dict[str | None, Policy] = {
            **({} if policy is None else {None: policy}),
            **policies,
        }
        for name, value in chosen.items():
            check.choice("indivisible", name or "policy", value, POLICIES)
            if name is not None:
                self._require_known([name])
        return AxisRules.__new__(AxisRules)._set(
            dict(self._rules), self._known, {**self._policies, **chosen}
        )

    def policy(self, name: str) -> Policy:
        """What happens to a dim of this name that no candidate divides."""
        self._require_known([name])
        return self._policies.get(name, self._policies.get(None, "error"))

    @property
    def names(self) -> tuple[str, ...]:
        """Every name that may be used: those with a rule, in order, then those only known."""
        return (*self._rules, *sorted(self._known))

    def says(self, name: str) -> bool:
        """Whether there is a rule for a name, which is more than that it may be used."""
        return name in self._rules

    @property
    def batch_axes(self) -> tuple[str, ...]:
        """The mesh axes that split the dim of examples."""
        if BATCH not in self.names:
            raise ValueError(
                f"No rule for `{BATCH}`, the dim of examples. Add one: `rules | "
                'AxisRules(batch="data")`.'
            )
        candidates = self[BATCH]
        if len(candidates) > 1:
            raise ValueError(
                f"`{BATCH}` lists candidates {candidates}; the dim of examples takes "
                "one: write a tuple."
            )
        return as_tuple(next(iter(candidates)))

    @property
    def axes(self) -> tuple[str, ...]:
        """Every mesh axis that some rule mentions, in order."""
        mentioned = (
            axis
            for candidates in self._rules.values()
            for axes in candidates
            for axis in as_tuple(axes)
        )
        return tuple(dict.fromkeys(mentioned))

    def check_mesh(self, mesh_shape: Mapping[str, int]) -> None:
        """Refuse rules that speak of an axis which the mesh lacks."""
        check.kind(
            "check_mesh",
            "mesh_shape",
            mesh_shape,
            Mapping,
            "a mapping from axes to sizes: `mesh.shape`",
        )
        for name, candidates in self._rules.items():
            for axis in (axis for axes in candidates for axis in as_tuple(axes)):
                if axis not in mesh_shape:
                    raise ValueError(
                        f"The rule for `{name}` uses the mesh axis `{axis}`; the mesh has "
                        f"{_mesh_text(mesh_shape)}. Change the rule, or give the mesh an axis of "
                        f"size one: `{axis}=1`."
                    )

    def _require_known(self, names: Iterable[str], where: str = "") -> None:
        for name in names:
            check.text("AxisRules", "name", name, f"the name of a dim{where}")
            if name not in self._rules and name not in self._known:
                close = difflib.get_close_matches(name, self.names, n=1)
                raise ValueError(
                    f"Unknown name `{check.shown(name)[1:-1]}`{where}. "
                    + (f"Did you mean `{close[0]}`? " if close else "")
                    + f"The rules know {_listed(self.names)}. "
                    f"Add it, `rules | AxisRules({name}=...)`, with `None` for replicated."
                )

    def __getitem__(self, name: str) -> tuple[Axes, ...]:
        self._require_known([name])
        return self._rules.get(name, (None,))

    def __contains__(self, name: object) -> bool:
        return name in self._rules or name in self._known

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    def __or__(self, other: "AxisRules") -> "AxisRules":
        if not isinstance(other, AxisRules):
            return NotImplemented
        return AxisRules.__new__(AxisRules)._set(
            {**self._rules, **other._rules},
            self._known | other._known,
            {**self._policies, **other._policies},
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, AxisRules) and (
            (tuple(self._rules.items()), self._known, self._policies)
            == (tuple(other._rules.items()), other._known, other._policies)
        )

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        parts = [
            f"{n}={c[0]!r}" if len(c) == 1 else f"{n}={list(c)!r}" for n, c in self._rules.items()
        ]
        if self._known:
            parts.append("known={" + ", ".join(map(repr, sorted(self._known))) + "}")
        default = self._policies.get(None)
        named = [f"{n}={p!r}" for n, p in self._policies.items() if n is not None]
        policies = ", ".join([repr(default)] * (default is not None) + named)
        return f"AxisRules({', '.join(parts)})" + (f".indivisible({policies})" if policies else "")


def _rebuilt(rules: Any, known: Any, policies: Any) -> AxisRules:
    return AxisRules.__new__(AxisRules)._set(rules, known, policies)


@dataclass(frozen=True)
class Resolution:
    """What names and a shape come to on a mesh: the spec, the size to pad to, and what must be said
    aloud.
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

    `manual` are the axes over which the surrounding `shard_map` is manual: the batch is split over
    them already, and, where the array is known to be a device's own part, every dim is.

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
    rules._require_known((n for n in names if isinstance(n, str)), f" for a dim of {array}")
    taken: dict[str, str] = {}
    entries: list[object] = []
    padded = list(shape)
    said: list[str] = []
    for dim, (name, size) in enumerate(zip(names, shape, strict=True)):
        if not isinstance(name, str):
            entries.append(_literal(name, array))
            continue
        where = f"dim {dim}, `{name}`={size}, of {array}"
        usable = [_outside_manual(name, axes, manual, where, parts) for axes in rules[name]]
        free = [axes for axes in usable if not any(axis in taken for axis in axes)]
        if not free:
            clash = next(axis for axis in usable[0] if axis in taken)
            raise ValueError(
                f"`{name}` and `{taken[clash]}`, two dims of {array}, both map to the mesh axis "
                f"`{clash}`. One axis splits one dim: give them different axes, or name weights "
                "and activations differently."
            )
        axes = next((axes for axes in free if size % _product(mesh_shape, axes) == 0), None)
        if axes is None:
            axes, padded[dim], remark = _indivisible(
                rules.policy(name), mesh_shape, free, size, where
            )
            said.append(remark)
        taken.update(dict.fromkeys(axes, name))
        entries.append(None if not axes else axes[0] if len(axes) == 1 else axes)
    return Resolution(PartitionSpec(*entries), tuple(padded), tuple(said))


def check_spec(
    mesh_shape: Mapping[str, int],
    spec: PartitionSpec,
    shape: tuple[int, ...],
    *,
    what: str = "array",
) -> PartitionSpec:
    """Hold a literal `PartitionSpec` to the rules that names obey: known axes, each once, every
    split even.
    """
    array = f"`{what}` of shape {shape}"
    if len(spec) > len(shape):
        raise ValueError(
            f"{array} has {len(shape)} dims and was given {spec} with {len(spec)} entries."
        )
    seen: set[str] = set()
    for dim, (entry, size) in enumerate(zip(spec, shape, strict=False)):
        if entry is PartitionSpec.UNCONSTRAINED:
            continue
        for axis in as_tuple(entry):
            if axis not in mesh_shape:
                raise ValueError(
                    f"{spec} for {array} names the axis `{axis}`; the mesh has "
                    f"{_mesh_text(mesh_shape)}."
                )
            if axis in seen:
                raise ValueError(
                    f"{spec} for {array} uses the axis `{axis}` twice; one axis splits one dim."
                )
            seen.add(axis)
        count = _product(mesh_shape, as_tuple(entry))
        if size % count:
            raise ValueError(
                f"{spec} splits dim {dim} of {array} into {count}, which does not divide {size}."
            )
    return spec


def as_tuple(axes: Axes) -> tuple[str, ...]:
    """The axes of one entry of a spec or one candidate of a rule, as a tuple."""
    return () if axes is None else (axes,) if isinstance(axes, str) else tuple(axes)


def spec_axes(spec: PartitionSpec) -> tuple[str, ...]:
    """Every mesh axis that a spec mentions, in order."""
    return tuple(
        axis
        for entry in spec
        if entry is not PartitionSpec.UNCONSTRAINED
        for axis in as_tuple(entry)
    )


def keep_axes(spec: PartitionSpec, axes: Iterable[str]) -> PartitionSpec:
    """The spec with every axis outside `axes` left out: what a `shard_map` manual over `axes` is
    told.

    >>> keep_axes(PartitionSpec(("data", "fsdp"), "model"), {"data", "model"})
    P('data', 'model')
    """
    axes = frozenset(axes)
    entries: list[Any] = []
    for entry in spec:
        if entry is PartitionSpec.UNCONSTRAINED:
            entries.append(entry)
            continue
        kept = tuple(axis for axis in as_tuple(entry) if axis in axes)
        entries.append(None if not kept else kept[0] if len(kept) == 1 else kept)
    return PartitionSpec(*entries)


def _candidates(name: Any, value: Any) -> tuple[Axes, ...]:
    check.text("AxisRules", "rules", name, "rules by the names of dims")
    candidates = value if isinstance(value, list) else [value]
    if not candidates:
        raise ValueError(
            f"The rule for `{name}` lists no candidate; write `{name}=None` for replicated."
        )
    for axes in candidates:
        if not (
            axes is None
            or isinstance(axes, str)
            or (isinstance(axes, tuple) and all(isinstance(a, str) for a in axes))
        ):
            raise ValueError(
                f"The rule for `{name}` holds {check.shown(axes)}; a candidate is an axis, a tuple "
                "of axes or None, and a list holds candidates to try in turn."
            )
        if len(set(as_tuple(axes))) != len(as_tuple(axes)):
            raise ValueError(f"The rule for `{name}` names an axis twice: {axes!r}.")
    return tuple(None if axes == () else axes for axes in candidates)


def _literal(name: object, array: str) -> object:
    if name is None or name is PartitionSpec.UNCONSTRAINED:
        return name
    raise ValueError(
        f"{array} was given the name {check.shown(name)}; a name is a string, or None for a dim "
        "that is not split."
    )


def _outside_manual(
    name: str, axes: Axes, manual: frozenset[str], where: str, parts: bool
) -> tuple[str, ...]:
    lost = [axis for axis in as_tuple(axes) if axis in manual]
    if lost and name != BATCH and not parts:
        raise ValueError(
            f"{where} asks for the mesh axis `{lost[0]}`, which is manual here: each device "
            "already holds its own part, so an annotation can no longer split over it. Inside a "
            "`shard_map` (the train step is one over its data axes) give that dim `None`, or map "
            f"`{name}` to an axis that stays automatic."
        )
    return tuple(axis for axis in as_tuple(axes) if axis not in manual)


def _indivisible(
    policy: Policy,
    mesh_shape: Mapping[str, int],
    free: list[tuple[str, ...]],
    size: int,
    where: str,
) -> tuple[tuple[str, ...], int, str]:
    axes = free[0]
    tried = " or ".join(f"{'x'.join(f'`{a}`={mesh_shape[a]}' for a in c)}" for c in free)
    match policy:
        case "replicate":
            return (), size, f"{where}: {tried} does not divide {size}; replicated."
        case "drop":
            while size % _product(mesh_shape, axes):
                axes = axes[:-1]
            return (
                axes,
                size,
                f"{where}: {tried} does not divide {size}; split over {_listed(axes) or 'nothing'} "
                "instead.",
            )
        case "pad":
            padded = math.ceil(size / _product(mesh_shape, axes)) * _product(mesh_shape, axes)
            return axes, padded, f"{where}: {tried} does not divide {size}; padded to {padded}."
        case _:
            count = _product(mesh_shape, axes)
            raise ValueError(
                f"{where}: {tried} does not divide {size}. Use a multiple of {count}, another "
                'mesh, a candidate that fits (`["axis", None]`), or say what should happen: '
                '`rules.indivisible(name="replicate")`, `"drop"` or `"pad"`.'
            )


def _product(mesh_shape: Mapping[str, int], axes: Iterable[str]) -> int:
    return math.prod(mesh_shape[axis] for axis in axes)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _mesh_text(mesh_shape: Mapping[str, int]) -> str:
    return ", ".join(f"`{axis}={size}`" for axis, size in mesh_shape.items()) or "no axes"
