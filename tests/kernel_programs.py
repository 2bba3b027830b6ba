"""Programs of the ops of `shardlib.kernels` by compilers of machines that are not there, and what
is in them.
"""

import functools
import re
from typing import NamedTuple

import jax
import numpy as np
import pytest
from kernel_ops import OPS, RULES, derived, head, split
from machines import compile_for

import shardlib as sl
from shardlib import kernels, testing
from shardlib.compiled._hlo import Program

P = jax.P
GPUS = [
    pytest.param(f"gpu:{name}:1x1x4", marks=pytest.mark.gpu_compiler)
    for name in ("h100", "h200", "b200")
]
TPUS = [
    pytest.param(f"tpu:{name}", marks=pytest.mark.tpu_compiler)
    for name in ("v4:2x2x1", "v5e:2x2", "v5p:2x2x1", "v6e:2x2")
]
CASES = {
    "softmax": [
        ({"x": (4, 4, 256, 256)}, "float32", {"causal": True}),
        ({"x": (4, 4, 1000, 1000), "where": (4, 1, 1000, 1000)}, "bfloat16", {"scale": 0.5}),
        ({"x": (4, 4, 16, 8192), "where": (4, 4, 16, 1)}, "bfloat16", {}),
    ],
    "norm": [
        ({"x": (4, 4, 64, 1024), "scale": (1024,)}, "bfloat16", {}),
        (
            {
                "x": (4, 4, 1000, 1000),
                "residual": (4, 4, 1000, 1000),
                "scale": (1000,),
                "bias": (1000,),
            },
            "float32",
            {},
        ),
        ({"x": (4, 4, 48, 8192)}, "bfloat16", {"centred": True}),
    ],
}

# Rows that a warpgroup has 128 of, or that pass by; compilers for TPUs lay such arrays out
# otherwise at their entry.
OF_GPUS = {
    "softmax": [
        ({"x": (4, 4, 256, 24)}, "bfloat16", {}),
        ({"x": (4, 4, 99, 99), "where": (4, 4, 99, 99)}, "float32", {"causal": True}),
        ({"x": (4, 4, 16, 20_000)}, "float32", {}),
    ],
    "norm": [
        ({"x": (4, 4, 256, 24), "residual": (4, 4, 256, 24), "scale": (24,)}, "bfloat16", {}),
        ({"x": (4, 4, 256, 120), "scale": (120,), "bias": (120,)}, "float32", {}),
        ({"x": (4, 4, 256, 64), "bias": (64,)}, "bfloat16", {"beside": "bfloat16"}),
        ({"x": (4, 4, 16, 19_100), "scale": (19_100,), "bias": (19_100,)}, "bfloat16", {}),
        ({"x": (4, 4, 16, 20_001), "scale": (20_001,), "bias": (20_001,)}, "bfloat16", {}),
    ],
}


class Found(NamedTuple):
    """Bytes that forward reads and writes, the collectives of both ways, and the bytes of each
    array on a device.
    """

    read: int
    written: int
    kinds: list[str]
    sizes: dict[str, int]


def of_case(target, op, case):
    """The programs of one of the cases."""
    shapes, dtype, options = [*CASES[op], *OF_GPUS[op]][case]
    options, beside = dict(options), options.get("beside", "float32")
    options.pop("beside", None)
    target = sl.Target(target)
    mesh, names = target.mesh("data=2,model=2"), ("batch", "heads", None, None)

    def absent(name, shape):
        of_dims = (
            axis if size > 1 else None for axis, size in zip(("data", "model"), shape, strict=False)
        )
        kind = bool if name == "where" else beside if len(shape) == 1 else dtype
        sharding = jax.NamedSharding(mesh, P() if len(shape) == 1 else P(*of_dims))
        return jax.ShapeDtypeStruct(shape, kind, sharding=sharding)

    arrays = {name: absent(name, shape) for name, shape in shapes.items()}
    with_names = {**options, "names": names, "implementation": target.platform}
    with sl.use(RULES, mesh):
        forward = jax.jit(lambda arrays: OPS[op].call(arrays, with_names)).lower(arrays)
        moved = testing.memory_traffic(compile_for(mesh, forward))
        given = (arrays["x"],) * 2 if "residual" in arrays else arrays["x"]
        both = jax.jit(
            lambda arrays, given: derived(OPS[op].call, arrays, with_names, given)
        ).lower(arrays, given)
        kinds = [one.kind for one in testing.collectives(compile_for(mesh, both), mesh)]
    sizes = {
        name: int(np.prod(x.sharding.shard_shape(x.shape))) * x.dtype.itemsize
        for name, x in arrays.items()
    }
    return Found(moved.read, moved.written, kinds, sizes)


