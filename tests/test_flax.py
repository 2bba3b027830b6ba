import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from jax.sharding import PartitionSpec as P

import shardlib as sl
from shardlib._flax import take_apart

RULES = sl.AxisRules(batch="data", embed=None, mlp="model", layers=None)
STRATEGY = sl.Strategy(mesh="data=2,model=4", rules=RULES)
LECUN = nnx.initializers.lecun_normal()


class Block(nnx.Module):
    def __init__(self, rngs, names=("embed", "mlp")):
        init = sl.logical(LECUN, *names) if names else LECUN
        self.linear = nnx.Linear(8, 8, kernel_init=init, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.dropout(self.linear(x))


@nnx.split_rngs(splits=3)
@nnx.vmap(in_axes=(0, None), out_axes=0, transform_metadata={nnx.PARTITION_NAME: "layers"})
def stacked(rngs, names):
    return Block(rngs, names)


def params_specs(make_model, strategy=STRATEGY, **kwargs):
    state = sl.init(make_model, optax.sgd(0.1), strategy, abstract=True, **kwargs)
    return sl.specs(state).params


def test_named_nnx_modules_build_with_and_without_a_mesh():
    assert Block(nnx.Rngs(0)).linear.kernel.out_sharding == ("embed", "mlp")
    assert params_specs(lambda: Block(nnx.Rngs(0)))["linear"] == {"kernel": P(None, "model"), "bias": P()}


def test_stacked_layers_keep_names_in_line():
    specs = params_specs(lambda: stacked(nnx.Rngs(0), ("embed", "mlp")))
    assert specs["linear"]["kernel"] == P(None, None, "model")


def test_stacking_without_naming_the_new_dim_is_an_error_that_says_how():
    unnamed = nnx.split_rngs(splits=3)(nnx.vmap(lambda rngs: Block(rngs), in_axes=0, out_axes=0))
    with pytest.raises(ValueError, match="`linear/kernel` of shape .3, 8, 8. has 3 dims and 2 names.*PARTITION_NAME"):
        params_specs(lambda: unnamed(nnx.Rngs(0)))


def test_models_that_already_carry_names_or_specs():
    with_flax = nnx.with_partitioning(LECUN, ("embed", "mlp"))
    literal = nnx.with_partitioning(LECUN, P("model", None))
    specs = params_specs(
        lambda: nnx.Sequential(
            nnx.Linear(8, 8, kernel_init=with_flax, rngs=nnx.Rngs(0)),
            nnx.Linear(8, 8, kernel_init=literal, rngs=nnx.Rngs(1)),
        )
    )
    assert specs["layers"][0]["kernel"] == P(None, "model")
    assert specs["layers"][1]["kernel"] == P("model", None)


def test_unknown_names_are_all_listed_with_their_parameters():
    rules = sl.AxisRules(batch="data")
    with pytest.raises(
        ValueError,
        match=r"`embed` on `a/w`, `b/w`; `mlp` on `a/w`\. The rules know `batch`\. Add rules, .*embed=None, mlp=None",
    ):
        params_specs(
            lambda: sl.annotate(
                {k: {"w": jnp.ones((4, 4))} for k in "ab"}, {"a/w": ("embed", "mlp"), "b/w": ("embed", None)}
            ),
            sl.Strategy(mesh="data=8", rules=rules),
        )


def test_annotate_names_what_cannot_be_edited():
    def make():
        model = nnx.MultiHeadAttention(num_heads=2, in_features=8, decode=False, rngs=nnx.Rngs(0))
        return sl.annotate(
            model, {r"(query|key|value)/kernel": ("embed", None, "mlp"), "out/kernel": (None, "mlp", "embed")}
        )

    specs = params_specs(make)
    assert specs["query"]["kernel"] == P(None, None, "model")
    assert specs["out"]["kernel"] == P(None, "model", None)
    assert make().query.kernel.out_sharding == ("embed", None, "mlp"), "outside `init` too"


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (
            {".*/kernle": ("embed", "mlp")},
            "pattern `.*/kernle` matches no parameter. The paths are: linear/bias, linear/kernel",
        ),
        ({"linear/kernel": ("embed",)}, "`linear/kernel` of shape .8, 8. has 2 dims and was given 1 names"),
        (
            {"linear/kernel": ("embed", "mlp"), "linear/k.*": ("mlp", "embed")},
            "`linear/kernel` is named .* by one pattern",
        ),
    ],
)
def test_patterns_that_match_nothing_disagree_or_do_not_fit_are_refused(names, message):
    with pytest.raises(ValueError, match=message):
        sl.annotate(Plain(), names)


