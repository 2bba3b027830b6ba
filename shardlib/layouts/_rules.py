"""Rules from the names of dims to mesh axes.

Vocabulary: a *dim* is a dimension of an array, a *name* is what the model calls it, an *axis* is an
axis of the mesh. A model gives names to the dims of its arrays and never mentions an axis; rules
say which axes split a dim of each name, so that one model runs on any mesh. `_resolve` applies
rules to an array.
"""

import difflib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, TypeAlias

from shardlib._text import listed
from shardlib.checks import _arguments as check
from shardlib.layouts._specs import Axes, as_tuple, mesh_text

Policy: TypeAlias = Literal["error", "drop", "pad", "replicate"]
POLICIES = ("error", "drop", "pad", "replicate")

Form: TypeAlias = Literal["gather", "ring", "zigzag", "ulysses"]
FORMS = ("gather", "ring", "zigzag", "ulysses")
RINGS = ("ring", "zigzag")

BATCH = "batch"
"""The dim of examples, a name with a meaning to the library: the axes that split it are data
axes.
"""

SEQUENCE = "seq"
"""The dim of the positions of a sequence: over an axis that splits it and no batch and no weights,
ZeRO splits state too. Other dims of positions are told apart by `residual_seq` and the like.
"""

EXPERTS = "experts"
"""The first dim of experts' weights, the other such name: an axis of data may split it, and each
device uses its own part.
"""

LAYERS = "layers"
"""The dim along which layers are stacked: under a pipeline the axis that splits it is that of the
stages. A model with several loops over layers tells them apart: `encoder_layers`."""


def counts_positions(name: Any) -> bool:
    """Whether a name of a dim says that it counts the positions of sequences.

    >>> counts_positions("residual_seq")
    True
    """
    return isinstance(name, str) and (name == SEQUENCE or name.endswith(f"_{SEQUENCE}"))


