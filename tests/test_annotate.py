import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import shardlib as sl
from shardlib import testing

RULES = sl.AxisRules(batch="data", embed=None, act_mlp="model", heads="model")
MESH = sl.make_mesh("data=2,model=4")
EXPLICIT = sl.make_mesh("data=2,model=4", axis_type=AxisType.Explicit)
X = np.arange(8 * 16, dtype=np.float32).reshape(8, 16)


def test_shard_sets_the_layout_and_keeps_values_under_jit_and_eagerly():
    with sl.use(RULES, MESH):
        for run in (jax.jit, lambda f: f):
            y = run(lambda x: sl.shard(x, "batch", "act_mlp"))(X)
            assert y.sharding.spec == P("data", "model")
            np.testing.assert_array_equal(y, X)


def test_shard_and_replicate_reshard_on_explicit_axes():
    with sl.use(RULES, EXPLICIT):
        y = jax.jit(lambda x: sl.shard(x, "batch", "act_mlp"))(X)
        assert jax.typeof(y).sharding.spec == P("data", "model")
        assert sl.replicate(y).sharding.spec == P(None, None)
        np.testing.assert_array_equal(y, X)


def test_shard_lays_out_explicit_and_automatic_axes_together():
    mesh = jax.sharding.Mesh(
        MESH.devices, ("data", "model"), axis_types=(AxisType.Explicit, AxisType.Auto)
    )
    with sl.use(RULES, mesh):
        y = jax.jit(lambda x: sl.shard(x, "batch", "act_mlp"))(X)
        assert y.sharding.spec == P("data", "model")


def test_split_and_replicate_follow_gshard_semantics():
    with sl.use(RULES, MESH):
        assert sl.split(X, 1, 4).sharding.spec == P(None, "model")
        assert sl.split(X, -2, 8).sharding.spec == P(("data", "model"), None)
        assert sl.split(X, 0, 1).sharding.is_fully_replicated
        assert sl.replicate(sl.split(X, 1, 4)).sharding.is_fully_replicated
        with pytest.raises(ValueError, match="no axis has 3 devices.*`data=2`, `model=4`"):
            sl.split(X, 0, 3)
        with pytest.raises(ValueError, match="which has 2 dims"):
            sl.split(X, 2, 4)
        with pytest.raises(ValueError, match="that is 2 devices"):
            sl.split(X, 0, 4, axis="data")
    with sl.use(RULES, sl.make_mesh("data=2,model=2", devices=jax.devices()[:4])):
        with pytest.raises(ValueError, match="several axes have 2 devices"):
            sl.split(X, 0, 2)
        assert sl.split(X, 0, 2, axis="model").sharding.spec == P("model", None)


def test_shard_in_a_manual_region_drops_the_batch_axis_and_refuses_others():
    seen = []

    def body(x):
        y = sl.shard(x, "batch", "act_mlp")
        seen.append(x.shape)
        return y

    with sl.use(RULES | sl.AxisRules(experts="data"), MESH):
        manual = jax.shard_map(
            body, in_specs=P("data"), out_specs=P("data"), axis_names={"data"}, check_vma=False
        )
        y = jax.jit(manual)(X)
        assert (y.sharding.spec, seen[0]) == (P("data", "model"), (4, 16))
        np.testing.assert_array_equal(y, X)

        def lose(x):
            return sl.shard(x, "experts", None)

        with pytest.raises(ValueError, match="`experts`=4.*axis `data`, which is manual here"):
            jax.jit(
                jax.shard_map(
                    lose,
                    in_specs=P("data"),
                    out_specs=P("data"),
                    axis_names={"data"},
                    check_vma=False,
                )
            )(X)
        with pytest.raises(ValueError, match="names the axis `data`"):
            jax.jit(
                jax.shard_map(
                    lambda x: sl.split(x, 0, 2, axis="data"),
                    in_specs=P("data"),
                    out_specs=P("data"),
                    axis_names={"data"},
                    check_vma=False,
                )
            )(X)