class Plain(nnx.Module):
    def __init__(self):
        self.linear = nnx.Linear(8, 8, rngs=nnx.Rngs(0))


class LinenMLP(nn.Module):
    @nn.compact
    def __call__(self, x):
        init = nn.initializers.lecun_normal()
        x = nn.Dense(16, kernel_init=nn.with_logical_partitioning(init, ("embed", "mlp")), use_bias=False)(x)
        x = nn.BatchNorm(use_running_average=False, axis_name="data")(x)
        return nn.Dense(4, kernel_init=nn.with_partitioning(init, ("model", None)))(x)


def test_linen_boxes_give_their_names_and_batch_stats_are_not_parameters():
    parts, names = take_apart(jax.eval_shape(make_linen))
    assert names["params/Dense_0/kernel"] == ("embed", "mlp")
    assert names["params/Dense_1/kernel"] == P("model", None)
    assert parts.params["batch_stats"]["BatchNorm_0"]["mean"] is None
    assert parts.rest["batch_stats"]["BatchNorm_0"]["mean"].shape == (16,)
    specs = params_specs(make_linen)
    assert specs["params"]["Dense_0"]["kernel"] == P(None, "model")
    assert specs["params"]["Dense_1"]["kernel"] == P("model", None)


def make_linen():
    return LinenMLP().init(jax.random.key(0), jnp.ones((2, 8)))


def test_trainable_can_be_chosen():
    is_up = lambda path, leaf: path == "up"
    state = sl.init(lambda: {"up": jnp.ones(4), "down": jnp.ones(4)}, optax.sgd(0.1), STRATEGY, trainable=is_up)
    assert state.params["down"] is None
    assert state.rest["up"] is None
    assert state.model["down"].shape == (4,)
    kernels = sl.init(lambda: Plain(), optax.sgd(0.1), STRATEGY, trainable=nnx.PathContains("kernel"), abstract=True)
    assert list(kernels.params["linear"]) == ["kernel"]


def test_specs_of_a_model_serve_a_plain_jit():
    model = nnx.eval_shape(lambda: Block(nnx.Rngs(0)))
    specs = sl.specs(model, RULES, STRATEGY.device_mesh)
    assert specs == {"linear": {"kernel": P(None, "model"), "bias": P()}}
    with STRATEGY.scope():
        build = jax.jit(lambda: nnx.to_pure_dict(nnx.state(Block(nnx.Rngs(0)), nnx.Param)), out_shardings=specs)
        assert build()["linear"]["kernel"].sharding.spec == P(None, "model")
    with pytest.raises(ValueError, match="needs the rules and the mesh"):
        sl.specs(model)


def test_a_model_born_sharded_equals_one_born_whole():
    state = sl.init(lambda: stacked(nnx.Rngs(0), ("embed", "mlp")), optax.adam(1e-3), STRATEGY)
    whole = nnx.to_pure_dict(nnx.state(jax.jit(lambda: nnx.state(stacked(nnx.Rngs(0), ("embed", "mlp")), nnx.Param))()))
    np.testing.assert_array_equal(state.params["linear"]["kernel"], whole["linear"]["kernel"])
    kernel = state.params["linear"]["kernel"]
    assert {shard.data.shape for shard in kernel.addressable_shards} == {(3, 8, 2)}
    assert state.opt_state[0].mu["linear"]["kernel"].sharding == kernel.sharding


