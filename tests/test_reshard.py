import itertools
import math
import os
import random
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from machines import devices_of

from shardlib.compiled._collectives import collectives
from shardlib.layouts._reshard import reshard
from shardlib.layouts._route import plan
from shardlib.layouts._specs import as_tuple

SIZES = {"x": 2, "y": 4}


def mesh_of(sizes, kind=AxisType.Auto, devices=None):
    devices = jax.devices()[: math.prod(sizes.values())] if devices is None else devices
    return Mesh(
        np.array(devices).reshape(tuple(sizes.values())),
        tuple(sizes),
        axis_types=(kind,) * len(sizes),
    )


MESH = mesh_of(SIZES)
EXPLICIT = mesh_of(SIZES, AxisType.Explicit)


def layouts(axes, ndim):
    """Every spec of an array over some of the axes, in every order."""
    for count in range(len(axes) + 1):
        for chosen in itertools.permutations(axes, count):
            for cuts in itertools.combinations_with_replacement(range(count + 1), ndim - 1):
                ends = itertools.pairwise((0, *cuts, count))
                yield P(*(chosen[start:end] or None for start, end in ends))


LAYOUTS = list(layouts("xy", 2))


def named(spec):
    return ",".join("".join(as_tuple(entry)) or "-" for entry in spec)


def numbers(*shape):
    return np.arange(math.prod(shape), dtype=np.float32).reshape(shape)


