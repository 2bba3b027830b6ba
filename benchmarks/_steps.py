"""Steps written by hand, each beside the collectives that theory says it runs.

Every one is `(state, batch) -> (state, loss)` with a state of `params` and Adam's `opt_state`,
float32 throughout, manual over its whole mesh, so that what is written is what is sent. `LAYERS`
layers of width `WIDTH` see `ROWS` rows on each device. Meshes may have more axes than a step uses;
then several groups of devices do the same.

The axes lie along one dim of a TPU's torus each, or along all of 2x4 chips. Of an axis over several
dims the compiler makes all-reduces of all reduce-scatters, which the plan reports; theory does not
ask for them. `sends` gives, for each kind of collective and axis, the bytes that a device sends in
a step.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

LAYERS, WIDTH, HIDDEN, ROWS = 8, 2048, 8192, 2048
MATRIX = WIDTH * WIDTH * 4
SQUARE = LAYERS * MATRIX  # bytes of one square matrix per layer
STREAM = ROWS * WIDTH * 4  # bytes of what flows between layers
SCALAR = 4

Sends = dict[tuple[str, str | tuple[str, ...]], int]


@dataclass(frozen=True)
class HandWritten:
    """A step for meshes with these axes, and what a device sends."""

    name: str
    mesh: str
    dcn: str
    build: Callable[[Mesh], tuple[Any, Any, Any]]
    sends: Sends


def reduced(size: int, devices: int = 8) -> int:
    """What each device sends in an all-reduce of so many bytes."""
    return 2 * size * (devices - 1) // devices


def moved(size: int, devices: int = 8) -> int:
    """What each device sends to gather, or to reduce and scatter, an array of so many bytes."""
    return size * (devices - 1) // devices


def adam(params: Any, gradients: Any, moments: Any) -> tuple[Any, Any]:
    """Adam, without the correction of its bias."""
    mean = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, moments["mean"], gradients)
    square = jax.tree.map(lambda v, g: 0.99 * v + 0.01 * g * g, moments["square"], gradients)
    moved = jax.tree.map(lambda p, m, v: p - 1e-3 * m / (jnp.sqrt(v) + 1e-8), params, mean, square)
    return moved, {"mean": mean, "square": square}


def build(
    mesh: Mesh,
    shapes: dict[str, tuple[int, ...]],
    spec: P,
    rows_spec: P,
    gradient: Callable[[Any, Any], tuple[Any, Any]],
    update: Callable[[Any, Any, Any], tuple[Any, Any]] = adam,
    moments_spec: P | None = None,
    rows: int = ROWS,
) -> tuple[Any, Any, Any]:
    """The step, its state and its batch: `gradient(params, rows)` gives the loss and gradients,
    ready for `update`.
    """
    moments_spec = spec if moments_spec is None else moments_spec
    specs = {
        "params": dict.fromkeys(shapes, spec),
        "opt_state": {name: dict.fromkeys(shapes, moments_spec) for name in ("mean", "square")},
    }

    def run(state: Any, rows: Any) -> tuple[Any, Any]:
        loss, gradients = gradient(state["params"], rows)
        params, moments = update(state["params"], gradients, state["opt_state"])
        return {"params": params, "opt_state": moments}, loss

    def array(shape: tuple[int, ...], spec: P) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, "float32", sharding=NamedSharding(mesh, spec))

    mapped = jax.shard_map(
        run, mesh=mesh, in_specs=(specs, rows_spec), out_specs=(specs, P()), check_vma=False
    )
    state = jax.tree.map(
        lambda spec, shape: array(shape, spec), specs["params"], shapes, is_leaf=_is_spec
    )
    moments = {
        name: {key: array(shapes[key], moments_spec) for key in shapes}
        for name in ("mean", "square")
    }
    step = jax.jit(mapped, donate_argnums=0)
    devices = math.prod(
        mesh.shape[axis]
        for entry in rows_spec
        for axis in (entry if isinstance(entry, tuple) else (entry,))
    )
    return step, {"params": state, "opt_state": moments}, array((devices * rows, WIDTH), rows_spec)


def _is_spec(leaf: Any) -> bool:
    return isinstance(leaf, P)


def layers(layer: Callable[[Any, Any], Any], params: Any, x: Any) -> Any:
    """The layers in turn, in one loop."""
    return lax.scan(lambda x, weights: (layer(x, weights), None), x, params)[0]


def dense(x: Any, weights: Any) -> Any:
    return x + jnp.tanh(x @ weights["w"])


def mean_square(x: Any) -> Any:
    return jnp.mean(x * x)


def everywhere(axes: str | tuple[str, ...]) -> Callable[[Any], Any]:
    """Add a tree up over devices."""
    return lambda tree: jax.tree.map(lambda leaf: lax.psum(leaf, axes), tree)


SQUARES = {"w": (LAYERS, WIDTH, WIDTH)}


def data_parallel(mesh: Mesh) -> tuple[Any, Any, Any]:
    """Each device its rows; gradients are added up once."""

    def gradient(params: Any, rows: Any) -> tuple[Any, Any]:
        return everywhere("data")(
            jax.value_and_grad(lambda p: mean_square(layers(dense, p, rows)))(params)
        )

    return build(mesh, SQUARES, P(), P("data"), gradient)


def accumulation(mesh: Mesh) -> tuple[Any, Any, Any]:
    """As `data_parallel`, in four microbatches: gradients are still added up once."""

    def gradient(params: Any, rows: Any) -> tuple[Any, Any]:
        loss = jax.value_and_grad(lambda p, part: mean_square(layers(dense, p, part)))
        zero = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, params))
        add = functools.partial(jax.tree.map, jnp.add)
        total, _ = lax.scan(
            lambda sums, part: (add(sums, loss(params, part)), None),
            zero,
            rows.reshape(4, ROWS // 4, WIDTH),
        )
        return everywhere("data")(total)

    return build(mesh, SQUARES, P(), P("data"), gradient)


def gathered_in_the_loop(mesh: Mesh) -> tuple[Any, Any, Any]:
    """Parameters in shards, each layer's gathered where it is used, forward and again backward
    (ZeRO-3).
    """

    @jax.checkpoint
    def layer(x: Any, weights: Any) -> Any:
        return dense(x, {"w": lax.all_gather(weights["w"], "data", tiled=True)})

    def gradient(params: Any, rows: Any) -> tuple[Any, Any]:
        loss, gradients = jax.value_and_grad(lambda p: mean_square(layers(layer, p, rows)))(params)
        return lax.psum(loss, "data"), gradients

    return build(mesh, SQUARES, P(None, "data"), P("data"), gradient)


def optimizer_in_shards(mesh: Mesh) -> tuple[Any, Any, Any]:
    """Gradients reduced and scattered, the optimizer on shards, new parameters gathered
    (ZeRO-1).
    """

    def gradient(params: Any, rows: Any) -> tuple[Any, Any]:
        loss, gradients = jax.value_and_grad(lambda p: mean_square(layers(dense, p, rows)))(params)
        scatter = functools.partial(
            lax.psum_scatter, axis_name="data", scatter_dimension=1, tiled=True
        )
        return lax.psum(loss, "data"), jax.tree.map(scatter, gradients)

    def update(params: Any, gradients: Any, moments: Any) -> tuple[Any, Any]:
        mine = lax.axis_index("data") * (WIDTH // 8)
        shards = jax.tree.map(lambda p: lax.dynamic_slice_in_dim(p, mine, WIDTH // 8, 1), params)
        shards, moments = adam(shards, gradients, moments)
        return jax.tree.map(
            lambda p: lax.all_gather(p, "data", axis=1, tiled=True), shards
        ), moments

    return build(mesh, SQUARES, P(), P("data"), gradient, update, moments_spec=P(None, "data"))


def _split_mlp(x: Any, weights: Any) -> Any:
    """Megatron's: enter by the identity whose gradient is a sum, leave by a sum whose gradient is
    the identity.
    """
    return x + _leave(jnp.tanh(_enter(x) @ weights["up"]) @ weights["down"])


@jax.custom_vjp
def _enter(x: Any) -> Any:
    return x


_enter.defvjp(lambda x: (x, None), lambda _, g: (lax.psum(g, "model"),))


@jax.custom_vjp
def _leave(x: Any) -> Any:
    return lax.psum(x, "model")


_leave.defvjp(lambda x: (lax.psum(x, "model"), None), lambda _, g: (g,))


def _tensor_parallel(mesh: Mesh, layer: Callable[[Any, Any], Any]) -> tuple[Any, Any, Any]:
    # Stored with the split dim first, so that one spec serves both.
    shapes = {"up": (LAYERS, HIDDEN, WIDTH), "down": (LAYERS, HIDDEN, WIDTH)}

    def turned(x: Any, weights: Any) -> Any:
        return layer(x, {"up": weights["up"].T, "down": weights["down"]})

    def gradient(params: Any, rows: Any) -> tuple[Any, Any]:
        return jax.value_and_grad(lambda p: mean_square(layers(turned, p, rows)))(params)

    return build(mesh, shapes, P(None, "model"), P(), gradient)


def tensor_parallel(mesh: Mesh) -> tuple[Any, Any, Any]:
    """Each device a part of the hidden width: a sum forward and one backward in each layer."""
    return _tensor_parallel(mesh, _split_mlp)


def data_and_tensor(mesh: Mesh) -> tuple[Any, Any, Any]:
    """As `tensor_parallel`, beside an axis of data over which each device adds up the gradients of
    its own shards.
    """
    shapes = {"up": (LAYERS, HIDDEN, WIDTH), "down": (LAYERS, HIDDEN, WIDTH)}

    def layer(x: Any, weights: Any) -> Any:
        return _split_mlp(x, {"up": weights["up"].T, "down": weights["down"]})

    def gradient(params: Any, rows: Any) -> tuple[Any, Any]:
        return everywhere("data")(
            jax.value_and_grad(lambda p: mean_square(layers(layer, p, rows)))(params)
        )

    return build(mesh, shapes, P(None, "model"), P("data"), gradient)


def recomputed(mesh: Mesh) -> tuple[Any, Any, Any]:
    """As `tensor_parallel`, every layer computed again: its sum is not, since nothing reads it."""
    return _tensor_parallel(mesh, jax.checkpoint(_split_mlp))


def sequence_parallel(mesh: Mesh) -> tuple[Any, Any, Any]:
    """As `tensor_parallel`, the stream split along its rows: each sum a gather and a scatter
    (Megatron's).
    """

    def layer(x: Any, weights: Any) -> Any:
        whole = lax.all_gather(x, "model", tiled=True)
        return x + lax.psum_scatter(
            jnp.tanh(whole @ weights["up"].T) @ weights["down"], "model", tiled=True
        )

    shapes = {"up": (LAYERS, HIDDEN, WIDTH), "down": (LAYERS, HIDDEN, WIDTH)}

    def gradient(params: Any, rows: Any) -> tuple[Any, Any]:
        loss, gradients = jax.value_and_grad(lambda p: mean_square(layers(layer, p, rows)))(params)
        return lax.psum(loss, "model"), gradients

    # The TPU compiler pads what it scatters from some size on, and moves the rows that lie wrong by
    # a permute.
    return build(mesh, shapes, P(None, "model"), P("model"), gradient, rows=ROWS // 4)


def ring(mesh: Mesh) -> tuple[Any, Any, Any]:
    """Every device sees the rows of all, which go round a ring; so do their gradients."""

    def gradient(params: Any, rows: Any) -> tuple[Any, Any]:
        turn = [(place, (place + 1) % 8) for place in range(8)]

        def loss(params: Any) -> Any:
            def meet(carry: Any, _: Any) -> tuple[Any, None]:
                found, passing = carry
                return (found + jnp.tanh(rows * passing), lax.ppermute(passing, "seq", turn)), None

            (found, _), _ = lax.scan(
                meet, (jnp.zeros_like(rows), rows @ params["w"][0]), None, length=8
            )
            return mean_square(found)

        return everywhere("seq")(jax.value_and_grad(loss)(params))

    return build(mesh, {"w": (1, WIDTH, WIDTH)}, P(), P("seq"), gradient)


def all_to_all(mesh: Mesh) -> tuple[Any, Any, Any]:
    """In each layer rows are exchanged for columns and back, as Ulysses' heads are; the gradients
    take the same way.
    """

    def layer(x: Any, weights: Any) -> Any:
        columns = lax.all_to_all(x @ weights["w"], "seq", split_axis=1, concat_axis=0, tiled=True)
        columns = jnp.tanh(columns - jnp.mean(columns, axis=0))
        return x + lax.all_to_all(columns, "seq", split_axis=0, concat_axis=1, tiled=True)

    def gradient(params: Any, rows: Any) -> tuple[Any, Any]:
        return everywhere("seq")(
            jax.value_and_grad(lambda p: mean_square(layers(layer, p, rows)))(params)
        )

    return build(mesh, SQUARES, P(), P("seq"), gradient)


def nested_loops(mesh: Mesh) -> tuple[Any, Any, Any]:
    """A sum in a loop in a loop, forward alone."""

    def gradient(params: Any, rows: Any) -> tuple[Any, Any]:
        def inner(x: Any, _: Any) -> tuple[Any, None]:
            return jnp.tanh(lax.psum(x, "model") / 8), None

        def outer(x: Any, weights: Any) -> tuple[Any, None]:
            return lax.scan(inner, x @ weights["w"], None, length=3)[0], None

        out = lax.scan(outer, rows, params)[0]
        return lax.psum(mean_square(out), "model"), jax.tree.map(
            lambda p: p * mean_square(out), params
        )

    return build(mesh, SQUARES, P(), P("model"), gradient)


def hierarchical(mesh: Mesh) -> tuple[Any, Any, Any]:
    """Two slices: gradients are scattered inside, added up between, and gathered inside."""

    def gradient(params: Any, rows: Any) -> tuple[Any, Any]:
        loss, gradients = jax.value_and_grad(lambda p: mean_square(layers(dense, p, rows)))(params)

        def everywhere(g: Any) -> Any:
            mine = lax.psum_scatter(g, "data", scatter_dimension=1, tiled=True)
            return lax.all_gather(lax.psum(mine, "pod"), "data", axis=1, tiled=True)

        return lax.psum(loss, "data"), jax.tree.map(everywhere, gradients)

    return build(mesh, SQUARES, P(), P(("pod", "data")), gradient)


HAND_WRITTEN = (
    HandWritten(
        "data_parallel",
        "data=8",
        "",
        data_parallel,
        {("all-reduce", "data"): reduced(SQUARE + SCALAR)},
    ),
    HandWritten(
        "accumulation",
        "data=8",
        "",
        accumulation,
        {("all-reduce", "data"): reduced(SQUARE + SCALAR)},
    ),
    HandWritten(
        "gathered_in_the_loop",
        "data=8",
        "",
        gathered_in_the_loop,
        {
            ("all-gather", "data"): 2 * moved(SQUARE),
            ("reduce-scatter", "data"): moved(SQUARE),
            ("all-reduce", "data"): reduced(SCALAR),
        },
    ),
    HandWritten(
        "optimizer_in_shards",
        "data=8",
        "",
        optimizer_in_shards,
        {
            ("reduce-scatter", "data"): moved(SQUARE),
            ("all-gather", "data"): moved(SQUARE),
            ("all-reduce", "data"): reduced(SCALAR),
        },
    ),
    HandWritten(
        "tensor_parallel",
        "model=8",
        "",
        tensor_parallel,
        {("all-reduce", "model"): 2 * LAYERS * reduced(STREAM)},
    ),
    HandWritten(
        "data_and_tensor",
        "data=2,model=4",
        "",
        data_and_tensor,
        {
            ("all-reduce", "model"): 2 * LAYERS * reduced(STREAM, 4),
            ("all-reduce", "data"): reduced(2 * LAYERS * HIDDEN * WIDTH * 4 // 4 + SCALAR, 2),
        },
    ),
    HandWritten(
        "recomputed",
        "model=8",
        "",
        recomputed,
        {("all-reduce", "model"): 2 * LAYERS * reduced(STREAM)},
    ),
    HandWritten(
        "sequence_parallel",
        "model=8",
        "",
        sequence_parallel,
        {
            ("all-gather", "model"): 2 * LAYERS * moved(8 * STREAM // 4),
            ("reduce-scatter", "model"): 2 * LAYERS * moved(8 * STREAM // 4),
            ("all-reduce", "model"): reduced(SCALAR),
        },
    ),
    HandWritten(
        "ring",
        "seq=8",
        "",
        ring,
        {
            ("collective-permute", "seq"): 2 * 8 * STREAM,
            ("all-reduce", "seq"): reduced(MATRIX + SCALAR),
        },
    ),
    HandWritten(
        "all_to_all",
        "seq=8",
        "",
        all_to_all,
        {
            ("all-to-all", "seq"): 4 * LAYERS * moved(STREAM),
            ("all-reduce", "seq"): reduced(SQUARE + SCALAR),
        },
    ),
    HandWritten(
        "nested_loops",
        "model=8",
        "",
        nested_loops,
        {("all-reduce", "model"): 3 * LAYERS * reduced(STREAM) + reduced(SCALAR)},
    ),
    HandWritten(
        "hierarchical",
        "pod=2,data=4",
        "pod",
        hierarchical,
        {
            ("reduce-scatter", "data"): moved(SQUARE, 4),
            ("all-reduce", "pod"): reduced(SQUARE // 4, 2),
            ("all-gather", "data"): moved(SQUARE, 4),
            ("all-reduce", "data"): reduced(SCALAR, 4),
        },
    ),
)