def counts_layers(name: object) -> bool:
    """Whether a name is of a dim along which layers are stacked.

    Such names are `layers` and all that end in `_layers`, such as `encoder_layers`.
    """
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

    __slots__ = ("_forms", "_hash", "_known", "_policies", "_rules")
    _rules: dict[str, tuple[Axes, ...]]
    _known: frozenset[str]
    _policies: dict[str | None, Policy]
    _forms: dict[str, Form]
    _hash: int

    def __init__(self, rules: Mapping[str, object] | None = None, /, **more: object) -> None:
        if rules is not None and not isinstance(rules, Mapping):
            raise ValueError(
                f"`AxisRules` takes a mapping or keywords; got {check.shown(rules)}. Of Flax's "
                "pairs, in which the first that fits wins, make candidates: "
                '`AxisRules(heads=["model", None])`.'
            )
        # A keyword wins over the mapping, as in `dict(mapping, name=...)`.
        candidates: dict[str, tuple[Axes, ...]] = {}
        for name, value in {**(rules or {}), **more}.items():
            candidates[name] = _candidates(name, value)
        self._set(candidates)

    def _set(
        self,
        rules: dict[str, tuple[Axes, ...]],
        known: Iterable[str] = (),
        policies: Mapping[str | None, Policy] | None = None,
        forms: Mapping[str, Form] | None = None,
    ) -> "AxisRules":
        """Set the fields of a new object and return it.

        `rules` hold checked candidates. A name in `known` that has a rule is not kept there twice.
        `policies` has the policy of every other name under None. `forms` are those of attention, by
        axis.
        """
        self._rules = rules
        self._known = frozenset(known).difference(rules)
        self._policies = dict(policies or {})
        self._forms = dict(forms or {})
        # Rules are part of JAX's jit cache key and hashed at every call, so the hash is kept.
        unordered = frozenset(self._policies.items()), frozenset(self._forms.items())
        self._hash = hash((tuple(rules.items()), self._known, *unordered))
        return self

    def __reduce__(self) -> Any:
        # Hashes of text differ from process to process, so the hash is computed anew.
        return _rebuilt, (self._rules, self._known, self._policies, self._forms)

    @classmethod
    def knowing(cls, *names: str) -> "AxisRules":
        """Rules in which names are known and replicated until a rule says otherwise.

        A model's author lists with it the names that the model uses, so that a misspelt one is
        refused.
        """
        for name in names:
            check.text("AxisRules.knowing", "names", name, "names of dims, one by one")
        return cls.__new__(cls)._set({}, names)

    def indivisible(self, policy: Policy | None = None, /, **policies: Policy) -> "AxisRules":
        """State what happens to a dim that no candidate divides: for every name, or name by name.

        `error` (the default) refuses. `replicate` leaves the dim whole. `drop` leaves out axes,
        last first, until the remaining ones divide the dim. `pad` splits unevenly: the last shard
        is padded for as long as the array is laid out so; a stored parameter cannot be padded.
        Whatever happens is reported in a `ShardingWarning` and in `describe`.

        >>> AxisRules(heads="model", batch="data").indivisible(heads="replicate").policy("heads")
        'replicate'
        """
        chosen: dict[str | None, Policy] = {}
        if policy is not None:
            chosen[None] = policy
        chosen.update(policies)
        for name, value in chosen.items():
            # None stands for every name.
            check.choice("indivisible", name or "policy", value, POLICIES)
            if name is not None:
                require_known(self, [name])
        return AxisRules.__new__(AxisRules)._set(
            dict(self._rules), self._known, {**self._policies, **chosen}, self._forms
        )

    def attention(self, **forms: Form) -> "AxisRules":
        """State, axis by axis, how attention works where the axis splits a sequence's positions.

        - `gather`, the default: each device gathers all keys and values.
        - `ring`: keys and values are passed on from device to device, and each device has those of
          two at a time.
        - `zigzag`: a ring whose devices have an early and a late stretch of the sequence each, so
          that a causal mask leaves all of them equal work. A model arranges its tokens for it,
          `sl.context.arrange`; where it does not, it is a `ring`.
        - `ulysses`: heads are split in place of positions while attention is computed. Devices
          exchange queries, keys and values, and the results.

        A dim that several axes split lists those of a ring first and those of `ulysses` last.

        >>> rules = AxisRules(seq="context").attention(context="ring")
        >>> rules.attention_form("context"), rules.attention_form("model")
        ('ring', 'gather')
        """
        for axis, form in forms.items():
            check.choice("attention", axis, form, FORMS)
        return AxisRules.__new__(AxisRules)._set(
            dict(self._rules), self._known, self._policies, {**self._forms, **forms}
        )

    def attention_form(self, axis: str) -> Form:
        """How attention works where this axis splits positions: see `attention`."""
        check.text("attention_form", "axis", axis, "an axis of the mesh")
        return self._forms.get(axis, "gather")

    @property
    def zigzag_axes(self) -> tuple[str, ...]:
        """The axes whose devices have an early and a late stretch of a sequence each."""
        return tuple(axis for axis, form in self._forms.items() if form == "zigzag")

    def policy(self, name: str) -> Policy:
        """What happens to a dim of this name that no candidate divides.

        That is the policy of the name, or else the one for every name, or else `error`.
        """
        require_known(self, [name])
        return self._policies.get(name, self._policies.get(None, "error"))

    @property
    def names(self) -> tuple[str, ...]:
        """Every name that may be used.

        Names with a rule come first, in the order of the rules, then those that are only known.
        """
        return (*self._rules, *sorted(self._known))

    def says(self, name: str) -> bool:
        """Whether there is a rule for a name.

        That is more than `name in rules`, which also holds for names that are only known.
        """
        return name in self._rules

    @property
    def batch_axes(self) -> tuple[str, ...]:
        """The mesh axes that split the dim of examples.

        They are the axes of data parallelism, so rules must say them without alternatives.
        """
        if BATCH not in self.names:
            raise ValueError(
                f"No rule for `{BATCH}`, the dim of examples. Add one: `rules | "
                'AxisRules(batch="data")`.'
            )
        candidates = self[BATCH]
        # What a step averages over must not depend on the size of a batch.
        if len(candidates) > 1:
            raise ValueError(
                f"`{BATCH}` lists candidates {candidates}; the dim of examples takes "
                "one: write a tuple."
            )
        return as_tuple(next(iter(candidates)))

    @property
    def axes(self) -> tuple[str, ...]:
        """Every mesh axis that some rule mentions, in order and each once."""
        mentioned: list[str] = []
        for candidates in self._rules.values():
            mentioned.extend(_axes_of_candidates(candidates))
        return tuple(dict.fromkeys(mentioned))

    def check_mesh(self, mesh_shape: Mapping[str, int]) -> None:
        """Refuse rules that use an axis which the mesh lacks.

        `mesh_shape` has the sizes of the mesh's axes: `mesh.shape`. An axis of size one is enough
        for rules that split over it to be accepted.
        """
        check.kind(
            "check_mesh",
            "mesh_shape",
            mesh_shape,
            Mapping,
            "a mapping from axes to sizes: `mesh.shape`",
        )
        # Names that are only known use no axis.
        for name, candidates in self._rules.items():
            for axis in _axes_of_candidates(candidates):
                if axis not in mesh_shape:
                    raise ValueError(
                        f"The rule for `{name}` uses the mesh axis `{axis}`; the mesh has "
                        f"{mesh_text(mesh_shape)}. Change the rule, or give the mesh an axis of "
                        f"size one: `{axis}=1`."
                    )
        for axis, form in self._forms.items():
            # No rule would mean that attention is not what was asked for.
            if axis not in self.axes:
                raise ValueError(
                    f"`AxisRules.attention({axis}={form!r})`, and no rule uses the axis `{axis}`. "
                    f'Split the positions of a sequence over it: `rules | AxisRules(seq="{axis}")`.'
                )

    def __getitem__(self, name: str) -> tuple[Axes, ...]:
        require_known(self, [name])
        # A name that is only known is replicated.
        return self._rules.get(name, (None,))

    def __contains__(self, name: object) -> bool:
        return name in self._rules or name in self._known

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    def __or__(self, other: "AxisRules") -> "AxisRules":
        if not isinstance(other, AxisRules):
            return NotImplemented  # Python then raises a `TypeError` that names both types
        # A rule on the right replaces that on the left, in its place in the order.
        return AxisRules.__new__(AxisRules)._set(
            {**self._rules, **other._rules},
            self._known | other._known,
            {**self._policies, **other._policies},
            {**self._forms, **other._forms},
        )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, AxisRules):
            return False
        # The order of rules counts: `axes` follows it.
        return (
            tuple(self._rules.items()) == tuple(other._rules.items())
            and self._known == other._known
            and self._policies == other._policies
            and self._forms == other._forms
        )

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        arguments: list[str] = []
        for name, candidates in self._rules.items():
            # One candidate is written without its list, as users write it.
            if len(candidates) == 1:
                arguments.append(f"{name}={candidates[0]!r}")
            else:
                arguments.append(f"{name}={list(candidates)!r}")
        if self._known:
            arguments.append("known={" + ", ".join(map(repr, sorted(self._known))) + "}")
        written = f"AxisRules({', '.join(arguments)})"
        if self._policies:
            written += f".indivisible({self._policy_arguments()})"
        if self._forms:
            said = ", ".join(f"{axis}={form!r}" for axis, form in self._forms.items())
            written += f".attention({said})"
        return written

    def _policy_arguments(self) -> str:
        """The policies as arguments of `indivisible`, with the one for every name first."""
        arguments: list[str] = []
        if None in self._policies:
            arguments.append(repr(self._policies[None]))
        for name, policy in self._policies.items():
            if name is not None:
                arguments.append(f"{name}={policy!r}")
        return ", ".join(arguments)