def in_a_checked_shard_map(target, op):
    """The collectives of both ways in a `shard_map` that keeps account of what differs."""
    target = sl.Target(target)
    mesh, names = target.mesh("data=2,model=2"), ("batch", "heads", None)
    shapes = {
        "softmax": {"x": (4, 128, 128), "where": (4, 1, 128)},
        "norm": {"x": (4, 128, 128), "scale": (128,), "bias": (128,)},
        "head": {"x": (4, 128, 128), "kernel": (1000, 128), "targets": (4, 128)},
    }[op]
    spec = P("data", "model")
    specs = {
        "x": spec,
        "where": P("data"),
        "scale": P(),
        "bias": P(),
        "kernel": P(),
        "targets": spec,
    }
    kinds = {"where": bool, "targets": "int32"}
    arrays = {
        name: jax.ShapeDtypeStruct(
            shape, kinds.get(name, "bfloat16"), sharding=jax.NamedSharding(mesh, specs[name])
        )
        for name, shape in shapes.items()
    }
    inside = {name: specs[name] for name in arrays}
    out = (spec, {name: one for name, one in inside.items() if name not in kinds})

    def run(arrays):
        floats, rest = split(arrays)
        options = {"names": names, "implementation": target.platform}
        out, back = jax.vjp(lambda floats: OPS[op].call({**floats, **rest}, options), floats)
        return out, back(out)[0]

    with sl.use(RULES, mesh):
        mapped = jax.shard_map(run, mesh=mesh, in_specs=(inside,), out_specs=out)
        compiled = compile_for(mesh, jax.jit(mapped).lower(arrays))
    return [one.kind for one in testing.collectives(compiled, mesh)]


def which_multiply(target, op):
    """Of an op, forward and backward, whether each kernel counts as a product of matrices."""
    target = sl.Target(target)
    mesh, names = target.mesh("data=2,model=2"), ("batch", None, "heads", None)

    def absent(dtype, spec, *shape):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=jax.NamedSharding(mesh, spec))

    x = absent("bfloat16", P("data", None, "model"), 4, 256, 4, 128)
    arrays = {
        "softmax": {"x": x},
        "norm": {"x": x, "scale": absent("float32", P(), 128)},
        "attention": {"q": x, "k": x, "v": x},
        "head": {
            "x": x,
            "kernel": absent("bfloat16", P(), 1024, 128),
            "targets": absent("int32", P("data", None, "model"), 4, 256, 4),
        },
    }[op]
    whole = {"targets": arrays.pop("targets")} if op == "head" else {}

    def loss(arrays, whole):
        options = {"names": names, "implementation": target.platform}
        if op == "attention":
            y = kernels.attention(**arrays, **options)
        else:
            y = OPS[op].call({**arrays, **whole}, options)
        return y.astype("float32").sum()

    with sl.use(RULES, mesh):
        compiled = compile_for(mesh, jax.jit(jax.grad(loss)).lower(arrays, whole))
    return _multiply(compiled)


