"""Meshes: how they are written, what is refused, and where devices end up, simulated or of absent
TPUs.
"""

import doctest
import itertools
import math
import re

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental import mesh_utils
from jax.sharding import AxisType
from machines import devices_of

import shardlib.machine._mesh as mesh_module
from shardlib.machine._describe_mesh import describe_mesh
from shardlib.machine._mesh import format_mesh, make_mesh, parse_axes, slow_axes


def ids(mesh):
    return np.vectorize(lambda device: device.id, otypes=[int])(mesh.devices)


def refuses(*parts):
    """An error that carries each of these parts, in this order."""
    return pytest.raises(ValueError, match=".*".join(map(re.escape, parts)))


def test_mesh_docstring_examples():
    results = doctest.testmod(mesh_module)
    assert results.attempted >= 9
    assert results.failed == 0


# Reading


@pytest.mark.parametrize(
    ("text", "axes"),
    [
        ("", {}),
        ("data=8", {"data": 8}),
        (" data = 2 , model=-1 ", {"data": 2, "model": -1}),
        ({"model": np.int64(4), "data": 2}, {"model": 4, "data": 2}),
    ],
)
def test_parse_axes_reads_text_and_mappings(text, axes):
    parsed = parse_axes(text)
    assert list(parsed.items()) == list(axes.items())
    assert all(type(size) is int for size in parsed.values())


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("data:2", ["`name=size`", "`data:2`"]),
        ("data=2,,model=4", ["`name=size`", "got `` in `data=2,,model=4`"]),
        ("data=two", ["`name=size`", "`data=two`"]),
        ("2=data", ["`name=size`", "`2=data`"]),
        ("data=2 model=4", ["`name=size`", "`data=2 model=4`"]),
        ("data=2,model", ["a size each", "`data=2,model`", "`model=-1`"]),
        ("data=2,data=4", ["each axis once", "`data`"]),
        ("data=0", ["`data`", "from 1 up", "got 0"]),
        ("data=-2", ["`data`", "from 1 up", "got -2"]),
        ("data=-1,model=-1", ["One axis", "`data=-1,model=-1`"]),
        ({"data": True}, ["`data`", "whole number", "True"]),
        ({"data 1": 2}, ["a word", "'data 1'"]),
    ],
)
def test_parse_axes_refuses_malformed_axes(text, parts):
    with refuses(*parts):
        parse_axes(text)


@given(
    st.dictionaries(
        st.from_regex(r"[a-z_][a-z0-9_]*", fullmatch=True), st.integers(1, 10**6), max_size=5
    )
)
def test_parse_axes_reads_back_any_formatted_axes(axes):
    text = ",".join(f"{name}={size}" for name, size in axes.items())
    assert list(parse_axes(text).items()) == list(axes.items())
    assert parse_axes(axes) == axes


# Simulated devices


@pytest.mark.parametrize(
    ("shape", "axes"),
    [
        ("data=2,model=4", {}),
        ({"data": 2, "model": 4}, {}),
        ("", {"data": 2, "model": 4}),
        ("data=2", {"model": 4}),
        ("data=-1,model=4", {}),
        ("data=2", {"model": -1}),
    ],
)
def test_make_mesh_accepts_every_spelling_of_the_same_mesh(shape, axes):
    mesh = make_mesh(shape, **axes)
    assert format_mesh(mesh) == "data=2,model=4"
    assert (ids(mesh) == np.arange(8).reshape(2, 4)).all()


def test_mesh_axes_are_automatic_by_default():
    assert make_mesh("data=2,model=4").axis_types == (AxisType.Auto, AxisType.Auto)
    explicit = make_mesh("data=2,model=4", dcn="data", axis_type=AxisType.Explicit)
    assert explicit.axis_types == (AxisType.Explicit, AxisType.Explicit)


def test_make_mesh_keeps_the_order_of_given_devices():
    devices = jax.devices()[4:6] + jax.devices()[:2]
    assert ids(make_mesh("data=2,model=2", devices=devices)).tolist() == [[4, 5], [0, 1]]
    assert ids(make_mesh("data=-1", devices=np.array(devices).reshape(2, 2))).tolist() == [
        4,
        5,
        0,
        1,
    ]


