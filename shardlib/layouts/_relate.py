"""Which parameter, and which of its dims, each leaf of an optimizer's state follows: asked of
`init`, not read off names.

`init` is asked, abstractly, what it makes of parameters of slightly other shapes. A leaf follows
the parameter with which it changes, and a dim of it the dim with which that changes.
"""

import itertools
import math
from collections.abc import Callable, Sequence
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


# One way may not do: a moment that is factored from some size on has another rank there. Then the
# next is tried.
_RESIZES: tuple[Resize, ...] = (
    lambda size: size + 1,
    lambda size: size - 1 if size > 1 else size + 1,
    lambda size: 2 * size or 1,  # for an `init` that takes multiples alone
)


def relate(init: Callable[[Any], Any], params: Any) -> dict[str, Relation]:
    """What each leaf of the state that `init` makes has to do with the parameters, by its path in
    the state.

    `params` is a tree of arrays, or of their shapes. Nothing is computed, and no name or path is
    read.

    >>> import jax.numpy as jnp, optax
    >>> for path, relation in relate(optax.sm3(0.1).init, {"w": jnp.ones((4, 8))}).items():
    ...     print(path, relation.kind, relation.parameter, relation.dims)
    0/mu/w/0 part w (0,)
    0/mu/w/1 part w (1,)
    0/nu/w same w (0, 1)
    """
    ask = _Ask(init, params)
    which = _which(ask)
    sure = {path: i for path, i in which.items() if isinstance(i, int)}
    dims = _dims(ask, sure)
    first = _first_dims(ask, {path: i for path, i in sure.items() if path not in dims})
    dims |= first

    def relation(path: str, shape: Shape) -> Relation:
        followed, whole = dims.get(path), (None,) * len(shape)
        if followed is None and math.prod(shape) <= 1:
            return Relation("scalar", None, whole)
        match which.get(path):
            case None:
                return Relation(
                    "ambiguous",
                    None,
                    whole,
                    "`init` takes no parameters of other shapes to compare with",
                )
            case str(reason):
                return Relation("none", None, whole, reason)
            case i:
                name, parameter = ask.parameters[i]
        if followed is None:
            return Relation(
                "ambiguous", name, whole, f"follows `{name}`, by which dims cannot be told"
            )
        if followed == tuple(range(len(parameter))):
            return Relation("same", name, followed)
        if path in first:
            return Relation(
                "part",
                name,
                followed,
                f"follows dim 0 of `{name}`; by which dims else cannot be told",
            )
        listed = ", ".join(str(dim) for dim in followed if dim is not None)
        return Relation("part", name, followed, f"follows dim {listed} of `{name}`")

    return {path: relation(path, shape) for path, shape in ask.base.items()}


class _Refused(Exception):  # noqa: N818
    """`init` does not take these shapes."""


class _Ask:
    """What `init` makes of the parameters, and of the same parameters in other shapes: the shapes
    of its leaves.
    """

    def __init__(self, init: Callable[[Any], Any], params: Any):
        leaves, tree = jax.tree.flatten(params)
        self.parameters: list[tuple[str, Shape]] = [
            (path, leaf.shape) for path, leaf in named_leaves(params)
        ]

        def made(shapes: Sequence[Shape]) -> dict[str, Shape]:
            resized = [
                jax.ShapeDtypeStruct(shape, leaf.dtype)
                for shape, leaf in zip(shapes, leaves, strict=True)
            ]
            state = jax.eval_shape(init, tree.unflatten(resized))
            return {path: leaf.shape for path, leaf in named_leaves(state)}

        self._made = made
        self.base = made([shape for _, shape in self.parameters])

    def __call__(
        self, resize: Resize, chosen: Callable[[int, int], bool]
    ) -> dict[str, Shape | None]:
        """With the chosen dims resized, each a parameter's index and a dim; None for a leaf that is
        not there then.
        """
        shapes = [
            tuple(resize(size) if chosen(i, dim) else size for dim, size in enumerate(shape))
            for i, (_, shape) in enumerate(self.parameters)
        ]
        try:
            made = self._made(shapes)
        except (
            Exception
        ) as error:  # whatever an `init` may raise for shapes that are not the user's
            raise _Refused from error
        # A mask may ask how large a parameter is.
        return {path: made.get(path) for path in self.base}


