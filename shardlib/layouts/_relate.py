"""Which parameter, and which of its dims, each leaf of an optimizer's state follows.

Nothing is read off names. `init` is asked, abstractly, what it makes of parameters of slightly
other shapes. A leaf follows the parameter with which it changes, and a dim of it the dim with which
that changes. Of a factored moment of w, of shape (4, 8):

    resized            w        v_row   v_col   count
    nothing            (4, 8)   (4,)    (8,)    ()
    dim 0 of w         (5, 8)   (5,)    (8,)    ()      v_row follows dim 0 of w
    dim 1 of w         (4, 9)   (4,)    (9,)    ()      v_col follows dim 1 of w

Asking for each parameter in turn would take long for a large model. Parameters are resized in
groups instead, so that the groups in which a leaf changes spell the number of its parameter.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

import jax

from shardlib._tree import named_leaves

Kind: TypeAlias = Literal["same", "part", "scalar", "none", "ambiguous"]
Dims: TypeAlias = tuple[int | None, ...]
Shape: TypeAlias = tuple[int, ...]
Resize: TypeAlias = Callable[[int], int]


class Relation(NamedTuple):
    """What a leaf of the state has to do with the parameters.

    `same`: dim for dim as its parameter is. `part`: some of its dims are dims of its parameter.
    `scalar`: of one element or none, as counts and placeholders are. `none`: follows no parameter,
    or several. `ambiguous`: cannot be told.
    """

    kind: Kind
    parameter: str | None  # the path of the parameter that it follows
    dims: Dims  # for each dim of the leaf, the dim of the parameter that it follows
    reason: str = ""


# Ways of resizing, to be tried in turn. One may not do: a moment that is factored from some size on
# has another rank there.
_RESIZES: tuple[Resize, ...] = (
    lambda size: size + 1,
    lambda size: size - 1 if size > 1 else size + 1,
    lambda size: 2 * size or 1,  # for an `init` that takes only multiples
)


def relate(init: Callable[[Any], Any], params: Any) -> dict[str, Relation]:
    """What each leaf of the state that `init` makes has to do with the parameters.

    The result has a relation for each leaf, by its path in the state. `params` is a tree of arrays,
    or of their shapes. Nothing is computed, and no name or path is read.

    >>> import jax.numpy as jnp, optax
    >>> for path, relation in relate(optax.sm3(0.1).init, {"w": jnp.ones((4, 8))}).items():
    ...     print(path, relation.kind, relation.parameter, relation.dims)
    0/mu/w/0 part w (0,)
    0/mu/w/1 part w (1,)
    0/nu/w same w (0, 1)
    """
    # One `eval_shape` for each group of parameters, and not one for each parameter.
    probe = _Probe.of(init, params)
    parameter_of = _followed_parameters(probe)
    # Some leaves follow a parameter; of the others `parameter_of` has the reason why not.
    followers: dict[str, int] = {}  # the index of the parameter
    for path, parameter in parameter_of.items():
        if isinstance(parameter, int):
            followers[path] = parameter
    dims, masked = _followed_dims(probe, followers)
    if masked:
        # What a mask leaves out may move others up in a list: another order of parameters tells.
        again = _followed_parameters(probe, backwards=True)
        for path, followed in masked.items():
            if again.get(path) == followers[path]:
                dims[path] = followed
    unexplained: dict[str, int] = {}
    for path, index in followers.items():
        if path not in dims:
            unexplained[path] = index
    first_dims = _first_dims(probe, unexplained)

    relations: dict[str, Relation] = {}
    for path, shape in probe.base.items():
        followed = first_dims.get(path, dims.get(path))
        index = parameter_of.get(path)
        if followed is None:
            relations[path] = _unfollowing(probe, index, shape)
        else:
            # Dims are known only where the parameter is.
            name, parameter_shape = probe.parameters[followers[path]]
            relations[path] = _following(name, parameter_shape, followed, path in first_dims)
    return relations


def _unfollowing(probe: "_Probe", parameter: int | str | None, shape: Shape) -> Relation:
    """The relation of a leaf for which no followed dims are known.

    `parameter` is the index of the one that it follows, the reason why there is none, or None where
    `init` would not tell.
    """
    whole = (None,) * len(shape)
    if math.prod(shape) <= 1:
        return Relation("scalar", None, whole)
    match parameter:
        case None:
            reason = "`init` takes no parameters of other shapes to compare with"
            return Relation("ambiguous", None, whole, reason)
        case str(reason):
            return Relation("none", None, whole, reason)
    name, _ = probe.parameters[parameter]
    return Relation("ambiguous", name, whole, f"follows `{name}`, by which dims cannot be told")


def _following(name: str, parameter_shape: Shape, dims: Dims, only_first: bool) -> Relation:
    """The relation of a leaf that follows dims of a parameter.

    `only_first` says that the other dims of the leaf may follow some too, which cannot be told.
    """
    if dims == tuple(range(len(parameter_shape))):
        return Relation("same", name, dims)
    if only_first:
        reason = f"follows dim 0 of `{name}`; by which dims else cannot be told"
    else:
        listed = ", ".join(str(dim) for dim in dims if dim is not None)
        reason = f"follows dim {listed} of `{name}`"
    return Relation("part", name, dims, reason)


class _RefusedError(Exception):
    """`init` does not take these shapes."""


@dataclass(frozen=True)
class _Probe:
    """What `init` makes of the parameters, and of the same parameters in other shapes.

    `parameters` has the path and the shape of each parameter; `base` the shape of each leaf of the
    state, by its path, as it is for parameters in their own shapes.
    """

    parameters: list[tuple[str, Shape]]
    base: dict[str, Shape]
    state_shapes: Callable[[Sequence[Shape]], dict[str, Shape]]

    @classmethod
    def of(cls, init: Callable[[Any], Any], params: Any) -> "_Probe":
        """The probe of an optimizer's `init` and a tree of parameters.

        `init` is traced here for the shapes that the parameters have, and later for others.
        """
        leaves, tree = jax.tree.flatten(params)

        def state_shapes(shapes: Sequence[Shape]) -> dict[str, Shape]:
            resized = []
            for shape, leaf in zip(shapes, leaves, strict=True):
                resized.append(jax.ShapeDtypeStruct(shape, leaf.dtype))
            # `init` is only traced, so that no array of these shapes is ever made.
            state = jax.eval_shape(init, tree.unflatten(resized))
            return {path: leaf.shape for path, leaf in named_leaves(state)}

        parameters = [(path, leaf.shape) for path, leaf in named_leaves(params)]
        base = state_shapes([shape for _, shape in parameters])
        return cls(parameters, base, state_shapes)

    def __call__(
        self, resize: Resize, chosen: Callable[[int, int], bool]
    ) -> dict[str, Shape | None]:
        """The shapes of the leaves when the chosen dims are resized.

        `chosen` is given a parameter's index and a dim. A leaf that is not there then has None: a
        mask may ask how large a parameter is. Raises `_RefusedError` where `init` fails.
        """
        resized: list[Shape] = []
        for index, (_, shape) in enumerate(self.parameters):
            sizes = list(shape)
            for dim, size in enumerate(shape):
                if chosen(index, dim):
                    sizes[dim] = resize(size)
            resized.append(tuple(sizes))
        try:
            state = self.state_shapes(resized)
        except (
            Exception
        ) as error:  # whatever an `init` may raise for shapes that are not the user's
            raise _RefusedError from error
        return {path: state.get(path) for path in self.base}


def _followed_parameters(probe: _Probe, *, backwards: bool = False) -> dict[str, int | str]:
    """For each leaf the index of the parameter that it follows, or why there is none.

    Each parameter is resized in a half of the rounds that is its own, all its dims at once so that
    squares stay square. Halves are of equal size, so what follows several parameters changes in
    more rounds than any one of them does. The result is empty if `init` takes no other shapes.
    `backwards` gives the halves out in the opposite order.
    """
    rounds, halves = _halves_of_rounds(len(probe.parameters))
    if backwards:
        halves.reverse()
    index_of_half = dict(zip(halves, range(len(halves)), strict=True))
    # An `init` that refuses these shapes may take those of another way of resizing.
    for resize in _RESIZES:
        answers: list[dict[str, Shape | None]] = []
        try:
            for number in range(rounds):
                answers.append(probe(resize, lambda i, _, number=number: number in halves[i]))
        except _RefusedError:
            continue
        followed: dict[str, int | str] = {}
        for path, shape in probe.base.items():
            changes = _rounds_of_change(answers, path, shape)
            if changes:
                followed[path] = index_of_half.get(changes, "follows several parameters")
            else:
                followed[path] = "follows no parameter"
        return followed
    return {}


def _rounds_of_change(
    answers: Sequence[Mapping[str, Shape | None]], path: str, shape: Shape | None
) -> tuple[int, ...]:
    """The rounds in which an array of the state has another shape than with the real parameters."""
    rounds: list[int] = []
    for number, shapes in enumerate(answers):
        if shapes[path] != shape:
            rounds.append(number)
    return tuple(rounds)


def _halves_of_rounds(count: int) -> tuple[int, list[tuple[int, ...]]]:
    """The fewest rounds that have a half for each of `count` parameters, and these halves."""
    rounds = 1
    while math.comb(rounds, rounds // 2) < count:
        rounds += 1
    halves = itertools.combinations(range(rounds), (rounds + 1) // 2)
    return rounds, list(itertools.islice(halves, count))


def _followed_dims(
    probe: _Probe, parameter_of: Mapping[str, int]
) -> tuple[dict[str, Dims], dict[str, Dims]]:
    """The dims that leaves follow of their parameters, and those of leaves that a mask left out.

    Dim 0 of all parameters is resized, then dim 1 and so on, and all dims at last. The ways of
    resizing are tried until they explain every leaf; one that none explains is left out.

    A mask that compares sizes, `kernel.shape[-1] == 1024`, leaves a leaf out whenever these are
    other ones. If it has the shape of its parameter, it is taken to follow it dim for dim, and is
    in the second of the two results.
    """
    explained: dict[str, Dims] = {}
    masked: dict[str, Dims] = {}
    rank = max((len(shape) for _, shape in probe.parameters), default=0)
    for resize in _RESIZES:
        if parameter_of.keys() <= explained.keys():
            break
        rounds: list[dict[str, Shape | None]] = []
        try:
            for resized_dim in range(rank):
                rounds.append(probe(resize, lambda _, dim, at=resized_dim: dim == at))
            # All dims at once: what a dim follows must not depend on the others.
            rounds.append(probe(resize, lambda *_: True))
        except _RefusedError:
            continue
        for path in parameter_of.keys() - explained.keys():
            _, parameter_shape = probe.parameters[parameter_of[path]]
            shapes = [shapes_of_round[path] for shapes_of_round in rounds]
            dims = _explained(probe.base[path], parameter_shape, shapes, resize)
            if dims is not None:
                explained[path] = dims
            elif None in shapes and probe.base[path] == parameter_shape:
                masked[path] = tuple(range(len(parameter_shape)))
    for path in explained:
        masked.pop(path, None)
    return explained, masked


def _first_dims(probe: _Probe, parameter_of: Mapping[str, int]) -> dict[str, Dims]:
    """Where dim 0 of the parameter went, for leaves of which nothing else explains the dims.

    A moment that is factored over a square has dims that cannot be told apart, but for dim 0 of a
    stack of layers, which counts the squares. It can be told where the layers are not as many as
    any other dim is large.
    """
    explained: dict[str, Dims] = {}
    if not parameter_of:
        return explained
    for resize in _RESIZES:
        try:
            shapes = probe(resize, lambda _, dim: dim == 0)
        except _RefusedError:
            continue
        for path in parameter_of.keys() - explained.keys():
            _, parameter_shape = probe.parameters[parameter_of[path]]
            dims = _explained_first(probe.base[path], parameter_shape, shapes[path], resize)
            if dims is not None:
                explained[path] = dims
    return explained


def _explained_first(
    shape: Shape, parameter_shape: Shape, resized_shape: Shape | None, resize: Resize
) -> Dims | None:
    """The dims that a leaf follows, if one of its dims follows dim 0 of its parameter in full.

    `resized_shape` is the leaf's shape when dim 0 of every parameter is resized.
    """
    if resized_shape is None or len(resized_shape) != len(shape):
        return None
    # A plain matrix is no stack.
    if len(parameter_shape) < 3 or parameter_shape.count(parameter_shape[0]) > 1:
        return None
    layers = parameter_shape[0]
    dim = _only_changed(shape, resized_shape)
    if dim is None:
        return None
    if (shape[dim], resized_shape[dim]) != (layers, resize(layers)):
        return None
    dims: list[int | None] = [None] * len(shape)
    dims[dim] = 0
    return tuple(dims)


def _only_changed(shape: Shape, resized_shape: Shape) -> int | None:
    """The dim whose size has changed, or None if none has, or several have.

    >>> _only_changed((4, 8), (4, 9)), _only_changed((4, 8), (5, 9))
    (1, None)
    """
    changed: list[int] = []
    for dim, size in enumerate(shape):
        if resized_shape[dim] != size:
            changed.append(dim)
    if len(changed) != 1:
        return None
    return changed[0]


def _explained(
    shape: Shape, parameter_shape: Shape, rounds: Sequence[Shape | None], resize: Resize
) -> Dims | None:
    """The dims that a leaf follows, if each of its dims follows one of its parameter in full.

    Dims that follow none have None, and a leaf without any other dim has no explanation.

    Args:
        shape: the leaf's shape.
        parameter_shape: that of the parameter that it follows.
        rounds: the leaf's shape in each round; round k resizes dim k, and the last one all dims.
        resize: how sizes were changed.
    """
    resized_shapes: list[Shape] = []
    for resized_shape in rounds:
        # A leaf that is gone, or has another rank, has no dims to compare.
        if resized_shape is None or len(resized_shape) != len(shape):
            return None
        resized_shapes.append(resized_shape)
    dims: list[int | None] = []
    for dim, size in enumerate(shape):
        *sizes, size_of_all = (resized_shape[dim] for resized_shape in resized_shapes)
        changes = [parameter_dim for parameter_dim, other in enumerate(sizes) if other != size]
        if not changes and size_of_all == size:
            dims.append(None)
            continue
        # A dim that changes with several, such as a product of them, follows none in full.
        if len(changes) != 1:
            return None
        [followed] = changes
        # It must be as large as that dim, before and after.
        in_full = parameter_shape[followed : followed + 1] == (size,)
        if not in_full or not sizes[followed] == size_of_all == resize(size):
            return None
        dims.append(followed)
    if set(dims) <= {None}:
        return None
    return tuple(dims)