@st.composite
def hybrid_meshes(draw):
    """Sizes whose product is 8, and a factor of each that crosses the slow network."""
    exponents = draw(
        st.lists(st.integers(0, 3), min_size=1, max_size=4).filter(lambda e: sum(e) <= 3)
    )
    exponents[draw(st.integers(0, len(exponents) - 1))] += 3 - sum(exponents)
    sizes = {f"axis{k}": 2**e for k, e in enumerate(exponents)}
    return sizes, {f"axis{k}": 2 ** draw(st.integers(0, e)) for k, e in enumerate(exponents)}


@given(hybrid_meshes())
@settings(max_examples=60, deadline=None)
def test_dcn_mesh_treats_blocks_of_simulated_devices_as_slices(case):
    sizes, outer = case
    mesh = make_mesh(sizes, dcn=outer)
    assert dict(mesh.shape) == sizes
    per_slice = 8 // math.prod(outer.values())
    blocks = ids(mesh) // per_slice
    assert sorted(ids(mesh).flat) == list(range(8))
    # The outer part of a device's place alone tells its block, the inner part its place there; both
    # in axis order.
    inner = [size // factor for size, factor in zip(sizes.values(), outer.values(), strict=True)]
    for place in itertools.product(*map(range, mesh.devices.shape)):
        block, within = np.divmod(place, inner)
        assert blocks[place] == np.ravel_multi_index(block, list(outer.values()))
        assert ids(mesh)[place] % per_slice == np.ravel_multi_index(within, inner)


@pytest.mark.parametrize(
    ("shape", "dcn", "spelt", "expected"),
    [
        (
            "pod=2,data=2,model=2",
            "pod",
            "pod=2,data=2,model=2",
            [[[0, 1], [2, 3]], [[4, 5], [6, 7]]],
        ),
        ("data=-1,model=4", "data=2", "data=2,model=4", [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ("model=4,data=2", {"model": 2}, "model=4,data=2", [[0, 1], [2, 3], [4, 5], [6, 7]]),
        ("a=4,b=2", "a=2,b", "a=4,b=2", [[0, 2], [1, 3], [4, 6], [5, 7]]),
    ],
)
def test_dcn_mesh_device_order(shape, dcn, spelt, expected):
    mesh = make_mesh(shape, dcn=dcn)
    assert format_mesh(mesh) == spelt
    assert ids(mesh).tolist() == expected


@pytest.mark.parametrize(
    ("shape", "options", "parts"),
    [
        ("", {}, ["at least one axis"]),
        ("data=-1", {"devices": []}, ["at least one device"]),
        (
            "data=4",
            {},
            [
                "all of its devices",
                "`data=4` is 4 of 8",
                "-1",
                "`sl.make_mesh(..., devices=jax.devices()[:4])`",
            ],
        ),
        (
            "data=4,model=4",
            {},
            ["too few devices", "`data=4,model=4`", "16", "8", "-1", "device_count=16"],
        ),
        ("data=-1,model=3", {}, ["`data=-1,model=3`", "take 3 devices", "does not divide the 8"]),
        (
            "data=2,model=4",
            {"data": 2},
            ["each axis once", "`data`", "both in the shape", "keyword"],
        ),
        ("data=-1", {"model": -1}, ["One axis", "`data=-1,model=-1`"]),
        ("data=2,model=4", {"dcn": "pod"}, ["`dcn`", "`data=2,model=4`", "no axis `pod`"]),
        ("data=2,model=4", {"dcn": "model=3"}, ["`dcn`", "divide", "`model=3` for `model=4`"]),
        ("data=2,model=4", {"dcn": "data=4"}, ["`dcn`", "divide", "`data=4` for `data=2`"]),
        ("data=2,model=4", {"dcn": "data=-1"}, ["`dcn`", "divide", "`data=-1` for `data=2`"]),
        ("data=2,model=4", {"dcn": "data=0"}, ["`data`", "got 0"]),
        ("data=2,model=4", {"dcn": "data,data"}, ["each axis once", "`data`"]),
        ("data=2,model=4", {"dcn": "data/2"}, ["`name=size`", "`data/2`"]),
    ],
)
def test_make_mesh_refuses_invalid_arguments(shape, options, parts):
    with refuses(*parts):
        make_mesh(shape, **options)


# Devices of several processes and slices, without the machines


def stand_ins(platform, processes, slices=None):
    """Devices as `mesh_utils` sees them, one for each process named; without `slices` they do not
    know theirs.
    """
    kind = {"gpu": "NVIDIA H200", "cpu": "cpu"}[platform]
    devices = []
    for k, process in enumerate(processes):
        known = {} if slices is None else {"slice_index": slices[k]}
        attributes = {
            "id": k,
            "platform": platform,
            "device_kind": kind,
            "process_index": process,
            **known,
        }
        devices.append(type("StandIn", (), attributes)())
    return devices


GPUS_BY_SLICE = stand_ins("gpu", processes=[0, 1, 2, 3], slices=[0, 0, 1, 1])
GPUS_BY_PROCESS = stand_ins("gpu", processes=[0, 0, 1, 1])
CPUS_BY_PROCESS = stand_ins("cpu", processes=[0, 0, 1, 1])


@pytest.mark.parametrize("devices", [GPUS_BY_SLICE, GPUS_BY_PROCESS, CPUS_BY_PROCESS])
@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 1, 0, 2]])
@pytest.mark.parametrize(
    ("shape", "dcn", "slow"), [("a=2,b=2", "a", ("a",)), ("a=2,b=2", "b", ("b",))]
)
def test_dcn_axes_cross_slices_or_else_processes(devices, order, shape, dcn, slow):
    mesh = make_mesh(shape, dcn=dcn, devices=[devices[k] for k in order])
    assert slow_axes(mesh) == slow
    for row in ids(mesh).T if slow == ("a",) else ids(mesh):
        assert sorted(np.array(row) // 2) == [0, 1]


def test_mesh_treats_gpus_of_one_process_as_a_single_slice():
    devices = stand_ins("gpu", processes=[0, 0, 0, 0])
    assert slow_axes(make_mesh("data=4", devices=devices)) == ()
    with refuses("number of processes, 1", "Leave `dcn` out"):
        make_mesh("data=4", dcn="data=2", devices=devices)


@pytest.mark.parametrize(
    ("shape", "dcn", "parts"),
    [
        ("pod=2,data=2", "", ["told by `dcn`", "2 slices", '`dcn="pod"`']),
        ("a=1,data=4", "", ["told by `dcn`", "2 slices", '`dcn="data=2"`']),
        ("one=1,data=4", "one", ["number of slices, 2", "`one=1`, which is 1", '`dcn="data=2"`']),
        ("data=4", "data", ["number of slices, 2", "`data=4`, which is 4", '`dcn="data=2"`']),
    ],
)
def test_make_mesh_requires_a_correct_dcn_for_several_slices(shape, dcn, parts):
    with refuses(*parts):
        make_mesh(shape, dcn=dcn, devices=GPUS_BY_SLICE)


@given(hybrid_meshes())
@settings(max_examples=60, deadline=None)
def test_make_mesh_accepts_the_dcn_that_its_error_proposes(case):
    sizes, outer = case
    count = math.prod(outer.values())
    devices = stand_ins("gpu", processes=range(8), slices=[k * count // 8 for k in range(8)])
    if count == 1:
        assert slow_axes(make_mesh(sizes, devices=devices)) == ()
        return
    with refuses("told by `dcn`", f"{count} slices") as refusal:
        make_mesh(sizes, devices=devices)
    proposed = re.search(r'Write `dcn="(.*?)"`', str(refusal.value))[1]
    assert slow_axes(make_mesh(sizes, dcn=proposed, devices=devices))


def test_make_mesh_refuses_slices_of_unequal_size():
    uneven = stand_ins("gpu", processes=range(10), slices=[0] * 4 + [1] * 6)
    with refuses("equally many devices of each", "4, 6"):
        make_mesh("a=10", dcn="a=2", devices=uneven)


def test_describe_mesh_draws_several_slices():
    picture = describe_mesh(make_mesh("data=2,model=2", dcn="data", devices=GPUS_BY_SLICE))
    assert picture.splitlines() == [
        "data=2,model=2 on 4 NVIDIA H200 devices in 2 slices",
        "",
        "axis   size  network",
        "data      2  slow ×2",
        "model     2  fast ×2",
        "",
        "         model →",
        "        ┌─────┐",
        "data ↓  │ 0 1 │",
        "        ╞═════╡",
        "        │ 2 3 │",
        "        └─────┘",
    ]
    across = describe_mesh(make_mesh("model=4", dcn="model=2", devices=GPUS_BY_PROCESS))
    assert "in 2 processes" in across
    assert "slow ×2, fast ×2" in across
    assert across.splitlines()[-3:] == ["┌─────╥─────┐", "│ 0 1 ║ 2 3 │", "└─────╨─────┘"]


def test_describe_mesh_of_a_single_slice_names_no_network():
    for shape in ["data=8", "data=2,one=1,model=4"]:
        picture = describe_mesh(make_mesh(shape))
        assert picture.startswith(f"{shape} on 8 cpu devices\n")
        assert "network" not in picture
        assert "─" in picture
        assert not any(line != line.rstrip() for line in picture.splitlines())
    expected = "axis  size  devices|a        2  0 4|b        2  0 2|c        2  0 1"
    assert describe_mesh(make_mesh("a=2,b=2,c=2")).splitlines()[2:] == expected.split("|")


# TPUs that are not there


def slices_of(mesh):
    return np.vectorize(lambda device: device.slice_index, otypes=[int])(mesh.devices)


@pytest.mark.tpu_compiler
@pytest.mark.parametrize("topology", ["v5e:2x2", "v5e:4x4", "v6e:4x4", "v5p:2x2x4"])
@pytest.mark.parametrize(
    ("shape", "dcn", "slow"),
    [
        ("pod=2,data=-1,model=2", "pod", {"pod": 2}),
        ("data=-1,model=2", "data=2", {"data": 2}),
        ("model=2,data=-1", "data=2", {"data": 2}),
        ("data=-1,model=4", {"model": 2}, {"model": 2}),
    ],
)
def test_dcn_axes_are_the_only_axes_that_cross_tpu_slices(topology, shape, dcn, slow):
    mesh = make_mesh(shape, dcn=dcn, devices=devices_of(topology, num_slices=2))
    assert (
        mesh.devices.size == len(set(mesh.devices.flat)) == len(devices_of(topology, num_slices=2))
    )
    assert slow_axes(mesh) == tuple(slow)
    for axis, (name, size) in enumerate(mesh.shape.items()):
        lines = np.moveaxis(slices_of(mesh), axis, -1).reshape(-1, size)
        for line in lines:
            # Outer factor slow: a run of neighbours inside one slice, then the next slice.
            assert len(set(line)) == slow.get(name, 1)
            assert (
                len([k for k in range(1, size) if line[k] != line[k - 1]]) == slow.get(name, 1) - 1
            )


@pytest.mark.tpu_compiler
def test_make_mesh_requires_dcn_only_for_several_tpu_slices():
    with refuses("told by `dcn`", "2 slices", '`dcn="data=2"`'):
        make_mesh("data=8,model=4", devices=devices_of("v5e:4x4", num_slices=2))
    with refuses("number of slices, 1", "`data=2`", "Leave `dcn` out"):
        make_mesh("data=4,model=4", dcn="data=2", devices=devices_of("v5e:4x4"))
    assert slow_axes(make_mesh("data=8,model=8", devices=devices_of("v5p:4x4x4"))) == ()


SINGLE_SLICES = {
    "v5e:4x4": ("data=4,model=4", {}),
    "v5e:16x16": ("data=16,model=16", {}),
    "v6e:16x16": ("data=16,model=16", {}),
    "v5p:4x4x4": ("data=4,fsdp=4,model=4", {}),
    "v4:2x2x4": ("a=4,b=2,c=2", {"chip_config_name": "megacore"}),
}


@pytest.mark.tpu_compiler
@pytest.mark.parametrize("topology", SINGLE_SLICES)
def test_mesh_neighbours_are_neighbours_on_the_tpu_torus(topology):
    shape, options = SINGLE_SLICES[topology]
    devices = devices_of(topology, **options)
    mesh = make_mesh(shape, devices=devices)
    plan = mesh_utils.create_device_mesh(mesh.devices.shape, devices)
    assert (mesh.devices == plan).all()
    torus = np.array([device.coords for device in mesh.devices.flat]).reshape(
        *mesh.devices.shape, 3
    )
    for axis, size in enumerate(mesh.devices.shape):
        steps = np.diff(torus, axis=axis).reshape(-1, 3)
        assert (np.abs(steps).sum(axis=-1) == 1).all()
        assert len(set(map(tuple, steps))) == 1, f"axis {axis} of size {size} turns"


@pytest.mark.tpu_compiler
@pytest.mark.parametrize(
    ("topology", "shape"),
    [("v5e:4x4", "a=2,b=8"), ("v6e:16x16", "a=64,b=4"), ("v5p:4x4x4", "a=8,b=8")],
)
def test_mesh_axes_may_share_a_torus_dimension_unless_disallowed(topology, shape):
    mesh = make_mesh(shape, devices=devices_of(topology))
    plan = mesh_utils.create_device_mesh(
        mesh.devices.shape, devices_of(topology), allow_split_physical_axes=True
    )
    assert (mesh.devices == plan).all()
    with refuses(
        f"`{shape}`", "share a dimension of the torus", "`allow_split_physical_axes=True`"
    ):
        make_mesh(shape, devices=devices_of(topology), allow_split_physical_axes=False)


@pytest.mark.tpu_compiler
@pytest.mark.parametrize("shape", ["a=640,b=14", "a=14,b=640"])
def test_make_mesh_places_awkward_sizes_on_a_torus_or_refuses_them(shape):
    devices = devices_of("v5p:16x20x28")
    try:
        mesh = make_mesh(shape, devices=devices)
    except ValueError as error:
        assert re.search(f"`{shape}` out on 8960 TPU v5 devices.*Choose sizes", str(error))
    else:
        assert set(mesh.devices.flat) == set(devices)


@pytest.mark.tpu_compiler
def test_make_mesh_refuses_tpus_that_form_no_torus():
    with refuses(
        "`data=32`", "32 TPU v4 devices", "one device per chip", '`chip_config_name="megacore"`'
    ):
        make_mesh("data=-1", devices=devices_of("v4:2x2x4"))
    with refuses("`data=6`", "fill a box of the torus"):
        make_mesh("data=6", devices=devices_of("v5e:4x4")[:6])


@pytest.mark.tpu_compiler
def test_describe_mesh_of_tpus_shows_torus_and_slices():
    large = describe_mesh(make_mesh("data=8,model=32", devices=devices_of("v5e:16x16")))
    assert large.splitlines()[0] == "data=8,model=32 on 256 TPU v5 lite devices"
    assert [line.split()[:2] for line in large.splitlines()[3:]] == [["data", "8"], ["model", "32"]]
    assert "x×16 y×2" in large
    assert "…" in large
    assert "│" not in large
    hybrid = describe_mesh(
        make_mesh("data=4,model=2", dcn="data=2", devices=devices_of("v5e:2x2", num_slices=2))
    )
    assert "in 2 slices" in hybrid
    assert "slow ×2, fast ×2  x×2 y×2" in hybrid
    four = make_mesh(
        "data=4,model=4", dcn="data=2,model=2", devices=devices_of("v5e:2x2", num_slices=4)
    )
    assert slices_of(four)[::2, ::2].tolist() == [[0, 1], [2, 3]]
    assert slow_axes(four) == ("data", "model")
    assert describe_mesh(four).count("╬") == 1
