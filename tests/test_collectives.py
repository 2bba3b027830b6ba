import base64
import dataclasses
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from machines import devices_of

from shardlib.compiled._collectives import Collective, collectives, summary
from shardlib.compiled._runs import taken_scope
from shardlib.compiled._source_lines import IF_UNEVEN


def mesh_of(machine, slices=1, **axes):
    options = {} if slices == 1 else {"num_slices": slices}
    return Mesh(np.array(devices_of(machine, **options)).reshape(tuple(axes.values())), tuple(axes))


MACHINES = [
    "cpu",
    pytest.param("v5e:2x4", marks=pytest.mark.tpu_compiler),
    pytest.param("h200:1x1x8", marks=pytest.mark.gpu_compiler),
]


@pytest.fixture(params=MACHINES)
def mesh(request):
    return mesh_of(request.param, a=2, b=2, c=2)


ROWS = P(("a", "b", "c"))
BLOCK = (512, 1024)  # of one device
BYTES = 4 * math.prod(BLOCK)


def array(mesh, shape, spec, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))


def manual(f, mesh, arguments=1, more=()):
    """The collectives of `f`, compiled as manual over all axes and given a block of rows on each
    device.
    """
    specs = (ROWS,) * arguments + (P(),) * len(more)
    mapped = jax.shard_map(f, mesh=mesh, in_specs=specs, out_specs=ROWS, check_vma=False)
    rows = array(mesh, (8 * BLOCK[0], BLOCK[1]), ROWS)
    scalars = [jax.ShapeDtypeStruct((), dtype, sharding=NamedSharding(mesh, P())) for dtype in more]
    return collectives(jax.jit(mapped).lower(*[rows] * arguments, *scalars).compile(), mesh)


def shift(x, axes, size):
    return jax.lax.ppermute(x, axes, [(place, (place + 1) % size) for place in range(size)])


@pytest.mark.parametrize(
    "f, kind, axes, group_size, result_bytes",
    [
        (lambda x: jax.lax.psum(x, "b"), "all-reduce", ("b",), 2, BYTES),
        (lambda x: jax.lax.psum(x, ("a", "c")), "all-reduce", ("a", "c"), 4, BYTES),
        (lambda x: jax.lax.psum(x, ("a", "b", "c")), "all-reduce", ("a", "b", "c"), 8, BYTES),
        (lambda x: jax.lax.all_gather(x, "b", tiled=True), "all-gather", ("b",), 2, 2 * BYTES),
        (
            lambda x: jax.lax.all_gather(x, ("a", "c"), tiled=True),
            "all-gather",
            ("a", "c"),
            4,
            4 * BYTES,
        ),
        (
            lambda x: jax.lax.psum_scatter(x, "b", tiled=True),
            "reduce-scatter",
            ("b",),
            2,
            BYTES // 2,
        ),
        (
            lambda x: jax.lax.psum_scatter(x, ("a", "c"), tiled=True),
            "reduce-scatter",
            ("a", "c"),
            4,
            BYTES // 4,
        ),
        (lambda x: jax.lax.all_to_all(x, "b", 0, 1, tiled=True), "all-to-all", ("b",), 2, BYTES),
        (
            lambda x: jax.lax.all_to_all(x, ("a", "b"), 0, 1, tiled=True),
            "all-to-all",
            ("a", "b"),
            4,
            BYTES,
        ),
        (lambda x: shift(x, "b", 2), "collective-permute", ("b",), 2, BYTES),
        (lambda x: shift(x, ("a", "b"), 4), "collective-permute", ("a", "b"), 4, BYTES),
    ],
)
def test_collectives_report_kind_axes_and_bytes_of_each_operation(
    mesh, f, kind, axes, group_size, result_bytes
):
    [found] = manual(f, mesh)
    assert (found.kind, found.axes, found.group_size) == (kind, axes, group_size)
    assert (found.operand_bytes, found.result_bytes) == (BYTES, result_bytes)
    assert sum(map(math.prod, found.shapes)) == math.prod(BLOCK)
    # Which some compilers cut up or reshape.
    assert kind == "all-to-all" or found.shapes == (BLOCK,)
    assert set(found.dtypes) == {"f32"}
    assert (found.times, found.times_known, found.conditional) == (1, True, False)
    assert found.op_name.startswith("jit(") and "/shard_map/" in found.op_name
    assert re.fullmatch(rf"{re.escape(__file__)}:\d+", found.sources[0])


def test_collectives_name_axes_of_a_mesh_in_another_device_order():
    devices = np.array(jax.devices()).reshape(2, 2, 2).transpose(2, 0, 1)
    [found] = manual(lambda x: jax.lax.psum(x, ("a", "c")), Mesh(devices, ("a", "b", "c")))
    assert found.axes == ("a", "c")