def _rebuilt(rules: Any, known: Any, policies: Any, forms: Any) -> AxisRules:
    """Rules from the fields of others, for `pickle` and `copy`.

    It is a function of the module because `pickle` finds what to call by its name.
    """
    return AxisRules.__new__(AxisRules)._set(rules, known, policies, forms)


def require_known(rules: AxisRules, names: Iterable[str], where: str = "") -> None:
    """Refuse names that the rules do not know, and suggest the one that was likely meant.

    `where` is put after the name in the message: " for a dim of ...".
    """
    for name in names:
        check.text("AxisRules", "name", name, f"the name of a dim{where}")
        if name in rules:
            continue
        # Silently replicating a dim whose name is misspelt would cost memory and tell nobody.
        suggestion = ""
        close = difflib.get_close_matches(name, rules.names, n=1)
        if close:
            suggestion = f"Did you mean `{close[0]}`? "
        raise ValueError(
            f"Unknown name `{check.shown(name)[1:-1]}`{where}. {suggestion}"
            f"The rules know {listed(rules.names)}. "
            f"Add it, `rules | AxisRules({name}=...)`, with `None` for replicated."
        )


def _axes_of_candidates(candidates: Iterable[Axes]) -> list[str]:
    """The mesh axes that the candidates of one rule mention, in order, some perhaps twice."""
    axes_mentioned: list[str] = []
    for axes in candidates:
        axes_mentioned.extend(as_tuple(axes))
    return axes_mentioned