def test_annotations_without_rules_are_refused_unless_unsharded():
    for verb in (
        lambda: sl.shard(X, "batch", None),
        lambda: sl.split(X, 0, 2),
        lambda: sl.replicate(X),
    ):
        with pytest.raises(ValueError, match="outside any rules.*sl.unsharded"):
            verb()
    with sl.unsharded():
        assert sl.shard(X, "anything", "goes") is X
        assert sl.split(X, 0, 2) is X
        assert sl.replicate(X) is X
        with pytest.raises(ValueError, match="was given 1 names"):
            sl.shard(X, "batch")
    with sl.use(RULES), pytest.raises(ValueError, match="no mesh in scope"):
        sl.shard(X, "batch", None)


def test_rules_are_part_of_the_jit_cache_key():
    f = testing.count_traces(lambda x: sl.shard(x, "batch", "act_mlp"))
    jitted = jax.jit(f)
    with sl.use(RULES, MESH):
        assert jitted(X).sharding.spec == P("data", "model")
        assert jitted(X).sharding.spec == P("data", "model")
    assert f.count == 1
    with sl.use(RULES | sl.AxisRules(act_mlp=None), MESH):
        assert jitted(X).sharding.spec in (P("data", None), P("data"))
    assert f.count == 2
    with sl.use(sl.AxisRules(batch="data", embed=None, act_mlp="model", heads="model"), MESH):
        jitted(X)
    assert f.count == 2, "equal rules are the same key"
    with sl.unsharded():
        jitted(X)
    assert f.count == 3


def test_remat_is_part_of_the_jit_cache_key_and_changes_the_program():
    def f(x):
        return jax.grad(lambda x: jnp.sum(sl.remat(lambda x: jnp.sin(jnp.sin(x)))(x)))(x)

    def checkpoints(remat):
        with sl.use(RULES, MESH, remat=remat):
            return str(jax.make_jaxpr(f)(X)).count("remat")

    assert checkpoints("none") == 0
    assert checkpoints("full") == 1
    with pytest.raises(ValueError, match="remat.policy='half'.. takes one of 'none', 'full'"):
        sl.remat(jnp.sin, "half")


def test_indivisible_policies_replicate_or_pad_with_a_warning():
    with (
        sl.use(RULES.indivisible(act_mlp="replicate"), MESH),
        pytest.warns(sl.ShardingWarning, match="`act_mlp`=6.*replicated"),
    ):
        assert sl.shard(jnp.zeros((8, 6)), "batch", "act_mlp").sharding.spec == P("data", None)
    with (
        sl.use(RULES.indivisible(act_mlp="pad"), MESH),
        pytest.warns(sl.ShardingWarning, match="padded to 8"),
    ):
        x = np.arange(48.0, dtype=np.float32).reshape(8, 6)
        padded, gradient = jax.jit(
            jax.value_and_grad(lambda x: jnp.sum(sl.shard(x, "batch", "act_mlp") ** 2))
        )(x)
        np.testing.assert_allclose(gradient, 2 * x)
        np.testing.assert_allclose(padded, np.sum(x**2), rtol=1e-6)


def test_annotations_work_under_vmap_grad_and_scan():
    def f(x):
        rows = jax.vmap(lambda row: sl.shard(row, "act_mlp"))(x)
        return jax.lax.scan(
            lambda c, _: (sl.shard(jnp.sin(c), "batch", "act_mlp"), None), rows, length=3
        )[0].sum()

    with sl.use(RULES, MESH):
        found = jax.jit(jax.grad(f))(X)
    with sl.unsharded():
        np.testing.assert_allclose(found, jax.jit(jax.grad(f))(X), rtol=1e-6)


def test_nested_use_switches_to_another_mesh_of_the_same_shape():
    rules = sl.AxisRules(batch="data")
    first, second = (
        sl.make_mesh("data=4", devices=devices)
        for devices in (jax.devices()[:4], jax.devices()[4:])
    )
    with sl.use(rules, first), sl.use(rules, second):
        assert sl.shard(np.ones(8, "f"), "batch").sharding.mesh == second
