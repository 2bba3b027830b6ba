"""Options that a step sets for the compiler of its devices, and what becomes of programs by them."""

import collections
import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import shardlib as sl
from models import gpt
from shardlib.step import _compiler_options
from shardlib.step._compiler_options import compiler_options

CONFIG = gpt.GPTConfig(
    layers=3, width=512, heads=4, context=256, vocab=512, norm="rms", mlp="swiglu", tied=False,
    bias=False,
)  # fmt: skip
PREFIX = "xla_tpu_enable_sparse_core_collective_offload"


def strategy_on(target, **options):
    options = {"zero": 3, "remat": "full", "precision": "bf16"} | options
    mesh = sl.Target(target).mesh("data=8")
    return sl.Strategy(mesh=mesh, rules=sl.rules.data, **options)


def step_of(strategy, config=CONFIG):
    """The step of a small decoder, and what it takes."""
    state = sl.init(
        lambda: gpt.GPT(config, rngs=nnx.Rngs(0)), optax.adam(1e-3), strategy, abstract=True
    )
    examples = strategy.device_mesh.size
    batch = {"tokens": jax.ShapeDtypeStruct((examples, config.context + 1), "int32")}
    return sl.train_step(gpt.loss, strategy), state, batch


def hidden_shares(strategy):
    """By kind of collective: of the bytes sent in loops, the share that is sent beside products."""
    step, state, batch = step_of(strategy)
    compiled = step.lower(state, batch).compile()
    sent, hidden = collections.Counter(), collections.Counter()
    for one in sl.testing.collectives(compiled, strategy.device_mesh):
        if one.times > 1:
            sent[one.kind] += one.total_bytes
            hidden[one.kind] += one.total_bytes * one.overlapped
    return {kind: hidden[kind] / sent[kind] for kind in sent}


@pytest.mark.representative("tpu:v6e:2x4")
@pytest.mark.tpu_compiler
@pytest.mark.parametrize("target", ["tpu:v5p:2x2x2", "tpu:v6e:2x4"])
def test_compiler_options_overlap_collectives_by_sparse_cores(target):
    strategy = strategy_on(target)
    assert set(compiler_options(strategy).known) == {
        f"{PREFIX}_reduce_scatter",
        f"{PREFIX}_all_gather",
        f"{PREFIX}_2d_all_gather",
        f"{PREFIX}_3d_all_gather",
    }
    # What a layer begins with has nothing beside it, which in a small layer is much.
    shares = hidden_shares(strategy)
    assert shares["reduce-scatter"] > 0.4
    assert shares["all-gather"] > 0.4


@pytest.mark.tpu_compiler
def test_compiler_options_are_empty_without_hide_collectives():
    strategy = strategy_on("tpu:v5p:2x2x2", hide_collectives=False)
    assert compiler_options(strategy).known == {}
    assert hidden_shares(strategy)["reduce-scatter"] == 0


@pytest.mark.tpu_compiler
@pytest.mark.parametrize("target", ["tpu:v5e:2x4", "tpu:v4:2x2x2", "cpu:8"])
def test_compiler_options_are_empty_on_devices_without_sparse_cores(target):
    assert compiler_options(strategy_on(target)).known == {}


@pytest.mark.tpu_compiler
def test_compiler_options_that_are_unknown_are_left_out_with_a_remark(monkeypatch):
    monkeypatch.setattr(_compiler_options, "_BY_SPARSE_CORES", ("reduce_scatter", "everything"))
    thin = dataclasses.replace(CONFIG, width=128, heads=2)
    step, state, batch = step_of(strategy_on("tpu:v5p:2x2x2", zero=sl.Zero(3, small=0)), thin)
    plan = sl.plan(step, state, batch)
    assert plan.remarks[0] == (
        f"This compiler does not know the option `{PREFIX}_everything`, which is left out."
    )
    report = str(plan)
    assert f"{PREFIX}_everything" in report
    # The report tells how much is waited for, and gathers, which are not asked for, are.
    in_layers = [one for one in plan.collectives if one.times > 1]
    assert not any(one.asynchronous for one in in_layers if one.kind == "all-gather")
    shares = re.findall(r"(?m)^  (\d+)% (of it under way|waited for|started early)", report)
    assert [words for _, words in shares][:2] == ["of it under way", "waited for"], report
    assert sum(int(share) for share, _ in shares) in (99, 100, 101)


@pytest.mark.tpu_compiler
@pytest.mark.parametrize("variable", ["LIBTPU_INIT_ARGS", "XLA_FLAGS"])
def test_compiler_options_set_by_the_user_are_not_overridden(monkeypatch, variable):
    monkeypatch.setenv(variable, f"--some=1 --{PREFIX}_all_gather=false")
    known = compiler_options(strategy_on("tpu:v5p:2x2x2")).known
    assert f"{PREFIX}_all_gather" not in known
    assert f"{PREFIX}_2d_all_gather" in known


@pytest.mark.gpu_compiler
def test_compiler_options_on_gpu_keep_exchange_buckets_separate(monkeypatch):
    strategy = strategy_on("gpu:h200:1x1x8", zero=2, exchange=sl.Exact(bucket_bytes=2**20))
    names = [f"xla_gpu_{kind}_combine_threshold_bytes" for kind in ("all_reduce", "reduce_scatter")]
    assert compiler_options(strategy).known == dict(zip(names, [2**20, 2**17], strict=True))
    monkeypatch.setenv("XLA_FLAGS", f"--{names[0]}=1")
    assert compiler_options(strategy).known == {names[1]: 2**17}


@pytest.mark.parametrize("value", [1, "yes", None])
def test_hide_collectives_option_takes_only_true_or_false(value):
    with pytest.raises(ValueError, match=r"Strategy\(hide_collectives=.*True or False"):
        sl.Strategy(mesh="data=1", rules=sl.rules.data, hide_collectives=value)


def test_hide_collectives_option_does_not_change_the_loss_on_cpu():
    losses = []
    for hide in (True, np.False_):
        strategy = sl.Strategy(mesh="data=8", rules=sl.rules.data, hide_collectives=hide)
        state = sl.init(lambda: {"w": jnp.ones((8, 8))}, optax.sgd(0.1), strategy)
        step = sl.train_step(lambda model, x, rng: jnp.mean((x @ model["w"]) ** 2), strategy)
        _, metrics = step(state, jnp.ones((8, 8)))
        losses.append(metrics["loss"].item())
    assert losses[0] == losses[1]
    assert hash(strategy)
