"""Targets, machines by name: which names are valid, and what their devices are."""

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

import shardlib as sl
from shardlib.machine._chips import CHIPS
from shardlib.machine._mesh import slow_axes
from shardlib.machine._targets import _require, quietly

TPUS = [
    ("tpu:v3:2x2", 8), ("tpu:v3:32x32", 2048), ("tpu:v4:2x2x2", 8), ("tpu:v5e:1x1", 1),
    ("tpu:v5e:16x16", 256),
    ("tpu:v5p:4x4x8", 128), ("tpu:v5p:16x20x28", 8960), ("tpu:v6e:2x4", 8), ("tpu:7x:2x2x1", 8),
    ("tpu:v5e:4x4:slices=4", 64),
]  # fmt: skip
GPUS = [
    *(f"gpu:{name}:1x1x8" for name in ("a100", "h100", "h200", "b200")),
    *("gpu:h200:64x1x8", "gpu:b200:2x18x4"),
]


@pytest.mark.tpu_compiler
@pytest.mark.parametrize("text, size", TPUS)
def test_tpu_targets_list_the_right_devices(text, size):
    target = sl.Target(text)
    assert target.size == size == len(target.devices)
    assert {device.device_kind for device in target.devices} == {target.chip.kind}
    assert target.mesh("data=-1", dcn="data=4" if target.slices > 1 else "").devices.size == size


@pytest.mark.gpu_compiler
@pytest.mark.parametrize("text", GPUS)
def test_gpu_targets_list_the_right_devices(text):
    target = sl.Target(text)
    assert target.size == len(target.devices)
    assert target.devices[0].device_kind == target.chip.kind
    if target.slices > 1:
        mesh = target.mesh(f"data={target.slices},model=-1", dcn="data")
        assert slow_axes(mesh) == ("data",)
        with pytest.raises(ValueError, match="dcn"):
            target.mesh("data=-1")


@pytest.mark.parametrize(
    "text, message",
    [
        ("tpu:v5x:4x4", "no target.*`tpu:v5e:4x4`"),
        ("v5e:4x4", "no target.*`tpu:v5e:4x4`"),
        ("gpu:h300:1x1x8", "`gpu:h200:1x1x8`"),
        ("gpu:H100:1x1x8", "`gpu:h100:1x1x8`"),
        ("tpu:v5e", "no target"),
        ("cpu", "`cpu:8`"),
        ("cpu:0", "`cpu:8`"),
        (8, r"`Target\(text=8\)` takes the name of a machine"),
        ("tpu:v5e:4x4x4", "v5e has 2 dims"),
        ("tpu:v5e:16x32", "at most 256 chips.*slices=2"),
        ("tpu:v5e:3x5", "multiple of 4"),
        ("tpu:v5e:4x4:4", "slices=4"),
        ("gpu:h200:8", "slices x hosts x GPUs"),
        ("gpu:h200:1x8x8", "what NVLink joins.*`gpu:h200:8x1x8`"),
        ("gpu:h200:1x1x16", "what NVLink joins"),
        ("gpu:b200:1x36x4", "72 B200s"),
        ("tpu:v5p-64", "TensorCores .* 32 chips, `tpu:v5p:2x4x4`. .* 64 chips, `tpu:v5p:4x4x4`"),
        ("v5p-8", "4 chips, `tpu:v5p:2x2x1`. .* 8 chips, `tpu:v5p:2x2x2`"),
        ("tpu:v4-4096", "2,048 chips, `tpu:v4:8x16x16`"),
        ("v3-32", "16 chips, `tpu:v3:4x4`. .* 32 chips, `tpu:v3:4x8`"),
        ("tpu7x-16", "8 chips, `tpu:7x:2x2x2`. .* 16 chips, `tpu:7x:2x2x4`"),
        ("V7X-9", "no slice, since a chip has 2. .* 9 chips, of which there is no slice of 7x"),
        ("tpu:v5litepod-16", "count chips: 16 chips, `tpu:v5e:4x4`"),
        ("v5e-8", "count chips: 8 chips, `tpu:v5e:2x4`"),
        ("v6e-1", "count chips: 1 chip, `tpu:v6e:1x1`"),
        ("v6e-512", "512 chips, of which there is no slice of v6e"),
        # Sizes that nobody has are refused before anything is counted or listed.
        ("cpu:5000", "from 1 to 4,096 devices"),
        ("cpu:" + "9" * 5000, "from 1 to 4,096 devices"),
        ("tpu:v5e:" + "4" * 5000, "no target"),
        ("tpu:v5e:4x" + "4" * 31, "no target"),
        ("tpu:v5e:4x4:slices=" + "9" * 31, "at most 131,072 devices"),
        ("tpu:v5e:16x16:slices=1000", "256,000 devices; a target has at most 131,072"),
        ("gpu:h200:100000x1x8", "800,000 devices; a target has at most 131,072"),
        ("v5p-" + "9" * 5000, "no target"),
    ],
)
def test_target_names_that_are_invalid_are_refused(text, message):
    with pytest.raises(ValueError, match=message) as refused:
        sl.Target(text)
    assert len(str(refused.value)) < 700