def _candidates(name: Any, value: Any) -> tuple[Axes, ...]:
    """The candidates of one rule, checked: a list of them, or one that stands for itself.

    An empty tuple of axes is the same as None.
    """
    check.text("AxisRules", "rules", name, "rules by the names of dims")
    # A tuple is one candidate, of axes that split together; a list has several.
    alternatives = [value]
    if isinstance(value, list):
        alternatives = value
    if not alternatives:
        raise ValueError(
            f"The rule for `{name}` lists no candidate; write `{name}=None` for replicated."
        )
    candidates: list[Axes] = []
    for axes in alternatives:
        if not _is_candidate(axes):
            raise ValueError(
                f"The rule for `{name}` holds {check.shown(axes)}; a candidate is an axis, a tuple "
                "of axes or None, and a list holds candidates to try in turn."
            )
        if len(set(as_tuple(axes))) != len(as_tuple(axes)):
            raise ValueError(f"The rule for `{name}` names an axis twice: {axes!r}.")
        # Spelt in one way, so that rules which mean the same compare equal.
        if axes == ():
            axes = None
        candidates.append(axes)
    return tuple(candidates)


def _is_candidate(value: object) -> bool:
    """Whether a value is of the type of a candidate: None, one axis or a tuple of axes."""
    if isinstance(value, tuple):
        return all(isinstance(axis, str) for axis in value)
    return value is None or isinstance(value, str)


def rules_without(rules: AxisRules, axes: Iterable[str]) -> AxisRules:
    """The same rules where these axes split nothing; what they alone split is replicated.

    >>> rules_without(AxisRules(batch=("pod", "data"), embed="pod"), ["pod"])
    AxisRules(batch=('data',), embed=None)
    """
    removed = set(axes)
    remaining: dict[str, tuple[Axes, ...]] = {}
    for name, candidates in rules._rules.items():
        remaining[name] = tuple(_without(candidate, removed) for candidate in candidates)
    forms: dict[str, Form] = {}
    for axis, form in rules._forms.items():
        if axis not in removed:
            forms[axis] = form
    return AxisRules.__new__(AxisRules)._set(remaining, rules._known, rules._policies, forms)


def _without(candidate: Axes, removed: set[str]) -> Axes:
    """A candidate of a rule where some axes split nothing."""
    if isinstance(candidate, str):
        return None if candidate in removed else candidate
    return tuple(axis for axis in as_tuple(candidate) if axis not in removed) or None