def traffic(compiled, mesh):
    """Kind and received elements of float32 of every collective."""
    return [(one.kind, received(one) // 4) for one in collectives(compiled, mesh)]


def received(one):
    n = one.group_size
    match one.kind:
        case "all-gather":
            return one.result_bytes * (n - 1) // n
        case "all-to-all" | "reduce-scatter":
            return one.operand_bytes * (n - 1) // n
        case "all-reduce":
            return 2 * one.operand_bytes * (n - 1) // n
        case "collective-permute":
            return one.operand_bytes


def planned(source, to, sizes, shape):
    return [
        (step.kind, step.received)
        for step in plan(source, to, sizes, shape)
        if step.kind != "slice"
    ]


def compiled(mesh, source, to, shape):
    struct = jax.ShapeDtypeStruct(shape, np.float32, sharding=NamedSharding(mesh, source))
    with jax.set_mesh(mesh):
        return jax.jit(lambda x: reshard(x, to, source=source)).lower(struct).compile()


def check_pair(mesh, source, to, shape):
    """Values, layout and the compiled program of one reshard."""
    program = compiled(mesh, source, to, shape)
    x = numbers(*shape)
    y = program(jax.device_put(x, NamedSharding(mesh, source)))
    np.testing.assert_array_equal(y, x)
    assert y.sharding.is_equivalent_to(NamedSharding(mesh, to), y.ndim)
    assert traffic(program, mesh) == planned(source, to, dict(mesh.shape), shape), (
        f"{source} to {to}"
    )


@pytest.mark.representative("-,y", "-,yx", "y,x")
@pytest.mark.long
@pytest.mark.sentinel("x,y", "xy,-")
@pytest.mark.parametrize("source", LAYOUTS, ids=named)
def test_reshard_between_every_pair_of_layouts(source):
    for to in LAYOUTS:
        check_pair(MESH, source, to, (8, 8))


@pytest.mark.representative()
@pytest.mark.long
@pytest.mark.sentinel("-,x", "y,-", "x,y", "xy,-", "-,yx")
@pytest.mark.parametrize("source", LAYOUTS, ids=named)
def test_reshard_gradient_between_every_pair_of_layouts(source):
    x, weights = numbers(8, 8), [numbers(8, 8) * (k + 1) for k in range(len(LAYOUTS))]

    @jax.jit
    def gradients(x, weights):
        def loss(to, weight):
            return lambda x: jnp.sum(weight * jnp.sin(reshard(x, to, source=source)))

        return [jax.grad(loss(to, weight))(x) for to, weight in zip(LAYOUTS, weights, strict=True)]

    with jax.set_mesh(MESH):
        found = gradients(jax.device_put(x, source), weights)
    for to, weight, gradient in zip(LAYOUTS, weights, found, strict=True):
        np.testing.assert_allclose(
            gradient, weight * np.cos(x), rtol=1e-5, atol=1e-3, err_msg=f"{source} to {to}"
        )


# The rows of the docstring's table: the only collective, the axes it runs over, and what a device
# receives of an array of 64 elements.
THEORY = {
    "slice": (P(), P("x", "y"), None, (), 0),
    "slice a split dim": (P("x"), P(("x", "y")), None, (), 0),
    "gather": (P("y"), P(), "all-gather", ("y",), 64 * 3 / 4),
    "gather the minor axis": (P(None, ("x", "y")), P(None, "x"), "all-gather", ("y",), 32 * 3 / 4),
    "gather two axes": (P(("y", "x")), P(), "all-gather", ("x", "y"), 64 * 7 / 8),
    "gather two dims": (P("x", "y"), P(), "all-gather", ("x", "y"), 64 * 7 / 8),
    "slice and gather": (P("x"), P(None, "y"), "all-gather", ("x",), 16 * 1 / 2),
    "all-to-all": (P("y"), P(None, "y"), "all-to-all", ("y",), 16 * 3 / 4),
    "all-to-all of two axes": (
        P(("x", "y")),
        P(None, ("x", "y")),
        "all-to-all",
        ("x", "y"),
        8 * 7 / 8,
    ),
    "all-to-all that turns them": (
        P(("x", "y")),
        P(None, ("y", "x")),
        "all-to-all",
        ("x", "y"),
        8 * 7 / 8,
    ),
    "all-to-all of the minor axis": (P(("x", "y")), P("x", "y"), "all-to-all", ("y",), 8 * 3 / 4),
    "turn two axes": (P(("x", "y")), P(("y", "x")), "collective-permute", ("x", "y"), 8),
    "slice and permute": (P("x"), P("y"), "collective-permute", ("x", "y"), 16),
}


@pytest.mark.parametrize("case", THEORY)
def test_reshard_uses_a_single_collective_where_possible(case):
    source, to, kind, axes, elements = THEORY[case]
    found = collectives(compiled(MESH, source, to, (8, 8)), MESH)
    assert [(one.kind, one.axes, received(one) / 4) for one in found] == (
        [(kind, axes, elements)] if kind else []
    )


@pytest.mark.long
def test_reshard_never_moves_more_bytes_than_the_partitioner():
    struct = jax.ShapeDtypeStruct((8, 8), np.float32)
    less = 0
    for source, to in itertools.product(LAYOUTS, repeat=2):
        shardings = {
            "in_shardings": NamedSharding(MESH, source),
            "out_shardings": NamedSharding(MESH, to),
        }
        automatic = jax.jit(lambda x: x, **shardings).lower(struct).compile()
        ours, theirs = planned(source, to, SIZES, (8, 8)), traffic(automatic, MESH)
        assert sum(n for _, n in ours) <= sum(n for _, n in theirs), (
            f"{source} to {to}: {ours} against {theirs}"
        )
        less += sum(n for _, n in ours) < sum(n for _, n in theirs)
    assert less >= 20


@pytest.mark.representative("3")
@pytest.mark.long
@pytest.mark.parametrize("ndim", [2, 3])
def test_reshard_on_three_mesh_axes(ndim):
    sizes = {"x": 2, "y": 2, "z": 2}
    mesh, pairs = mesh_of(sizes), list(itertools.product(layouts("xyz", ndim), repeat=2))
    for source, to in random.Random(ndim).sample(pairs, 20):
        check_pair(mesh, source, to, (8,) * ndim)


@pytest.mark.representative("{'x': 2, 'y': 3}-(6, 12)", "{'x': 1, 'y': 8}-(8, 16)")
@pytest.mark.long
@pytest.mark.sentinel("{'x': 2, 'y': 4}-(4, 4)")
@pytest.mark.parametrize(
    ("sizes", "shape"),
    [
        ({"x": 2, "y": 3}, (6, 12)),
        ({"x": 2, "y": 4}, (2, 8)),
        ({"x": 2, "y": 4}, (4, 4)),
        ({"x": 1, "y": 8}, (8, 16)),
    ],
    ids=str,
)
def test_reshard_with_awkward_dim_and_axis_sizes(sizes, shape):
    """Dims that no further axis divides, axes of which neither divides the other, an axis of one
    device.
    """
    mesh = mesh_of(sizes)
    fitting = [
        spec
        for spec in layouts("xy", 2)
        if all(
            size % math.prod(sizes[a] for a in as_tuple(e)) == 0
            for size, e in zip(shape, spec, strict=True)
        )
    ]
    pairs = list(itertools.product(fitting, repeat=2))
    for source, to in random.Random(0).sample(pairs, 16):
        check_pair(mesh, source, to, shape)


@pytest.mark.parametrize(
    ("sizes", "ndim"),
    [({"x": 2, "y": 4}, 2), ({"x": 2, "y": 2, "z": 2}, 3), ({"x": 2, "y": 4, "z": 2}, 2)],
    ids=str,
)
def test_reshard_intermediates_are_no_larger_than_source_or_target(sizes, ndim):
    pairs = list(itertools.product(layouts("".join(sizes), ndim), repeat=2))
    for source, to in random.Random(0).sample(pairs, 100):
        steps = plan(source, to, sizes, (16,) * ndim)
        if steps:
            held = [split(steps[0].before), *(split(step.after) for step in steps)]
            assert min(held) == min(held[0], held[-1]), (
                f"{source} to {to}: {[step.kind for step in steps]}"
            )


def split(layout):
    return math.prod(piece.size for entry in layout.tiles for piece in entry)


@pytest.mark.long
def test_reshard_plan_is_the_same_in_every_process():
    """Processes hash strings differently, and must run the same collectives."""
    program = textwrap.dedent("""
        from jax.sharding import PartitionSpec as P
        from shardlib.layouts._route import plan
        for source, to in [(P("x", "y"), P("y", "x")), (P("y", unreduced={"x", "z"}), P(("z", "x"))), (P(), P("y", "x"))]:
            for step in plan(source, to, {"x": 2, "y": 4, "z": 2}, (16, 16)):
                print(step.kind, step.pieces, step.after.tiles)
    """)
    command = [sys.executable, "-c", program]
    plans = {
        subprocess.run(
            command, env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, check=True
        ).stdout
        for seed in ("1", "2")
    }
    assert len(plans) == 1


# Partial sums: the layout to come to, and kind, axes and received elements of the collectives of an
# array of 64.
PARTIAL = {
    "whole": (P(), {"y"}, [("all-reduce", ("y",), 2 * 64 * 3 / 4)]),
    "split": (P("y"), {"y"}, [("reduce-scatter", ("y",), 64 * 3 / 4)]),
    "split on the other dim": (P(None, "y"), {"y"}, [("reduce-scatter", ("y",), 64 * 3 / 4)]),
    "split over another axis": (P("x"), {"y"}, [("all-reduce", ("y",), 2 * 32 * 3 / 4)]),
    "split over both": (P("x", "y"), {"y"}, [("reduce-scatter", ("y",), 32 * 3 / 4)]),
    "two axes, whole": (P(), {"x", "y"}, [("all-reduce", ("x", "y"), 2 * 64 * 7 / 8)]),
    "two axes, split": (P(("y", "x")), {"x", "y"}, [("reduce-scatter", ("x", "y"), 64 * 7 / 8)]),
    "two axes, two dims": (P("x", "y"), {"x", "y"}, [("reduce-scatter", ("x", "y"), 64 * 7 / 8)]),
}


def product_of(a, b, axes, to):
    return reshard(jnp.einsum("ik,kj->ij", a, b, out_sharding=P(None, None, unreduced=axes)), to)


def factors(mesh, axes):
    rng, axes = np.random.default_rng(0), tuple(sorted(axes))
    a, b = rng.normal(size=(8, 16)).astype(np.float32), rng.normal(size=(16, 8)).astype(np.float32)
    shardings = NamedSharding(mesh, P(None, axes)), NamedSharding(mesh, P(axes, None))
    return (a, b), shardings


@pytest.mark.parametrize("case", PARTIAL)
def test_reshard_of_partial_sums(case):
    to, axes, expected = PARTIAL[case]
    (a, b), shardings = factors(EXPLICIT, axes)
    with jax.set_mesh(EXPLICIT):
        program = (
            jax.jit(lambda a, b: product_of(a, b, axes, to))
            .lower(*jax.device_put((a, b), shardings))
            .compile()
        )
        y = program(*jax.device_put((a, b), shardings))
    np.testing.assert_allclose(y, a @ b, rtol=1e-5, atol=1e-5)
    assert y.sharding.is_equivalent_to(NamedSharding(EXPLICIT, to), 2)
    assert [
        (one.kind, one.axes, received(one) / 4) for one in collectives(program, EXPLICIT)
    ] == expected


@pytest.mark.parametrize("case", PARTIAL)
def test_reshard_gradients_of_partial_sums(case):
    to, axes, _ = PARTIAL[case]
    (a, b), shardings = factors(EXPLICIT, axes)
    weight = numbers(8, 8)

    @jax.jit
    @jax.grad
    def gradient(factors):
        return jnp.sum(product_of(*factors, axes, to) * jax.sharding.reshard(weight, to))

    with jax.set_mesh(EXPLICIT):
        program = gradient.lower(jax.device_put((a, b), shardings)).compile()
        found = program(jax.device_put((a, b), shardings))
    for value, expected, sharding in zip(
        found, (weight @ b.T, a.T @ weight), shardings, strict=True
    ):
        np.testing.assert_allclose(value, expected, rtol=1e-4, atol=1e-3)
        assert value.sharding.is_equivalent_to(sharding, 2)
    assert {one.kind for one in collectives(program, EXPLICIT)} <= {"all-gather"}


def test_reshard_of_an_eager_partial_sum():
    (a, b), shardings = factors(EXPLICIT, {"y"})
    with jax.set_mesh(EXPLICIT):
        partial = jnp.einsum(
            "ik,kj->ij",
            *jax.device_put((a, b), shardings),
            out_sharding=P(None, None, unreduced={"y"}),
        )
    whole = reshard(partial, P("y"))
    np.testing.assert_allclose(whole, a @ b, rtol=1e-5, atol=1e-5)
    assert whole.sharding.is_equivalent_to(NamedSharding(EXPLICIT, P("y")), 2)


@pytest.mark.parametrize("mesh", [MESH, EXPLICIT], ids=["automatic", "explicit"])
def test_reshard_reads_the_layout_of_a_concrete_array(mesh):
    x = jax.device_put(numbers(8, 8), NamedSharding(mesh, P("x", "y")))
    y = reshard(x, P("y", "x"))
    np.testing.assert_array_equal(y, x)
    assert y.sharding.spec == P("y", "x")
    assert reshard(x, P("y"), source=P(("x",), "y")).sharding.is_equivalent_to(
        NamedSharding(mesh, P("y")), 2
    )


def test_reshard_reads_the_layout_of_explicit_types():
    def loss(x):
        y = reshard(x, P(None, "x"))
        assert jax.typeof(y).sharding.spec == P(None, "x")
        return jnp.sum(y**2)

    with jax.set_mesh(EXPLICIT):
        gradient = jax.jit(jax.grad(loss))(jax.device_put(numbers(8, 8), P("x", "y")))
    assert gradient.sharding.spec == P("x", "y")
    np.testing.assert_array_equal(gradient, 2 * numbers(8, 8))


def test_reshard_without_a_source_is_a_sharding_constraint():
    with jax.set_mesh(MESH):
        x = jax.device_put(numbers(8, 8), P("x", "y"))
        jaxpr = jax.make_jaxpr(lambda x: reshard(x, P("y")))(x)
        assert [equation.primitive.name for equation in jaxpr.eqns] == ["sharding_constraint"]
        assert jax.jit(lambda x: reshard(x, P("y")))(x).sharding.is_equivalent_to(
            NamedSharding(MESH, P("y")), 2
        )


def test_reshard_source_constrains_the_array_first():
    struct = jax.ShapeDtypeStruct((8, 8), np.float32, sharding=NamedSharding(MESH, P("x")))
    with jax.set_mesh(MESH):
        program = jax.jit(lambda x: reshard(x, P("y"), source=P())).lower(struct).compile()
    assert traffic(program, MESH) == [("all-gather", 32)]


def test_reshard_inside_a_shard_map_over_other_axes():
    def body(rows):
        return reshard(reshard(rows, P("y"), source=P(None, "y")) ** 2, P(None, "y"), source=P("y"))

    mapped = jax.shard_map(
        body, in_specs=P("x"), out_specs=P("x"), axis_names={"x"}, check_vma=False
    )
    with jax.set_mesh(MESH):
        x = jax.device_put(numbers(8, 8), P("x", "y"))
        program = jax.jit(mapped).lower(x).compile()
        np.testing.assert_array_equal(program(x), numbers(8, 8) ** 2)
        gradient = jax.jit(jax.grad(lambda x: jnp.sum(mapped(x))))(x)
    np.testing.assert_allclose(gradient, 2 * numbers(8, 8))
    assert [(one.kind, one.axes, received(one)) for one in collectives(program, MESH)] == [
        ("all-to-all", ("y",), 8 * 3),
        ("all-to-all", ("y",), 8 * 3),
    ]


def test_reshard_under_vmap_scan_checkpoint_and_second_derivatives():
    def there(x):
        return reshard(x, P("y"), source=P("x"))

    def back(x):
        return reshard(x, P("x"), source=P("y"))

    def scanned(x):
        return jnp.sum(
            lax.scan(lambda carry, _: (jnp.sin(back(there(carry))), None), x, None, length=2)[0]
        )

    x = numbers(8)
    with jax.set_mesh(MESH):
        np.testing.assert_array_equal(jax.jit(jax.vmap(there))(numbers(3, 8)), numbers(3, 8))
        np.testing.assert_allclose(
            jax.jit(jax.grad(jax.checkpoint(scanned)))(x),
            np.cos(np.sin(x)) * np.cos(x),
            rtol=1e-5,
            atol=1e-6,
        )
        second = jax.jacrev(jax.grad(lambda x: jnp.sum(there(x) ** 3)))
        np.testing.assert_allclose(jax.jit(second)(x), np.diag(6 * x))


@pytest.mark.parametrize("dtype", ["bool", "int32", "bfloat16", "float8_e4m3fn"])
def test_reshard_of_any_dtype(dtype):
    x = jax.device_put(jnp.arange(64).reshape(8, 8).astype(dtype), NamedSharding(MESH, P("x", "y")))
    y = reshard(x, P(("y", "x")))
    assert y.dtype == x.dtype
    np.testing.assert_array_equal(np.asarray(y), np.asarray(x))


@pytest.mark.parametrize("mesh", [MESH, EXPLICIT], ids=["automatic", "explicit"])
def test_reshard_of_an_array_without_entries_sends_nothing(mesh):
    for source, to in itertools.product(LAYOUTS[::2], LAYOUTS[1::2]):
        x = jax.device_put(np.zeros((0, 8), np.float32), NamedSharding(mesh, source))
        y = reshard(x, to)
        assert y.shape == (0, 8)
        assert y.sharding.is_equivalent_to(NamedSharding(mesh, to), 2)
    keys = jax.device_put(jax.random.split(jax.random.key(0), (8, 0)), NamedSharding(mesh, P("x")))
    assert reshard(keys, P("y", "x")).shape == (8, 0)


def test_reshard_of_partial_sums_without_entries():
    def loss(a, b):
        partial = jnp.einsum("ab,bc->ac", a, b, out_sharding=P(None, None, unreduced={"x"}))
        return jnp.sum(reshard(partial, P("x", "y")))

    with jax.set_mesh(EXPLICIT):
        a = jax.device_put(numbers(0, 8), P(None, "x"))
        b = jax.device_put(numbers(8, 8), P("x"))
        found, gradient = jax.jit(jax.value_and_grad(loss))(a, b)
    assert found == 0
    assert gradient.shape == (0, 8)


def test_reshard_of_integers_in_a_differentiated_function():
    def loss(weights, indices):
        return jnp.sum(weights[reshard(indices, P("y"), source=P("x"))])

    with jax.set_mesh(MESH):
        np.testing.assert_array_equal(
            jax.jit(jax.grad(loss))(jnp.ones(8), jnp.arange(8)), np.ones(8)
        )


ACCELERATED = {
    "slice": (P(), P("x", "y"), []),
    "gather": (P("x", "y"), P(), ["all-gather"]),
    "gather the minor axis": (P(("x", "y")), P("x"), ["all-gather"]),
    "all-to-all": (P("y"), P(None, "y"), ["all-to-all"]),
    "all-to-all that turns them": (P(("x", "y")), P(None, ("y", "x")), ["all-to-all"]),
    "permute": (P(("x", "y")), P(("y", "x")), ["collective-permute"]),
    "slice and gather": (P("y"), P(None, "x"), ["all-gather"]),
    "digits of an axis": (P("x", "y"), P("y", "x"), ["all-to-all", "collective-permute"]),
    "permute and gather": (P(None, ("x", "y")), P(None, "y"), ["collective-permute", "all-gather"]),
}


@pytest.fixture(
    params=[
        pytest.param("v5e:2x4", marks=pytest.mark.tpu_compiler),
        pytest.param("h200:1x1x8", marks=pytest.mark.gpu_compiler),
    ]
)
def accelerators(request):
    return devices_of(request.param)


@pytest.mark.parametrize("case", ACCELERATED)
def test_reshard_compiled_for_accelerators_uses_the_planned_collectives(case, accelerators):
    source, to, expected = ACCELERATED[case]
    mesh, shape = mesh_of(SIZES, devices=accelerators), (1024, 1024)
    found = traffic(compiled(mesh, source, to, shape), mesh)
    assert [kind for kind, _ in found] == expected
    assert found == planned(source, to, SIZES, shape)


@pytest.mark.parametrize("case", PARTIAL)
def test_reshard_of_partial_sums_compiled_for_accelerators(case, accelerators):
    to, axes, expected = PARTIAL[case]
    mesh = mesh_of(SIZES, AxisType.Explicit, accelerators)
    structs = [
        jax.ShapeDtypeStruct(shape, np.float32, sharding=sharding)
        for shape, sharding in zip(
            ((1024, 2048), (2048, 1024)), factors(mesh, axes)[1], strict=True
        )
    ]
    with jax.set_mesh(mesh):
        program = jax.jit(lambda a, b: product_of(a, b, axes, to)).lower(*structs).compile()
    found = [(one.kind, one.axes, received(one) / 4 / 128**2) for one in collectives(program, mesh)]
    assert found == expected


UNREDUCED = P(unreduced={"x"})
ERRORS = {
    "unknown axis": (dict(to=P("z")), "names the axis `z`; the mesh has `x=2`, `y=4`"),
    "unknown axis of the source": (dict(to=P(), source=P("z")), "names the axis `z`"),
    "unknown partial axis": (dict(to=P(), source=P(unreduced={"z"})), "sums over `z`"),
    "axis twice": (dict(to=P("x", "x")), "uses the axis `x` twice"),
    "rank": (dict(to=P(None, None, "x")), "has 2 dims"),
    "indivisible": (dict(to=P("y")), "splits dim 0 .* into 4, which does not divide 2"),
    "unconstrained": (dict(to=P("x", P.UNCONSTRAINED)), "say where every dim is"),
    "to a partial sum": (dict(to=UNREDUCED, source=P()), "for the layout an array comes from"),
    "from a cotangent": (dict(to=P(), source=P(reduced={"x"})), "`reduced` is for cotangents"),
    "partial sum on automatic axes": (
        dict(to=P(), source=UNREDUCED),
        "partial sums are a type of explicit axes",
    ),
}


@pytest.mark.parametrize("case", ERRORS)
def test_reshard_refuses_invalid_layouts(case):
    arguments, message = ERRORS[case]
    with jax.set_mesh(MESH), pytest.raises(ValueError, match=message):
        jax.jit(lambda x: reshard(x, **arguments))(np.zeros((2, 8)))


def test_reshard_refuses_a_source_that_contradicts_the_array():
    x = jax.device_put(numbers(8, 8), NamedSharding(MESH, P("x")))
    with pytest.raises(ValueError, match=r"laid out as .*Leave `source` out"):
        reshard(x, P(), source=P("y"))


def test_reshard_without_a_mesh_is_refused():
    with pytest.raises(ValueError, match="no mesh in scope"):
        jax.jit(lambda x: reshard(x, P("x"), source=P()))(numbers(8))


@pytest.mark.parametrize(
    ("manual", "to", "message"),
    [
        ({"x"}, P("x"), "the surrounding `shard_map` is manual"),
        ({"x", "y"}, P(), "manual over every axis"),
    ],
)
def test_reshard_over_manual_axes_is_refused(manual, to, message):
    body = jax.shard_map(
        lambda x: reshard(x, to, source=P()), in_specs=P("x"), out_specs=P("x"), axis_names=manual
    )
    with jax.set_mesh(MESH), pytest.raises(ValueError, match=message):
        jax.jit(body)(numbers(8))
