"""What the README and the docs tell a newcomer to run, as they would run it, in few steps."""

import dataclasses
import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

import shardlib as sl
from examples import quickstart
from examples.configs import tiny
from examples.export import _mesh_of_data
from examples.run import Muon
from examples.start import to_read

ROOT = Path(__file__).parent.parent
CONFIGS = {
    path.stem: importlib.import_module(f"examples.configs.{path.stem}")
    for path in (ROOT / "examples" / "configs").glob("[!_]*.py")
}


def shown_by(*command):
    """What an example prints, in a process of its own whose JAX has seen no device yet."""
    flags = os.environ["XLA_FLAGS"].replace("--xla_force_host_platform_device_count=8", "")
    environment = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": ""}
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.exhaustive
@pytest.mark.long
def test_quickstart_prints_mesh_parameters_falling_loss_and_a_sample(capsys):
    quickstart.main(steps=30)
    shown = capsys.readouterr().out
    assert "data=2,model=4 on 8 cpu devices" in shown
    assert re.search(
        r"blocks/mlp/up/kernel +2x256x64 +float32 +layers, mlp, embed +-, model, - +32.0 KiB", shown
    )
    losses = [float(loss) for loss in re.findall(r"loss (\d\.\d+) ", shown)]
    assert losses[0] > losses[2] + 1, "the loss falls"
    (here, there) = re.findall(r"    loss   (.*)   on ", shown)
    assert here == there
    assert re.search(r"A sample, after 30 steps:\s+def __init__\(self", shown)


@pytest.mark.long
def test_experts_example_compares_a_dense_model_and_draws_the_load(tmp_path):
    shown = shown_by(
        "examples/experts.py", "--steps", "10", "--picture", str(tmp_path / "load.svg")
    )
    assert re.search(
        r"The experts' loss is \d\.\d+ of the dense model's; \d+\.\d% of choices", shown
    )
    drawn = (tmp_path / "load.svg").read_text()
    assert all(f"expert {expert}, step 10" in drawn for expert in range(8))


@pytest.mark.long
def test_translate_example_prints_accuracy_and_sample_translations():
    shown = shown_by("examples/translate.py", "--steps", "10")
    assert (
        re.search(r"\d+ of 128 sentences it has never seen are right", shown)
        and shown.count(" -> ") == 5
    )


@pytest.mark.parametrize(
    "options",
    [{"combine_passes": True}, {"remat": "stage"}, {"remat": "full", "offload": "optimizer"}],
    ids=lambda options: next(iter(options)),
)
def test_what_a_pipeline_has_learned_is_read_without_a_pipeline(options):
    strategy = sl.Strategy(
        mesh="stage=2,data=4",
        rules=sl.rules.data | sl.rules.pipeline,
        pipeline=sl.pipeline.DualPipeV(2, 8),
        **options,
    )
    reads = to_read(dataclasses.replace(tiny.run(), strategy=strategy))
    assert (reads.pipeline, reads.combine_passes, reads.remat) == (None, False, "none")


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_what_any_run_here_has_learned_is_read_on_all_devices(name):
    run = CONFIGS[name].run()
    reads = to_read(run, _mesh_of_data(run.strategy.rules), is_split=True)
    assert (reads.device_mesh.size, reads.sharding.stage) == (8, 3)


def test_what_is_read_without_axes_of_data_is_not_split():
    strategy = sl.Strategy(mesh="model=8", rules=sl.rules.tensor)
    run = dataclasses.replace(tiny.run(), strategy=strategy)
    assert to_read(run, is_split=True).sharding.stage == 0


@pytest.mark.parametrize("stacked", [(2,), (2, 3)], ids=["kernel", "experts"])
def test_muon_moves_every_matrix_of_a_layer_by_a_nearly_orthogonal_one(stacked):
    shape = (*stacked, 16, 8)
    path = {"up": {"kernel": None}} if len(stacked) == 1 else {"mlp": {"up": None}}
    is_none = lambda leaf: leaf is None
    draw = lambda seed: jax.tree.map(
        lambda _: jax.random.normal(jax.random.key(seed), shape), path, is_leaf=is_none
    )
    params, gradient = draw(0), draw(1)
    optimizer = Muon(warmup=1, weight_decay=0.0).make(100)
    state = optimizer.init(params)
    for _ in range(2):  # the first has a rate of zero
        updates, state = optimizer.update(gradient, state, params)
    (moved,) = jax.tree.leaves(updates)
    for matrix in np.asarray(moved).reshape(-1, 16, 8):
        singular = np.linalg.svd(matrix, compute_uv=False)
        assert singular[0] < 2 * singular[-1]
    drawn = np.asarray(jax.tree.leaves(gradient)[0]).reshape(-1, 16, 8)
    assert np.linalg.cond(drawn[0]) > 2