def test_collectives_do_not_name_axes_of_size_one():
    mesh = mesh_of("cpu", a=2, b=1, c=4)
    assert manual(lambda x: jax.lax.psum(x, "b"), mesh) == ()
    assert [found.axes for found in manual(lambda x: jax.lax.psum(x, ("a", "b")), mesh)] == [("a",)]


def test_collectives_without_a_mesh_name_no_axes():
    mesh = mesh_of("cpu", a=2, b=2, c=2)
    mapped = jax.shard_map(
        lambda x: jax.lax.psum(x, "a"), mesh=mesh, in_specs=ROWS, out_specs=ROWS, check_vma=False
    )
    [found] = collectives(jax.jit(mapped).lower(jnp.zeros(8)).compile().as_text())
    assert (found.kind, found.axes, found.group_size, found.shapes) == (
        "all-reduce",
        None,
        2,
        ((1,),),
    )


def test_collectives_in_a_scan_count_every_iteration(mesh):
    def body(x, _):
        gathered = jnp.tanh(jax.lax.all_gather(x, "b", tiled=True))
        return jax.lax.psum_scatter(gathered, "b", tiled=True), None

    found = manual(lambda x: jax.lax.scan(body, x, None, length=5)[0], mesh)
    assert summary(found) == "all-gather over b: 5 x 4.0 MiB\nreduce-scatter over b: 5 x 4.0 MiB"
    assert [one.times for one in found] == [5, 5]


def test_collectives_in_nested_scans_count_every_iteration(mesh):
    def inner(x, _):
        return jnp.tanh(jax.lax.psum(x, ("a", "b"))), None

    def outer(x, _):
        return shift(jax.lax.scan(inner, x, None, length=3)[0], "c", 2), None

    found = manual(lambda x: jax.lax.psum(jax.lax.scan(outer, x, None, length=5)[0], "c"), mesh)
    assert {
        (one.kind, one.axes): (one.times, one.times_known, one.operand_bytes) for one in found
    } == {
        ("all-reduce", ("a", "b")): (15, True, BYTES),
        ("collective-permute", ("c",)): (5, True, BYTES),
        ("all-reduce", ("c",)): (1, True, BYTES),
    }


def test_collectives_in_a_loop_with_any_start_and_step_are_counted(mesh):
    def body(carry):
        i, x = carry
        return i - 3, jnp.tanh(jax.lax.psum(x, "a"))

    [found] = manual(
        lambda x: jax.lax.while_loop(lambda carry: carry[0] >= 2, body, (11, x))[1], mesh
    )
    assert (found.times, found.times_known) == (4, True)  # 11, 8, 5, 2


def test_collectives_of_further_rounds_are_counted_apart(mesh):
    """With even loads such a loop does not run; each round of it adds what its collectives send."""

    def until_small(x, _):
        with jax.named_scope(IF_UNEVEN):
            further = lambda x: jnp.tanh(jax.lax.psum(x, "a"))
            return jax.lax.while_loop(lambda x: jnp.sum(x) > 1, further, x), None

    [found] = manual(lambda x: jax.lax.scan(until_small, x, None, length=5)[0], mesh)
    assert (found.times, found.times_known, found.further_times) == (0, False, 5)
    assert (found.total_bytes, found.further_bytes) == (0, 5 * found.sent_bytes)
    assert summary([found]).endswith("in a round that an even load does not take")


def test_collectives_in_loops_of_unknown_length_count_once(mesh):
    def until_small(x):
        return jax.lax.while_loop(
            lambda x: jnp.sum(x) > 1, lambda x: jnp.tanh(jax.lax.psum(x, "a")), x
        )

    def as_often_as_told(x, count):
        return jax.lax.fori_loop(0, count, lambda _, x: jnp.tanh(jax.lax.psum(x, "a")), x)

    for found in [*manual(until_small, mesh), *manual(as_often_as_told, mesh, more=[jnp.int32])]:
        assert (found.kind, found.axes, found.times, found.times_known) == (
            "all-reduce",
            ("a",),
            1,
            False,
        )
        assert "unknown" in summary([found])


def test_collectives_in_every_branch_of_a_conditional_count(mesh):
    def choose(x, which):
        branches = [
            lambda x: jax.lax.psum(x, "a"),
            lambda x: jax.lax.psum(2 * x, ("b", "c")),
            lambda x: x,
        ]
        return jax.lax.switch(which, branches, x)

    found = manual(choose, mesh, more=[jnp.int32])
    assert sorted((one.kind, one.axes) for one in found) == [
        ("all-reduce", ("a",)),
        ("all-reduce", ("b", "c")),
    ]
    assert all(one.conditional for one in found)