def test_target_mesh_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match=r"`data=2,model=2` is 4 devices, and `cpu:8` has 8"):
        sl.Target("cpu:8").mesh("data=2,model=2")
    with pytest.raises(
        ValueError, match=r"`cpu:4096` needs 4096 simulated devices.*simulate_devices\(4096\)"
    ):
        sl.Target("cpu:4096").mesh("data=-1")


@pytest.mark.parametrize(
    "size, said", [(10**30, "has 31 digits"), ("9" * 5000, "has 5,000 digits")]
)
def test_target_mesh_of_absurd_size_is_refused(size, said):
    with pytest.raises(ValueError, match=said) as refused:
        sl.Target("cpu:8").mesh(f"data={size}")
    assert len(str(refused.value)) < 400
    with pytest.raises(ValueError, match=said):
        sl.make_mesh(f"data={size}")


def test_targets_compare_hash_and_print():
    assert sl.Target("cpu:8") == sl.Target("cpu:8") and hash(sl.Target("cpu:8")) == hash(
        sl.Target("cpu:8")
    )
    assert str(sl.Target("tpu:v5e:4x4")) == "tpu:v5e:4x4"


@pytest.mark.parametrize("name", CHIPS)
def test_chip_datasheets_are_plausible(name):
    chip = CHIPS[name]
    if name != "cpu":
        assert (
            1e13 < chip.flops["bf16"] < 1e16
            and 1e9 < chip.slow_bandwidth < chip.link_bandwidth < 1e12
        )
        assert (
            0.7 * chip.hbm_bytes < chip.usable_bytes < chip.hbm_bytes < 2**38
            and chip.hbm_bandwidth < 1e13
        )
        assert chip.flops["f32"] <= chip.flops["bf16"] <= max(chip.flops.values())
        assert math.isfinite(chip.hbm_bandwidth)


def test_target_compiler_that_is_missing_is_named_with_its_pip_extra(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for text, extra in (("tpu:v5e:4x4", "tpu-plan"), ("gpu:h200:1x1x8", "gpu-plan")):
        with pytest.raises(ModuleNotFoundError, match=rf'pip install "shardlib\[{extra}\]"'):
            _require(sl.Target(text))


@pytest.mark.representative("tpu:v5e:2x2")
@pytest.mark.tpu_compiler
@pytest.mark.parametrize("text", ["tpu:v5e:2x2", "cpu:1"])
def test_target_in_a_planning_script_prints_no_compiler_noise(text, tmp_path):
    """Nobody has told JAX to use the CPU: it looks for TPUs, and libtpu says at length that there
    are none.
    """
    script = tmp_path / "script.py"
    script.write_text(
        f"import jax, jax.numpy as jnp, optax, shardlib as sl\ntarget = sl.Target({text!r})\n"
        "strategy = sl.Strategy(mesh=target.mesh('data=-1'), rules=sl.rules.data)\nstate = "
        "sl.init(lambda: {'w': jnp.zeros((8, 8))}, optax.sgd(0.1), strategy, abstract=True)\nstep "
        "= sl.train_step(lambda model, x, rng: jnp.mean((x @ model['w']) ** 2), strategy)\n"
        "print(sl.plan(step, state, jax.ShapeDtypeStruct((8, 8), 'float32'), target).fits)\n"
    )
    bare = {
        key: value for key, value in os.environ.items() if not key.startswith(("JAX", "XLA", "TPU"))
    }
    environment = {**bare, "PYTHONPATH": str(Path(__file__).parent.parent)}
    result = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, env=environment, check=False
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, "True\n", "")


def test_quietly_captures_compiler_output_and_restores_the_environment(capfd, monkeypatch):
    monkeypatch.delenv("TPU_LOG_DIR")
    before = dict(os.environ)
    with quietly() as noise:
        os.write(2, b"noise of a compiler\n")
        assert os.environ["TPU_LOG_DIR"] == "disabled"
        assert noise.read_text() == "noise of a compiler\n"
    assert dict(os.environ) == before and not noise.exists()
    print("seen", file=sys.stderr)
    assert capfd.readouterr().err == "seen\n"