def _which(ask: _Ask) -> dict[str, int | str]:
    """For each leaf the index of the parameter that it follows, or why there is none; empty if
    `init` would not tell.

    Each parameter is resized in a half of the rounds that is its own, all its dims at once so that
    squares stay square. Halves are of equal size, so what follows several parameters changes in
    more rounds than any one of them does.
    """
    count = len(ask.parameters)
    rounds = next(n for n in itertools.count(1) if math.comb(n, n // 2) >= count)
    halves = list(itertools.islice(itertools.combinations(range(rounds), (rounds + 1) // 2), count))
    indices = {half: i for i, half in enumerate(halves)}

    def index(changes: tuple[int, ...]) -> int | str:
        return (
            indices.get(changes, "follows several parameters")
            if changes
            else "follows no parameter"
        )

    for resize in _RESIZES:
        try:
            answers = [ask(resize, lambda i, _, at=at: at in halves[i]) for at in range(rounds)]
        except _Refused:
            continue
        return {
            path: index(tuple(at for at, shapes in enumerate(answers) if shapes[path] != shape))
            for path, shape in ask.base.items()
        }
    return {}


def _dims(ask: _Ask, which: dict[str, int]) -> dict[str, Dims]:
    """For each leaf that follows a parameter the dims that it follows, by the first resizing that
    explains them all.
    """
    found: dict[str, Dims] = {}
    rank = max((len(shape) for _, shape in ask.parameters), default=0)
    for resize in _RESIZES:
        if which.keys() <= found.keys():
            break
        try:
            rounds = [ask(resize, lambda _, dim, at=at: dim == at) for at in range(rank)]
            rounds.append(ask(resize, lambda *_: True))
        except _Refused:
            continue
        for path in which.keys() - found.keys():
            _, parameter = ask.parameters[which[path]]
            dims = _explained(
                ask.base[path], parameter, [shapes[path] for shapes in rounds], resize
            )
            if dims is not None:
                found[path] = dims
    return found


def _first_dims(ask: _Ask, which: dict[str, int]) -> dict[str, Dims]:
    """For leaves that nothing explains, of stacks whose layers are not as many as any other dim is
    large: where dim 0 went.

    A moment that is factored over a square has dims that cannot be told apart, but for that which
    counts the squares.
    """
    found: dict[str, Dims] = {}
    for resize in _RESIZES if which else ():
        try:
            shapes = ask(resize, lambda _, dim: dim == 0)
        except _Refused:
            continue
        for path in which.keys() - found.keys():
            shape, other, parameter = ask.base[path], shapes[path], ask.parameters[which[path]][1]
            if (
                other is None
                or len(parameter) < 3
                or len(other) != len(shape)
                or parameter.count(parameter[0]) > 1
            ):
                continue
            changed = [at for at, size in enumerate(shape) if other[at] != size]
            if [(shape[at], other[at]) for at in changed] == [(parameter[0], resize(parameter[0]))]:
                found[path] = tuple(0 if at in changed else None for at in range(len(shape)))
    return found


def _explained(
    shape: Shape, parameter: Shape, rounds: Sequence[Shape | None], resize: Resize
) -> Dims | None:
    """The dims that a leaf follows if each dim of it follows one in full, or none; in the last
    round all are resized.
    """
    dims: list[int | None] = []
    changed = [other for other in rounds if other is not None and len(other) == len(shape)]
    if len(changed) < len(rounds):
        return None
    for at, size in enumerate(shape):
        *each, every = (other[at] for other in changed)
        match [dim for dim, other in enumerate(each) if other != size]:
            case [] if every == size:
                dims.append(None)
            case [dim] if parameter[dim : dim + 1] == (size,) and each[dim] == every == resize(
                size
            ):
                dims.append(dim)
            case _:
                return None
    return tuple(dims) if any(dim is not None for dim in dims) else None