def test_collectives_in_a_branch_count_as_often_as_its_scope_says(mesh):
    """A conditional in a branch is one of which nothing is told: it counts as taken."""

    def total(x):
        return jnp.tanh(jax.lax.psum(x, "a"))

    def some_rounds(x, number):
        with jax.named_scope(taken_scope(4, of=6)):
            within = lambda x: jax.lax.cond(jnp.sum(x) > 1, total, jnp.sin, x)
            return jax.lax.cond(number > 1, within, jnp.cos, x), None

    def while_large(x):
        again = lambda x: some_rounds(x, jnp.sum(x))[0]
        return jax.lax.while_loop(lambda x: jnp.sum(x) > 1, again, x)

    [found] = manual(lambda x: jax.lax.scan(some_rounds, x, jnp.arange(6))[0], mesh)
    assert (found.times, found.times_known, found.conditional) == (4, True, True)
    [found] = manual(while_large, mesh)
    assert (found.times, found.times_known, found.conditional) == (1, False, True)


def test_collectives_list_all_operands_of_combined_all_reduces(mesh):
    found = manual(
        lambda x, y: jax.lax.psum(x, "b") + jnp.sum(jax.lax.psum(y[:100], "b")), mesh, arguments=2
    )
    assert {(one.kind, one.axes) for one in found} == {("all-reduce", ("b",))}
    assert sum(one.operand_bytes for one in found) == BYTES + 100 * BLOCK[1] * 4
    if mesh.devices.flat[0].platform == "cpu":
        assert [sorted(one.shapes) for one in found] == [[(100, BLOCK[1]), BLOCK]]


def test_collectives_of_the_automatic_partitioner_are_recognized(mesh):
    def product(w, x):
        return jnp.matmul(x, w, precision="highest")

    def compiled(w_spec, x_spec, out_spec):
        w, x = array(mesh, (1024, 512), w_spec), array(mesh, (2048, 1024), x_spec)
        return jax.jit(product, out_shardings=NamedSharding(mesh, out_spec)).lower(w, x).compile()

    tensor = collectives(compiled(P("b"), P(("a", "c"), "b"), P(("a", "c"))), mesh)
    assert [(one.kind, one.axes, one.shapes) for one in tensor] == [
        ("all-reduce", ("b",), ((512, 512),))
    ]
    stored_sharded = collectives(compiled(P(("a", "c")), P(("a", "c")), P(("a", "c"))), mesh)
    assert [(one.kind, one.axes) for one in stored_sharded] == [("all-gather", ("a", "c"))]
    assert stored_sharded[0].operand_bytes == 4 * 256 * 512
    assert stored_sharded[0].result_bytes == 4 * 1024 * 512


@pytest.mark.tpu_compiler
def test_collectives_compiled_asynchronous_or_fused_on_tpu_are_recognized():
    """Gathers that overlap with products, and scatters fused from an all-reduce of rows padded to
    whole tiles.
    """
    mesh = mesh_of("v5e:4x4", data=4, model=4)

    def gradients(weights, x):
        def loss(weights):
            h = x
            for w in weights:
                h = jnp.tanh(h @ jax.lax.all_gather(w, "data", tiled=True))
            return jnp.sum(h.astype(jnp.float32))

        return jax.grad(loss)(weights)

    rows = P(("data", "model"))
    mapped = jax.shard_map(
        gradients, mesh=mesh, in_specs=(P("data"), rows), out_specs=P("data"), check_vma=False
    )
    weights = [array(mesh, (2048, 2048), P("data"), jnp.bfloat16)] * 4
    compiled = (
        jax.jit(mapped).lower(weights, array(mesh, (16 * 512, 2048), rows, jnp.bfloat16)).compile()
    )
    assert (
        "async_collective_fusion" in compiled.as_text()
        and "%all-reduce-scatter" in compiled.as_text()
    )

    found = collectives(compiled, mesh)
    assert {one.axes for one in found} == {("data",)} and {one.group_size for one in found} == {4}
    gathers = [one for one in found if one.kind == "all-gather"]
    assert [(one.shapes, one.result_bytes) for one in gathers] == [
        (((512, 2048),), 2 * 2048 * 2048)
    ] * 4
    scatters = [one for one in found if one.kind == "reduce-scatter"]
    assert [one.operand_bytes == 4 * one.result_bytes for one in scatters] == [True] * 4
    assert all(2048 <= one.shapes[0][0] < 2048 + 4 * 32 for one in scatters)
    # What padding put on the wrong device is then passed on, a few rows.
    others = [one for one in found if one not in gathers and one not in scatters]
    assert all(one.kind == "collective-permute" and one.operand_bytes < 2**18 for one in others)