def test_policies_for_parameters():
    make = lambda: sl.annotate({"w": jnp.ones((8, 6))}, {"w": ("embed", "mlp")})
    with pytest.raises(ValueError, match="dim 1, `mlp`=6, of `w` of shape .8, 6.: `model`=4 does not divide 6"):
        params_specs(make)
    strategy = sl.Strategy(mesh="data=2,model=4", rules=RULES.indivisible(mlp="replicate"))
    with pytest.warns(sl.ShardingWarning, match="`mlp`=6, of `w`.*replicated"):
        state = sl.init(make, optax.sgd(0.1), strategy)
    assert "does not divide 6; replicated" in str(sl.describe(state))
    with pytest.raises(ValueError, match="`w` of shape .8, 6. is a stored parameter, and `pad` would.*shape .8, 8."):
        params_specs(make, sl.Strategy(mesh="data=2,model=4", rules=RULES.indivisible(mlp="pad")))


def test_describe_says_which_candidate_won():
    rules = sl.AxisRules(batch="data", heads=["model", "data", None])
    make = lambda: sl.annotate({"w": jnp.ones(6), "v": jnp.ones(5)}, {"[wv]": ("heads",)})
    description = sl.describe(sl.init(make, None, sl.Strategy(mesh="data=2,model=4", rules=rules)))
    remarks = {row.path: row.remark for row in description.rows}
    assert remarks["w"] == "`heads`: data (candidates: model, data, replicated)"
    assert remarks["v"] == "`heads`: replicated (candidates: model, data, replicated)"


def test_modules_inside_a_plain_tree_are_refused():
    linear = lambda: nnx.Linear(8, 8, rngs=nnx.Rngs(0))
    strategy = sl.Strategy(mesh="data=8", rules=sl.AxisRules(batch="data"))
    for make, where in ((lambda: {"l": linear()}, "`l`"), (lambda: [nnx.Param(jnp.ones(3))], "`0`")):
        with pytest.raises(ValueError, match=f"at {where}. Make it a module, `nnx.Dict"):
            sl.init(make, None, strategy)
    assert sl.init(lambda: nnx.Dict(l=linear()), None, strategy).params["l"]["kernel"].shape == (8, 8)


def test_attributes_that_cannot_be_part_of_a_definition_are_named():
    class Model(nnx.Module):
        def __init__(self, table):
            self.linear, self.table = nnx.Linear(8, 8, rngs=nnx.Rngs(0)), table()

    strategy = sl.Strategy(mesh="data=8", rules=sl.AxisRules(batch="data"))
    for table in (lambda: jnp.arange(8.0), lambda: [1, 2], lambda: {"a": 1}):
        with pytest.raises(ValueError, match="attribute `table` holds a .*nnx.data"):
            sl.init(lambda: Model(table), None, strategy)  # noqa: B023
    state = sl.init(lambda: Model(lambda: nnx.data(jnp.arange(8.0))), None, strategy)
    np.testing.assert_array_equal(state.rest["table"], np.arange(8.0))


def test_names_are_checked_where_they_are_given():
    with pytest.raises(ValueError, match="takes the names one by one"):
        sl.logical(nnx.initializers.ones, ("embed", "mlp"))
    with pytest.raises(ValueError, match="`w` has None"):
        sl.annotate({"w": jnp.ones(3)}, {"w": None})
    with pytest.raises(ValueError, match="Two leaves of the model are called `a/b`"):
        sl.specs({"a/b": jnp.ones(3), "a": {"b": jnp.ones(3)}}, sl.AxisRules(), sl.make_mesh("data=8"))


def test_optimizer_state_of_a_single_array_lies_as_the_array():
    strategy = sl.Strategy(mesh="data=2,model=4", rules=sl.AxisRules(batch="data", embed=None, mlp="model"))
    make = lambda: sl.annotate(jnp.ones((8, 4)), {"": ("embed", "mlp")})
    state = sl.init(make, optax.adam(0.1), strategy)
    assert state.opt_state[0].mu.sharding.spec == state.params.sharding.spec == P(None, "model")