def of_triton(target, multiplies):
    """The same of a kernel in Triton that multiplies, or that divides rows by their sums."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    def body(x, y):
        rows = x[...]
        y[...] = rows @ rows if multiplies else rows / rows.sum(1, keepdims=True)

    mesh = sl.Target(target).mesh("data=1")
    sharding = jax.NamedSharding(mesh, P())
    x = jax.ShapeDtypeStruct((64, 64), "float32", sharding=sharding)
    call = pl.pallas_call(body, out_shape=x, compiler_params=triton.CompilerParams())
    return _multiply(compile_for(mesh, jax.jit(call).lower(x)))


def _multiply(compiled):
    """Whether each kernel of a program counts as a product of matrices."""
    program = Program(compiled.as_text())
    targets = r'custom_call_target="(tpu_custom_call|mosaic_gpu|__gpu\$xla\.gpu\.triton)'
    return [
        program.multiplies(scope, made)
        for scope, made, _ in program.walk()
        if re.search(targets, made.attributes)
    ]


def of_head(target, implementation, dtype, rows, vocab, width):
    """Bytes of temporaries of the gradients of a head's loss, rows and vocabulary split, and its
    large collectives.
    """
    mesh = sl.Target(target).mesh("data=2,model=2")

    def absent(shape, kind, *spec):
        return jax.ShapeDtypeStruct(shape, kind, sharding=jax.NamedSharding(mesh, P(*spec)))

    arrays = (
        absent((8, rows // 8, width), dtype, "data"),
        absent((vocab, width), "float32", "model"),
        absent((8, rows // 8), "int32", "data"),
    )

    def loss(x, kernel, targets):
        options = {
            "names": ("batch", None, None),
            "vocab_name": "heads",
            "implementation": implementation,
        }
        return head({"x": x, "kernel": kernel, "targets": targets}, options).sum()

    with sl.use(RULES, mesh):
        compiled = compile_for(mesh, jax.jit(jax.grad(loss, argnums=(0, 1))).lower(*arrays))
    large = {
        (one.kind, one.axes)
        for one in testing.collectives(compiled, mesh)
        if one.sent_bytes > 2**16
    }
    return compiled.memory_analysis().temp_size_in_bytes, large


def of_tokamax(target):
    """The collectives of both ways of a norm by Tokamax, which asks JAX which GPU is there, and why
    it is none elsewhere.
    """
    import tokamax
    from jax.extend import backend

    mesh, patch = sl.Target(target).mesh("data=2,model=2"), pytest.MonkeyPatch()
    x, scale = (
        jax.ShapeDtypeStruct(shape, "bfloat16", sharding=jax.NamedSharding(mesh, P(*spec)))
        for shape, spec in (((8, 128, 1000), ("data",)), ((1000,), ()))
    )
    options = {"names": ("batch", None, None), "implementation": "tokamax"}
    arrays = {"x": x, "scale": scale, "bias": scale, "residual": x}
    with sl.use(RULES, mesh), patch.context() as patched:
        with pytest.raises(ValueError, match="JAX has cpu here. Here `reference` and `gpu` can"):
            jax.eval_shape(lambda arrays: OPS["norm"].call(arrays, options), arrays)
        patched.setattr(jax, "devices", lambda *_: list(mesh.devices.flat))
        patched.setattr(jax, "default_backend", lambda: "gpu")
        patched.setattr(backend, "get_default_device", lambda: mesh.devices.flat[0])
        with tokamax.config.cross_compile(True):
            both = jax.jit(
                lambda arrays, given: derived(OPS["norm"].call, arrays, options, given)
            ).lower(arrays, (x, x))
        found = [one.kind for one in testing.collectives(compile_for(mesh, both), mesh)]

        def checked(x):
            return kernels.rms_norm(x, implementation="tokamax")

        with pytest.raises(ValueError, match="known over `data`: `shard_map"):
            jax.eval_shape(jax.shard_map(checked, in_specs=P("data"), out_specs=P("data")), x)
    return found


def attention_by_cudnn(target):
    """Which calls of cuDNN's attention there are, forward alone, both ways with heads split over an
    automatic axis, and both ways in a `shard_map` that keeps account of what differs.
    """
    mesh = sl.Target(target).mesh("data=2,model=2")
    sharding = jax.NamedSharding(mesh, P("data", None, "model"))
    x = jax.ShapeDtypeStruct((4, 256, 4, 64), "bfloat16", sharding=sharding)
    names = ("batch", None, "heads", None)

    def attend(q, k, v):
        return kernels.attention(
            q, k, v, names=names, causal=True, window=(100, 0), implementation="cudnn"
        )

    def both_ways(q, k, v):
        y, back = jax.vjp(attend, q, k, v)
        return back(y)

    spec = P("data", None, "model")
    checked = jax.shard_map(both_ways, mesh=mesh, in_specs=spec, out_specs=spec)
    calls = []
    with sl.use(RULES, mesh):
        for function in (attend, both_ways, checked):
            text = compile_for(mesh, jax.jit(function).lower(x, x, x)).as_text()
            calls += re.findall(r'custom_call_target="__cudnn\$fmhaSoftmax(\w*)"', text)
    return sorted(calls)


ATTENTION_ON_GPUS = {
    "causal": ({"causal": True}, 128, 128),
    "small heads": ({"causal": True}, 64, 64),
    "window, capped": ({"causal": True, "window": (300, None), "soft_cap": 30.0}, 256, 256),
    "segments, sinks": (
        {"segment_ids": np.zeros((4, 2048), np.int32), "sinks": np.ones(8, np.float32)},
        80,
        80,
    ),
    "values of another size": ({"window": (300, 100), "starts": (5, 0)}, 192, 128),
}


class AttentionProgram(NamedTuple):
    """What is in the program of an attention, forward and backward, on each of four devices."""

    collectives: list
    kernels: int
    temporaries: int  # bytes
    scores: int  # bytes that scores would take


def attention_on_gpus(target, case):
    """Attention by our kernels, heads split over an automatic axis, and in a `shard_map` that keeps
    account of what differs.
    """
    options, size, value_size = ATTENTION_ON_GPUS[case]
    mesh = sl.Target(target).mesh("data=2,model=2")
    sharding = jax.NamedSharding(mesh, P("data", None, "model"))

    def absent(heads, size):
        return jax.ShapeDtypeStruct((4, 2048, heads, size), "bfloat16", sharding=sharding)

    def loss(q, k, v):
        names = ("batch", None, "heads", None)
        y = kernels.attention(q, k, v, names=names, **options, implementation="gpu")
        return y.astype(np.float32).sum()

    arrays = absent(8, size), absent(4, size), absent(4, value_size)
    gradient = jax.grad(loss, (0, 1, 2))
    with sl.use(RULES, mesh):
        compiled = compile_for(mesh, jax.jit(gradient).lower(*arrays))
        if case == "causal":
            spec = P("data", None, "model")
            checked = jax.shard_map(gradient, mesh=mesh, in_specs=spec, out_specs=spec)
            compile_for(mesh, jax.jit(checked).lower(*arrays))
    return AttentionProgram(
        [one.kind for one in testing.collectives(compiled, mesh)],
        len(re.findall('custom_call_target="mosaic_gpu', compiled.as_text())),
        compiled.memory_analysis().temp_size_in_bytes,
        2 * 4 * 2048 * 2048 * 2,
    )


def attention_refused(target):
    """Why our kernels do not attend on a GPU."""
    mesh = sl.Target(target).mesh("data=2,model=2")
    x = jax.ShapeDtypeStruct((4, 256, 4, 64), "bfloat16")
    names = ("batch", None, "heads", None)
    attend = lambda x: kernels.attention(x, x, x, names=names, implementation="gpu")
    with sl.use(RULES, mesh), pytest.raises(ValueError) as refusal:
        jax.eval_shape(attend, x)
    return str(refusal.value)


def attention_by_tokamax(target):
    """For several masks, heads and meshes, how many kernels of Tokamax's there are both ways, and
    the bytes of temporaries.
    """
    of_gpu = sl.Target(target)
    cases = [
        ("data=2,model=2,seq=1", {"causal": True}, 64),
        ("data=2,model=2,seq=1", {"window": (100, 9), "soft_cap": 30.0}, 64),
        ("data=1,model=2,seq=2", {"causal": True, "with_lse": True}, 64),
        ("data=2,model=2,seq=1", {}, 64),
    ]
    if "b200" not in target:
        cases.append(("data=2,model=2,seq=1", {"causal": True, "window": (300, 0)}, 128))
    return [_by_tokamax(of_gpu, *case) for case in cases]


def _by_tokamax(of_gpu, axes, options, size):
    mesh, split = of_gpu.mesh(axes), P("data", "seq", "model")
    rules = sl.AxisRules(batch="data", heads="model", seq="seq")
    names = ("batch", "seq", "heads", None)
    arrays = [
        jax.ShapeDtypeStruct(
            (2, 2048, heads, size), "bfloat16", sharding=jax.NamedSharding(mesh, split)
        )
        for heads in (8, 2, 2)
    ]

    def loss(*arrays):
        found = kernels.attention(*arrays, names=names, implementation="tokamax", **options)
        return sum((x.astype("float32") ** 2).sum() for x in jax.tree.leaves(found))

    gradients = jax.grad(loss, (0, 1, 2))
    with sl.use(rules, mesh):
        compiled = compile_for(mesh, jax.jit(gradients).lower(*arrays))
    count = len(re.findall(r'custom_call_target="mosaic_gpu', compiled.as_text()))
    return count, compiled.memory_analysis().temp_size_in_bytes


def attention_chosen(target):
    """What attends to positions on the device itself, to those with a soft cap, and to positions
    that are split over devices.
    """
    mesh = sl.Target(target).mesh("data=2,model=1,seq=2")
    rules = sl.AxisRules(batch="data", heads="model", seq="seq")
    x = jax.ShapeDtypeStruct((2, 8192, 8, 64), "bfloat16")

    def runs(positions, **options):
        names = ("batch", positions, "heads", None)
        call = functools.partial(kernels.attention, names=names, causal=True, **options)
        (explained,) = kernels.explain(call, x, x, x).calls
        return explained.runs

    with sl.use(rules, mesh):
        return runs(None), runs(None, soft_cap=30.0), runs("seq")