@pytest.mark.sentinel
@pytest.mark.tpu_compiler
def test_collectives_compiled_between_tpu_slices_are_recognized():
    mesh = mesh_of("v5e:2x2", slices=2, slice=2, data=4)

    def found(f):
        rows = P(("slice", "data"))
        mapped = jax.shard_map(f, mesh=mesh, in_specs=rows, out_specs=rows, check_vma=False)
        compiled = jax.jit(mapped).lower(array(mesh, (8 * BLOCK[0], BLOCK[1]), rows)).compile()
        return {
            (one.kind, one.axes, one.group_size, one.operand_bytes, one.result_bytes)
            for one in collectives(compiled, mesh)
        }

    assert found(lambda x: jax.lax.psum(x, "data")) == {("all-reduce", ("data",), 4, BYTES, BYTES)}
    assert found(lambda x: jax.lax.psum(x, ("slice", "data"))) == {
        ("reduce-scatter", ("data",), 4, BYTES, BYTES // 4),
        ("all-reduce", ("slice",), 2, BYTES // 4, BYTES // 4),
        ("all-gather", ("data",), 4, BYTES // 4, BYTES),
    }
    gather = found(lambda x: jax.lax.all_gather(x, "slice", tiled=True))
    assert gather == {("all-gather", ("slice",), 2, BYTES, 2 * BYTES)}
    swap = found(lambda x: jax.lax.ppermute(x, "slice", [(0, 1), (1, 0)]))
    assert swap == {("collective-permute", ("slice",), 2, BYTES, BYTES)}
    exchange = found(lambda x: jax.lax.all_to_all(x, "slice", 0, 0, tiled=True))
    assert exchange == {("all-to-all", ("slice",), 2, BYTES, BYTES)}


def text_of(*entry, computations="", result="f32[64,512]{1,0}"):
    """A program as compilers write it, of the lines of its entry computation."""
    lines = "\n".join(f"  {line}" for line in ("%p = f32[64,512]{1,0} parameter(0)", *entry))
    signature = f"ENTRY %main (p: f32[64,512]) -> {result} {{"
    return (
        "HloModule jit_f, is_scheduled=true, "
        f"num_partitions=8\n\n{computations}\n{signature}\n{lines}\n}}\n"
    )


@pytest.mark.parametrize(
    "groups, axes",
    [
        ("{{0,2},{1,3},{4,6},{5,7}}", ("b",)),
        ("{{2,0},{3,1},{6,4},{7,5}}", ("b",)),
        ("{{0,1,4,5},{2,3,6,7}}", ("a", "c")),
        ("{}", ("a", "b", "c")),
        ("{{0,3},{1,2},{4,7},{5,6}}", None),
        ("{{0,1,2},{3,4,5}}", None),
        ("[4,2]<=[8]", ("c",)),
        ("[2,4]<=[8]", ("b", "c")),
        ("[4,2]<=[2,4]T(1,0)", ("a",)),
        ("[4,2]<=[2,2,2]T(0,2,1)", ("b",)),
        ("[2,4]<=[2,2,2]T(1,0,2)", ("a", "c")),
        ("mesh['a'=2,'b'=2,'c'=2] {'b'}", ("b",)),
        ("mesh['a'=2,'b'=2,'c'=2] {'a','c'}", ("a", "c")),
        ("mesh['axis_0'=2,'axis_1'=4] {'axis_1'}", ("b", "c")),
        ("mesh['axis_0'=8] {'axis_0':(1)2}", ("a",)),
        ("mesh['axis_0'=8] {'axis_0':(2)2}", ("b",)),
        ("mesh['axis_0'=8] {'axis_0':(2)4}", ("b", "c")),
        ("mesh['x'=2,'y'=4], device_ids=([4,2]T(1,0)) {'x'}", ("c",)),
        ("mesh['x'=2,'y'=4], device_ids=(0,2,4,6,1,3,5,7) {'y'}", ("a", "b")),
    ],
)
def test_collectives_read_every_notation_of_replica_groups(groups, axes):
    mesh = mesh_of("cpu", a=2, b=2, c=2)
    attributes = f"channel_id=1, replica_groups={groups}, use_global_device_ids=true, to_apply=%add"
    [found] = collectives(
        text_of(f"ROOT %psum = f32[64,512]{{1,0}} all-reduce(%p), {attributes}"), mesh
    )
    assert (found.kind, found.shapes, found.axes) == ("all-reduce", ((64, 512),), axes)
    assert axes is None or found.group_size == 2 ** len(axes)


def test_collectives_skip_groups_of_one_device_and_read_permutes():
    alone = (
        "%a = f32[64,512]{1,0} all-reduce(%p), channel_id=1, "
        "replica_groups={{0},{1},{2},{3},{4},{5},{6},{7}}"
    )
    still = (
        "%s = f32[64,512]{1,0} collective-permute(%p), channel_id=2, "
        "source_target_pairs={{0,0},{1,1}}"
    )
    chain = (
        "%c = f32[64,512]{1,0} collective-permute(%p), channel_id=3, "
        "source_target_pairs={{0,2},{2,4},{4,6},{1,3}}"
    )
    [found] = collectives(text_of(alone, still, chain), mesh_of("cpu", a=2, b=2, c=2))
    assert (found.kind, found.axes, found.group_size) == ("collective-permute", ("a", "b"), 4)


# From here on, what compilers wrote, shortened.

GPU = [
    (
        "%s = ((f32[64,512]{1,0}, f32[256,128]{1,0}), (f32[128,512]{1,0}, f32[512,128]{1,0})) "
        "all-gather-start(%p, %q), channel_id=1, replica_groups={{0,2},{1,3},{4,6},{5,7}}, "
        "dimensions={0}, use_global_device_ids=true",
        "%d = (f32[128,512]{1,0}, f32[512,128]{1,0}) all-gather-done(%s), "
        'metadata={op_name="jit(f)/all_gather"}',
        Collective(
            "all-gather", ("f32", "f32"), ((64, 512), (256, 128)), 262144, 524288, ("b",), 2
        ),
    ),
    (
        "%s = ((f32[64,512]{1,0}), f32[32,512]{1,0}) reduce-scatter-start(%p), channel_id=1, "
        "replica_groups=[4,2]<=[2,4]T(1,0), use_global_device_ids=true, dimensions={0}, "
        "to_apply=%region_0.0",
        '%d = f32[32,512]{1,0} reduce-scatter-done(%s), metadata={op_name="jit(f)/reduce_scatter"}',
        Collective("reduce-scatter", ("f32",), ((64, 512),), 131072, 65536, ("a",), 2),
    ),
    (
        "%s = (f32[64,512]{1,0}, f32[256,128]{1,0}) all-reduce-start(%p, %q), channel_id=1, "
        "replica_groups=[4,2]<=[8], use_global_device_ids=true, to_apply=%region_0.0",
        "%d = (f32[64,512]{1,0}, f32[256,128]{1,0}) all-reduce-done(%s)",
        Collective(
            "all-reduce", ("f32", "f32"), ((64, 512), (256, 128)), 262144, 262144, ("c",), 2
        ),
    ),
    (
        "%s = (f32[64,512]{1,0}, f32[64,512]{1,0}) collective-permute-start(%p), channel_id=1,"
        " source_target_pairs={{0,2},{2,0},{1,3},{3,1},{4,6},{6,4},{5,7},{7,5}}",
        '%d = f32[64,512]{1,0} collective-permute-done(%s), metadata={op_name="jit(f)/ppermute"}',
        Collective("collective-permute", ("f32",), ((64, 512),), 131072, 131072, ("b",), 2),
    ),
    (
        "%s = ((f32[64,512]{1,0}), f32[64,512]{1,0}) collective-broadcast-start(%p), channel_id=1,"
        " replica_groups={{0,2},{1,3},{4,6},{5,7}}",
        "%d = f32[64,512]{1,0} collective-broadcast-done(%s), "
        'metadata={op_name="jit(f)/pbroadcast"}',
        Collective("collective-broadcast", ("f32",), ((64, 512),), 131072, 131072, ("b",), 2),
    ),
    (
        "%s = ((f32[64,512]{1,0}, f32[256,128]{1,0}, s64[2]{0}, s64[2]{0}, s64[2]{0}, "
        "/*index=5*/s64[2]{0}), f32[256,128]{1,0}) ragged-all-to-all-start(%p, %q, %i, %i, %i, "
        "/*index=5*/%i), channel_id=1, replica_groups={{0,2},{1,3},{4,6},{5,7}}",
        "%d = f32[256,128]{1,0} ragged-all-to-all-done(%s)",
        Collective("ragged-all-to-all", ("f32",), ((64, 512),), 131072, 131072, ("b",), 2),
    ),
]


@pytest.mark.parametrize("start, done, expected", GPU, ids=[expected.kind for *_, expected in GPU])
def test_collectives_started_asynchronously_on_gpu_are_recognized(start, done, expected):
    operands = ("%q = f32[256,128]{1,0} parameter(1)", "%i = s64[2]{0} parameter(2)")
    [found] = collectives(text_of(*operands, start, done), mesh_of("cpu", a=2, b=2, c=2))
    assert found.op_name == (re.findall(r'op_name="(.*)"', done) or [""])[0]
    assert found.asynchronous
    assert {**vars(found), "op_name": "", "asynchronous": False} == vars(expected)


PRODUCT = """
%product (param_0: f32[64,512], param_1: f32[512,512]) -> f32[64,512] {
  %param_0 = f32[64,512]{1,0} parameter(0)
  %param_1 = f32[512,512]{1,0} parameter(1)
  ROOT %dot.1 = f32[64,512]{1,0} dot(%param_0, %param_1), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%body (state: (s32[], f32[64,512], f32[512,512])) -> (s32[], f32[64,512], f32[512,512]) {
  %state = (s32[], f32[64,512]{1,0}, f32[512,512]{1,0}) parameter(0)
  %x = f32[64,512]{1,0} get-tuple-element(%state), index=1
  %w = f32[512,512]{1,0} get-tuple-element(%state), index=2
  %y = f32[64,512]{1,0} fusion(%x, %w), kind=kCustom, calls=%product
  ROOT %next = (s32[], f32[64,512]{1,0}, f32[512,512]{1,0}) tuple(%state, %y, %w)
}
"""


def kernel(target, body):
    """A call of a kernel, with what its compiler keeps of its body."""
    settings = f'{{module = "{body}"}}'
    if target == "tpu_custom_call":
        text = base64.b64encode(body.encode()).decode()
        settings = f'{{"custom_call_config":{{"body":"{text}"}}}}'
    return (
        f'%k = f32[64,512]{{1,0}} custom-call(%p), custom_call_target="{target}", '
        f"backend_config={settings}"
    )


IN_BRANCH = f"""
%skip (param_0: f32[64,512]) -> f32[64,512] {{
  ROOT %param_0 = f32[64,512]{{1,0}} parameter(0)
}}

%attend (param_0: f32[64,512]) -> f32[64,512] {{
  %p = f32[64,512]{{1,0}} parameter(0)
  ROOT {kernel("tpu_custom_call", "tpu.matmul")}
}}
"""


@pytest.mark.parametrize(
    "between, expected",
    [
        ([], False),
        (["%e = f32[64,512]{1,0} exponential(%p)"], False),
        (["%m = f32[64,512]{1,0} fusion(%p, %w), kind=kCustom, calls=%product"], True),
        (
            [
                "%m = f32[64,512]{1,0} dot(%p, %w), lhs_contracting_dims={1}, "
                "rhs_contracting_dims={0}"
            ],
            True,
        ),
        (['%m = f32[64,512]{1,0} custom-call(%p, %w), custom_call_target="__cublas$gemm"'], True),
        (['%m = f32[64,512]{1,0} custom-call(%p), custom_call_target="Sharding"'], False),
        (['%m = f32[64,512]{1,0} custom-call(%p), custom_call_target="__cudnn$norm"'], False),
        (['%m = f32[64,512]{1,0} custom-call(%p), custom_call_target="__cudnn$fmhaSoftmax"'], True),
        ([kernel("tpu_custom_call", "arith\0tpu.matmul\0math.exp2\0")], True),
        ([kernel("tpu_custom_call", "arith\0matmul.py\0tpu.dot_dimension_numbers")], False),
        ([kernel("mosaic_gpu_v2", r"\01wgmma.mma_async.sync.aligned.m64n128k16\00")], True),
        ([kernel("mosaic_gpu_v2", r"\01wgmma.commit_group.sync.aligned;\00wgmma:\00")], False),
        ([kernel("__gpu$xla.gpu.triton", r"\00dot\00store\00")], True),
        ([kernel("__gpu$xla.gpu.triton", r"\00store\00dot_general\00")], False),
        (
            [
                "%b = s32[] constant(0)",
                "%c = f32[64,512]{1,0} conditional(%b, %p, %p), "
                "branch_computations={%skip, %attend}",
            ],
            True,
        ),
        (["%l = (s32[], f32[64,512], f32[512,512]) while(%t), condition=%body, body=%body"], True),
    ],
)
def test_collectives_overlap_only_with_products_between_start_and_done(between, expected):
    start, done, _ = GPU[1]
    after = "%n = f32[64,512]{1,0} dot(%p, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}"
    state = "%t = (s32[], f32[64,512]{1,0}, f32[512,512]{1,0}) tuple(%w, %p, %w)"
    entry = ["%w = f32[512,512]{1,0} parameter(1)", state, start, *between, done, after]
    assert [
        one.overlapped for one in collectives(text_of(*entry, computations=PRODUCT + IN_BRANCH))
    ] == [expected]


WRAPPED = """
%wrapped (param_0: bf16[256,2048]) -> bf16[2048,2048] {
  %param_0 = bf16[256,2048]{1,0:T(8,128)(2,1)} parameter(0)
  %tuple.27 = (bf16[256,2048]{1,0:T(8,128)(2,1)}) tuple(%param_0)
  %get-tuple-element.19 = bf16[256,2048]{1,0:T(8,128)(2,1)} get-tuple-element(%tuple.27), index=0
  ROOT %all-gather.12 = bf16[2048,2048]{1,0:T(8,128)(2,1)} all-gather(%get-tuple-element.19), channel_id=1, \
replica_groups=[1,8]<=[8], dimensions={0}, metadata={op_name="jit(f)/all_gather"}
}, execution_thread="sparsecore"
"""


@pytest.mark.parametrize(
    "start, update, done",
    [
        (
            "custom-call-start(), called_computations={%wrapped}",
            "custom-call-update(%s, %p)",
            "custom-call-done(%u)",
        ),
        (
            'call-start(%p), async_execution_thread="sparsecore", to_apply=%wrapped',
            "copy(%p)",
            "call-done(%s)",
        ),
        (
            "async-start(%p), calls=%wrapped",
            "async-update(%s), calls=%wrapped",
            "async-done(%u), calls=%wrapped",
        ),
    ],
)
@pytest.mark.parametrize("overlapped", [False, True])
def test_collectives_wrapped_in_an_async_computation_are_recognized(
    start, update, done, overlapped
):
    started = (
        "((bf16[256,2048]{1,0:T(8,128)(2,1)}), bf16[2048,2048]{1,0:T(8,128)(2,1)}, "
        "(s32[8192]{0:T(1024)}))"
    )
    product = (
        ["%m = f32[64,512]{1,0} convolution(%p, %p), dim_labels=bf_io->bf"] if overlapped else []
    )
    # A start without operands has nothing to send before its update.
    before, after = ([], product) if "start()" in start else (product, [])
    entry = (
        f"%s = {started} {start}",
        *before,
        f"%u = {started} {update}",
        *after,
        f"%d = bf16[2048,2048]{{1,0}} {done}",
    )
    expected = Collective(
        "all-gather", ("bf16",), ((256, 2048),), 2**20, 2**23, None, 8, op_name="jit(f)/all_gather"
    )
    found = collectives(text_of(*entry, computations=WRAPPED))
    assert found == (dataclasses.replace(expected, overlapped=overlapped),)
    assert found[0].asynchronous


@pytest.mark.parametrize("updates", [1, 2])
def test_what_is_multiplied_before_a_collective_has_its_operands_does_not_hide_it(updates):
    started = (
        "((bf16[256,2048]{1,0:T(8,128)(2,1)}), bf16[2048,2048]{1,0:T(8,128)(2,1)}, "
        "(s32[8192]{0:T(1024)}))"
    )
    entry = (
        f'%s = {started} call-start(), async_execution_thread="sparsecore", to_apply=%wrapped',
        *([f"%t = {started} call-update(%s)"] if updates == 2 else []),
        "%m = f32[64,512]{1,0} convolution(%p, %p), dim_labels=bf_io->bf",
        f"%u = {started} call-update({'%s' if updates == 1 else '%t'}, %p)",
        "%d = bf16[2048,2048]{1,0} call-done(%u)",
    )
    [found] = collectives(text_of(*entry, computations=WRAPPED))
    assert (found.asynchronous, found.overlapped) == (True, False)


CHAIN = """
%fused_computation.19 (param_0.37: bf16[512,2048]) -> (bf16[512,2048], bf16[2048,2048], s32[2], u32[]) {
  %param_0.37 = bf16[512,2048]{1,0:T(8,128)(2,1)S(1)} parameter(0)
  %all-gather.17 = bf16[2048,2048]{1,0:T(8,128)(2,1)} all-gather(%param_0.37), channel_id=1, \
replica_groups=[2,4]<=[8], dimensions={0}, frontend_attributes={chain_id="0"}
  ROOT %custom-call.1 = (bf16[512,2048]{1,0}, bf16[2048,2048]{1,0}, s32[2]{0:S(4)}, u32[]{:S(2)}) \
custom-call(%all-gather.17), custom_call_target="AsyncCollectiveStart"
}

%async_collective_fusion.30 (param_0.40: bf16[512,2048], param_1.44: bf16[2048,2048]) -> (bf16[512,2048]) {
  %param_0.40 = bf16[512,2048]{1,0:T(8,128)(2,1)S(1)} parameter(0)
  %all-gather.19 = bf16[2048,2048]{1,0:T(8,128)(2,1)S(1)} all-gather(%param_0.40), channel_id=1, \
replica_groups=[2,4]<=[8], dimensions={0}, frontend_attributes={chain_id="0"}
  ROOT %tuple.8 = (bf16[2048,2048]{1,0:T(8,128)(2,1)S(1)}) tuple(%all-gather.19)
}

%fused_computation.23 (param_0.47: bf16[512,2048]) -> bf16[2048,2048] {
  %param_0.47 = bf16[512,2048]{1,0:T(8,128)(2,1)S(1)} parameter(0)
  %all-gather.25 = bf16[2048,2048]{1,0:T(8,128)(2,1)} all-gather(%param_0.47), channel_id=1, \
replica_groups=[2,4]<=[8], dimensions={0}, frontend_attributes={chain_id="0"}
  ROOT %custom-call.3 = bf16[2048,2048]{1,0} custom-call(%all-gather.25), custom_call_target="AsyncCollectiveDone"
}

%all-reduce-scatter (input: bf16[2048,2048]) -> bf16[528,2048] {
  %input = bf16[2048,2048]{1,0:T(8,128)(2,1)S(1)} parameter(0)
  %constant.20 = bf16[] constant(0)
  %pad = bf16[2112,2048]{1,0:T(8,128)(2,1)} pad(%input, %constant.20), padding=0_64x0_0
  %all-reduce.4 = bf16[2112,2048]{1,0:T(8,128)(2,1)} all-reduce(%pad), channel_id=2, \
replica_groups=[2,4]<=[8], use_global_device_ids=true, to_apply=%region_0.0.clone
  %partition-id.6 = u32[] partition-id()
  %constant.22 = u32[] constant(0)
  ROOT %dynamic-slice.9 = bf16[528,2048]{1,0:T(8,128)(2,1)S(1)} dynamic-slice(%all-reduce.4, %partition-id.6, \
%constant.22), dynamic_slice_sizes={528,2048}
}
"""


@pytest.mark.parametrize("woven", [False, True])
def test_collectives_fused_on_tpu_are_read_from_program_text(woven):
    computations = CHAIN
    if woven:
        product = (
            "  %conv = bf16[512,2048]{1,0} convolution(%param_0.40, %param_1.44), "
            "dim_labels=bf_io->bf\n"
        )
        computations = computations.replace("  ROOT %tuple.8", f"{product}  ROOT %tuple.8")
    entry = [
        "%start = (bf16[512,2048]{1,0}) fusion(%p), kind=kCustom, calls=%fused_computation.19",
        "%step = (bf16[512,2048]{1,0}) fusion(%start), kind=kOutput, "
        "calls=%async_collective_fusion.30",
        "%done = bf16[2048,2048]{1,0} fusion(%step), kind=kCustom, calls=%fused_computation.23",
        "%scatter = bf16[528,2048]{1,0} fusion(%done), kind=kCustom, calls=%all-reduce-scatter, "
        'metadata={op_name="jit(f)/reduce_scatter"}',
    ]
    assert collectives(text_of(*entry, computations=computations)) == (
        Collective(
            "all-gather", ("bf16",), ((512, 2048),), 2**21, 2**23, None, 4, overlapped=woven
        ),
        Collective(
            "reduce-scatter",
            ("bf16",),
            ((2112, 2048),),
            8650752,
            2162688,
            None,
            4,
            op_name="jit(f)/reduce_scatter",
        ),
    )


def test_collectives_between_slices_are_read_without_a_mesh():
    attributes = 'frontend_attributes={_xla_host_transfer_rendezvous="psum.7_0",_xla_megascale_target="{1,2}x{0:3}"'
    attributes += ',_xla_megascale_transfer_type="ALL_REDUCE"}'
    send = (
        f"%send = (f32[64,512]{{1,0}}, u32[], token[]) send(%p, %token), channel_id=2, {attributes}"
    )
    receive = (
        f"%recv = (f32[64,512]{{1,0}}, u32[], token[]) recv(%token), channel_id=1, {attributes}"
    )
    [found] = collectives(text_of("%token = token[] after-all()", send, receive))
    assert found == Collective("all-reduce", ("f32",), ((64, 512),), 131072, 131072, None, 2)


def test_collectives_refuse_text_that_is_no_program():
    with pytest.raises(ValueError, match="as_text"):
        collectives("no program")


def test_collectives_summary_merges_equal_entries_and_sorts_by_bytes():
    gather = Collective("all-gather", ("bf16",), ((512,),), 1024, 4096, ("data",), 4, times=6)
    reduce = Collective(
        "all-reduce", ("f32",), ((2**20,),), 2**22, 2**22, None, 8, conditional=True
    )
    assert summary([gather, reduce, gather]).splitlines() == [
        "all-reduce over groups of 8: 1 x 4.0 MiB in a branch",
        "all-gather over data: 12 x 4.0 KiB",
    ]
