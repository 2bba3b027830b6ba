"""A layer of experts: tokens to the devices that hold their experts, and back.

Where the step is manual over the axis that the experts are split over, the layer sends the tokens
itself, by an all-to-all; where the partitioner lays everything out, it names the tokens by group
and then by expert, which is GShard's annotation, and the partitioner does. Both are one program.
What belongs to the paper's rules is in `_routing`, what belongs to a group of tokens in
`_dispatch`.

Shape suffixes: B batch, M width, G groups, S tokens of a group, E experts, C places of an expert.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer
from jax.sharding import PartitionSpec

from shardlib._tree import named_leaves
from shardlib.checks import _arguments as check
from shardlib.checks import _arrays as check_arrays
from shardlib.experts._dispatch import FORMS, Form, dispatch
from shardlib.experts._routing import Choices, Router, places, z_loss
from shardlib.layouts._annotate import constrain, current_mesh, current_scope, shard
from shardlib.layouts._resolve import resolve
from shardlib.layouts._rules import EXPERTS, AxisRules, as_tuple
from shardlib.modeling._batch import WeightedMean, manual_over_all
from shardlib.modeling._random import is_key

Experts = Callable[[Any, jax.Array], jax.Array]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class MoEStats:
    """Statistics of a layer of experts: sums over local tokens, with what to divide them by.

    - `balance`: the router's loss of uneven load, a mean over groups.
    - `z`: the square of the logarithm of the softmax's sum, a mean over tokens.
    - `load`: by expert, the choices that want it, in even shares: 1 each where all are wanted
      alike.
    - `dropped`: the share of wanted choices that found no place.
    - `entropy`: of a token's softmax over the experts, in nats.
    - `nonfinite`: the share of tokens whose logits are not all finite.
    """

    balance: WeightedMean
    z: WeightedMean
    load: WeightedMean
    dropped: WeightedMean
    entropy: WeightedMean
    nonfinite: WeightedMean

    @property
    def metrics(self) -> dict[str, WeightedMean]:
        """For a loss to return beside its value."""
        return {
            name: getattr(self, name)
            for name in ("balance", "load", "dropped", "entropy", "nonfinite")
        }


def moe(
    x: jax.Array,
    router: Router,
    experts: Experts,
    *,
    gate: jax.Array,
    weights: Any,
    key: jax.Array | None = None,
    group: int | None = None,
    form: Form = "scatter",
    real: jax.Array | None = None,
    names: tuple[str | None, ...] = ("batch", "seq", "act_embed"),
) -> tuple[jax.Array, MoEStats]:
    """Send each token to the experts that a router chooses, and add up their outputs.

    A token that finds no place gives zeros: put the layer beside a residual stream.

    - `x`: the tokens, (batch, ..., width), with a name for each dim in `names`.
    - `experts`: a function of weights and of tokens (experts, tokens, width), each expert's own;
      `jax.vmap` makes one of a function of a single expert. It sees those experts that are on the
      device.
    - `gate`: (width, experts), whole on every device.
    - `weights`: a tree of arrays with a dim for the experts first, which the rule `experts` splits.
    - `key`: given while training: for the router's draws.
    - `group`: so many consecutive tokens share the places of the experts; by default those of one
      example.
    - `form`: `"scatter"` moves rows, `"einsum"` is GShard's products with masks; the results are
      equal.
    - `real`: false for padding, (batch, ...), which goes to no expert and counts for nothing.

    >>> import shardlib as sl
    >>> weights = jnp.stack([jnp.eye(4), 2 * jnp.eye(4)])
    >>> gate = jnp.zeros((4, 2)).at[0, 1].set(9.0)
    >>> with sl.unsharded():
    ...     y, stats = moe(
    ...         jnp.ones((1, 3,
    ...     4)), sl.experts.TopK(1), lambda w, x: x @ w, gate=gate, weights=weights
    ...     )
    >>> y[0, 0].tolist(), stats.load.total.tolist()
    ([2.0, 2.0, 2.0, 2.0], [0.0, 6.0])
    """
    _check(x, gate, form, real, names)
    _check_functions(router, experts, key)
    count = gate.shape[1]
    across = _across(count, names, x)
    _check_weights(weights, count, across)
    # Whatever is in padding.
    x = shard(x if real is None else jnp.where(real[..., None], x, 0), *names)
    group, groups = _groups(x, group, across)
    room = places(router, group, count)

    where = x.astype(jnp.float32)
    if key is not None and router.jitter:
        draws = jax.random.uniform(
            jax.random.fold_in(key, 0), x.shape, jnp.float32, 1 - router.jitter, 1 + router.jitter
        )
        where = where * draws
    logits = _logits(where, gate.astype(jnp.float32))
    drawn = None if key is None else jax.random.uniform(jax.random.fold_in(key, 1), x.shape[:-1])

    def grouped(array: jax.Array, *rest: Any) -> jax.Array:
        return across.lay_out(
            array.reshape(groups, group, *rest), across.batch, *[None] * (1 + len(rest))
        )

    logits_GSE = grouped(logits, count)
    real_GS = jnp.ones((groups, group), bool) if real is None else grouped(real)
    choices = _checked(
        router.choose(logits_GSE, None if drawn is None else grouped(drawn)), real_GS, count
    )
    sent = dispatch(choices, count, room, form)

    x_GECM = across.to_experts(sent.to_experts(grouped(x, x.shape[-1])))
    all_groups, here = x_GECM.shape[:2]
    tokens = x_GECM.swapaxes(0, 1).reshape(here, all_groups * room, -1)
    made = experts(weights, tokens)
    check_arrays.array(
        "moe", "experts", made, "a function that gives an array, (experts, tokens, width)"
    )
    if made.shape[:2] != tokens.shape[:2]:
        raise ValueError(
            f"`experts` was given tokens of shape {tokens.shape}, (experts, tokens, width), and "
            f"made {made.shape} of them."
        )
    y_GECM = across.to_tokens(made.reshape(here, all_groups, room, -1).swapaxes(0, 1))
    y = sent.from_experts(y_GECM).reshape(*x.shape[:-1], -1).astype(x.dtype)
    return shard(y, *names), _stats(router, choices, sent.kept_GSK, logits_GSE, real_GS)


def local_experts(count: int) -> int:
    """How many of `count` experts a model sees where this is traced.

    In the step's form they are a device's own, elsewhere all.

    Linen compares a parameter with the shape that its module gives it:
    `self.param("up", init, (local_experts(8), width, hidden))`.

    >>> local_experts(8)
    8
    """
    check.whole("local_experts", "count", count, "a number of experts", least=1)
    return count // _parts(count)[1]


def _parts(count: int) -> tuple[tuple[str, ...], int, tuple[str, ...]]:
    """The manual axes that experts are split over, into how many parts, and the automatic ones."""
    scope, mesh = current_scope(), current_mesh()
    if scope is None or scope.rules is None or mesh.empty:
        return (), 1, ()
    what = f"the experts, of which a gate, whole everywhere, tells {count}"
    axes = as_tuple(resolve(scope.rules, mesh.shape, (EXPERTS,), (count,), what=what).spec[0])
    axes = tuple(axis for axis in axes if mesh.shape[axis] > 1)
    manual = tuple(axis for axis in axes if axis in mesh.manual_axes)
    if manual and manual != axes:
        raise ValueError(
            f"The rule `{EXPERTS}` splits over {axes}, of which the step is manual over {manual} "
            "alone: tokens are sent over axes of one kind. Have the batch split over all of them, "
            "leave all to the partitioner, `Strategy(manual=())`, or split the experts over fewer."
        )
    return (
        manual,
        math.prod(mesh.shape[axis] for axis in manual),
        tuple(axis for axis in axes if axis not in manual),
    )


class _Across(NamedTuple):
    """Over which axes of the mesh the experts lie, and the batch, and which of them the surrounding
    step is manual over.
    """

    manual: tuple[str, ...]  # of the experts' axes: the layer sends over these itself
    automatic: tuple[str, ...]  # and the partitioner over these
    batch: tuple[str, ...]  # the axes of the batch that are automatic
    width: Any
    parts: int  # of the experts, over the manual axes
    rows: int  # of the batch, over its automatic axes
    sharded: bool

    def lay_out(self, x: jax.Array, *entries: Any) -> jax.Array:
        return (
            constrain(x, PartitionSpec(*(entry or None for entry in entries)))
            if self.sharded
            else x
        )

    def to_experts(self, x_GECM: jax.Array) -> jax.Array:
        """From the devices of the groups to those of the experts."""
        x_GECM = self.lay_out(x_GECM, *self._by_group)
        return self.lay_out(self._sent(x_GECM, split=1, joined=0), *self._by_expert)

    def to_tokens(self, y_GECM: jax.Array) -> jax.Array:
        """From the devices of the experts back to those of the groups."""
        y_GECM = self.lay_out(y_GECM, *self._by_expert)
        return self.lay_out(self._sent(y_GECM, split=0, joined=1), *self._by_group)

    @property
    def _by_group(self) -> tuple[Any, ...]:
        beside = tuple(axis for axis in self.automatic if axis not in self.batch)
        return self.batch, beside, None, self.width

    @property
    def _by_expert(self) -> tuple[Any, ...]:
        return (
            tuple(axis for axis in self.batch if axis not in self.automatic),
            self.automatic,
            None,
            self.width,
        )

    def _sent(self, x: jax.Array, split: int, joined: int) -> jax.Array:
        if not self.manual:
            return x
        spec = PartitionSpec(
            *(entry or None for entry in (self._by_group if split else self._by_expert))
        )

        def send(part: jax.Array) -> jax.Array:
            return lax.all_to_all(part, self.manual, split, joined, tiled=True)

        return manual_over_all(send, spec)(x)


def _across(count: int, names: tuple[str | None, ...], x: jax.Array) -> _Across:
    scope, mesh = current_scope(), current_mesh()
    if scope is None or scope.rules is None or mesh.empty:
        # `shard` says what is wrong, where something is.
        return _Across((), (), (), None, 1, 1, False)
    rules: AxisRules = scope.rules
    scope.record((EXPERTS,))
    width = resolve(
        rules,
        mesh.shape,
        names[-1:],
        x.shape[-1:],
        what="the width",
        manual=frozenset(mesh.manual_axes),
    )
    manual, parts, automatic = _parts(count)
    batch = tuple(axis for axis in rules.batch_axes if axis not in mesh.manual_axes)
    rows = math.prod(mesh.shape[axis] for axis in batch)
    return _Across(manual, automatic, batch, width.spec[0], parts, rows, True)


def _groups(x: jax.Array, group: int | None, across: _Across) -> tuple[int, int]:
    """The size of a group, and how many there are here."""
    tokens = math.prod(x.shape[:-1])
    if group is None:
        if x.ndim == 2:
            raise ValueError(
                f"Of {tokens} tokens without a dim for the sequence, say how many share the places "
                "of the experts: `group=...`."
            )
        group = math.prod(x.shape[1:-1])
    check.whole("moe", "group", group, "a number of tokens", least=1)
    if tokens % (group * across.rows):
        over = f" on each of {across.rows} devices" if across.rows > 1 else ""
        raise ValueError(
            f"`moe(group={group!r})` does not divide the {tokens // across.rows} tokens{over}, of "
            f"{x.shape[:-1]} here in all: a group is a whole number of consecutive tokens, and "
            "lies on one device."
        )
    return int(group), tokens // int(group)


_COLUMNS = 256


@jax.custom_vjp
def _logits(x: jax.Array, gate_ME: jax.Array) -> jax.Array:
    """The product in float32, of which a TPU would take the factors in bfloat16.

    So many columns at a time: of a product with thousands its compiler makes several times the
    code, in several times the seconds, for each layer that is compiled. The transpose is said, so
    that nobody differentiates the loop.
    """
    parts_PMC = _columns(gate_ME)
    parts = lax.map(lambda gate_MC: _product("...m,mc->...c", x, gate_MC), parts_PMC)
    return jnp.moveaxis(parts, 0, -2).reshape(*x.shape[:-1], gate_ME.shape[1])


def _backwards(
    kept: tuple[jax.Array, jax.Array], gradient: jax.Array
) -> tuple[jax.Array, jax.Array]:
    x, gate_ME = kept

    def add(of_x: jax.Array, part: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        gate_MC, of_part = part
        return of_x + _product("...c,mc->...m", of_part, gate_MC), _product(
            "...m,...c->mc", x, of_part
        )

    of_parts = jnp.moveaxis(gradient.reshape(*x.shape[:-1], -1, _columns(gate_ME).shape[-1]), -2, 0)
    of_x, of_gate_PMC = lax.scan(add, jnp.zeros_like(x), (_columns(gate_ME), of_parts))
    return of_x, of_gate_PMC.swapaxes(0, 1).reshape(gate_ME.shape)


_logits.defvjp(lambda x, gate_ME: (_logits(x, gate_ME), (x, gate_ME)), _backwards)


def _product(dims: str, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.einsum(dims, x, y, precision="highest")


def _columns(gate_ME: jax.Array) -> jax.Array:
    width, count = gate_ME.shape
    return gate_ME.reshape(width, -1, count if count % _COLUMNS else _COLUMNS).swapaxes(0, 1)


def _checked(choices: Choices, real_GS: jax.Array, count: int) -> Choices:
    """The choices of real tokens. An expert that there is not makes the output nan, where it cannot
    be an error.
    """
    expert, weight, wanted = choices
    if not jnp.issubdtype(expert.dtype, jnp.integer):
        raise ValueError(
            f"A router chose experts of dtype {expert.dtype}; an expert is a whole number."
        )
    within = (expert >= 0) & (expert < count)
    if not isinstance(within, Tracer) and not bool(within.all()):
        raise ValueError(
            f"A router chose expert {int(expert[~within][0])}, and there are {count}, counted from "
            f"0: {int((~within).sum())} of {within.size} choices are out of range."
        )
    weight = jnp.where(within, weight.astype(jnp.float32), jnp.nan)
    return Choices(
        jnp.clip(expert, 0, count - 1).astype(jnp.int32), weight, wanted & real_GS[..., None]
    )


def _stats(
    router: Router, choices: Choices, kept_GSK: jax.Array, logits_GSE: jax.Array, real_GS: jax.Array
) -> MoEStats:
    count = logits_GSE.shape[-1]
    finite_GS = jnp.isfinite(logits_GSE).all(-1)
    if not isinstance(finite_GS, Tracer) and not bool((finite_GS | ~real_GS).all()):
        group, token = map(int, jnp.argwhere(~finite_GS & real_GS)[0])
        raise ValueError(
            f"The router's logits are not finite for {int((~finite_GS & real_GS).sum())} of "
            f"{finite_GS.size} tokens, the first being token {token} of group {group}: the gate or "
            "what it is given is not."
        )
    each_GS = real_GS.astype(jnp.float32)
    tokens_G = each_GS.sum(1)
    share_G = 1 / jnp.maximum(tokens_G, 1)
    probability_GSE = jax.nn.softmax(logits_GSE)
    chosen_GSKE = jax.nn.one_hot(choices.expert, count) * each_GS[..., None, None]
    first_GE = chosen_GSKE[:, :, 0].sum(1) * share_G[:, None]
    every_GE = chosen_GSKE.sum((1, 2)) * share_G[:, None] / router.choices
    mean_GE = (probability_GSE * each_GS[..., None]).sum(1) * share_G[:, None]
    wanted = (choices.wanted * 1.0).sum()
    by_expert = (jax.nn.one_hot(choices.expert, count) * choices.wanted[..., None]).sum((0, 1, 2))
    logarithm_GSE = jax.nn.log_softmax(logits_GSE)
    entropy_GS = -(jnp.where(probability_GSE > 0, probability_GSE * logarithm_GSE, 0)).sum(-1)
    return MoEStats(
        WeightedMean(router.balance(first_GE, every_GE, mean_GE).sum(), (tokens_G > 0).sum() * 1.0),
        WeightedMean((z_loss(logits_GSE) * each_GS).sum(), each_GS.sum()),
        WeightedMean(by_expert * count, wanted),
        WeightedMean((choices.wanted & ~kept_GSK).sum() * 1.0, wanted),
        WeightedMean((lax.stop_gradient(entropy_GS) * each_GS).sum(), each_GS.sum()),
        WeightedMean((~finite_GS * each_GS).sum(), each_GS.sum()),
    )


def _check(x: Any, gate: Any, form: Any, real: Any, names: Any) -> None:
    check_arrays.array("moe", "x", x, "an array of tokens, (batch, ..., width)")
    check.kind("moe", "names", names, tuple | list, "a name for each dim of the tokens, in a tuple")
    if x.ndim < 2 or len(names) != x.ndim or not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(
            "`moe(x, ...)` takes tokens (batch, ..., width), real numbers, and a name for each "
            f"dim; got {x.dtype}{list(x.shape)} and `names={check.shown(names)}`."
        )
    check_arrays.array("moe", "gate", gate, "an array, (width, experts)")
    if (
        gate.ndim != 2
        or gate.shape[0] != x.shape[-1]
        or not jnp.issubdtype(gate.dtype, jnp.floating)
    ):
        raise ValueError(
            f"`moe(gate=...)` is of shape (width, experts), ({x.shape[-1]}, ...) for tokens of "
            f"shape {x.shape}; got {getattr(gate, 'shape', type(gate).__name__)}."
        )
    check.choice("moe", "form", form, FORMS)
    shape, dtype = getattr(real, "shape", None), getattr(real, "dtype", type(real).__name__)
    if real is not None and (shape != x.shape[:-1] or str(dtype) != "bool"):
        raise ValueError(
            f"`moe(real=...)` says of each token whether it is one, shape {x.shape[:-1]}, true or "
            f"false; got {shape} of {dtype}."
        )


def _check_functions(router: Any, experts: Any, key: Any) -> None:
    needed = ("choices", "capacity", "jitter", "choose", "balance")
    if isinstance(router, type) or not all(hasattr(router, name) for name in needed):
        raise check.refusal("moe", "router", router, "a router, such as `sl.experts.Top2()`")
    check.function("moe", "experts", experts, "a function of weights and tokens")
    if key is not None:
        takes = "a key, such as `jax.random.key(0)`, or None"
        check_arrays.array("moe", "key", key, takes)
        if not is_key(key) and key.dtype != jnp.uint32:  # of `jax.random.PRNGKey`
            raise check.refusal("moe", "key", key, takes)


def _check_weights(weights: Any, count: int, across: _Across) -> None:
    here = count // across.parts
    leaves = named_leaves(weights)
    for path, leaf in leaves:
        check_arrays.array(
            "moe", "weights", leaf, "a tree of arrays, with a dim for the experts first"
        )
        if not leaf.ndim or leaf.shape[0] != here:
            split = (
                f", which the axes {across.manual} split into {across.parts}"
                if across.parts > 1
                else ""
            )
            whole = (
                " All of them are here: name the parameter's first dim `experts`, so that each "
                "device holds its own."
                if across.parts > 1 and getattr(leaf, "ndim", 0) and leaf.shape[0] == count
                else ""
            )
            raise ValueError(
                f"`{path or 'weights'}` of shape {getattr(leaf, 'shape', None)} should have {here} "
                f"experts along dim 0: the gate tells {count}{split}.{whole}"
            )
    if not leaves:
        raise ValueError("`moe(weights=...)` holds no arrays.")
