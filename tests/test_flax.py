import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from jax.sharding import PartitionSpec as P

import shardlib as sl
from shardlib.modeling._flax import take_apart

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


def test_nnx_modules_with_names_build_with_and_without_a_mesh():
    assert Block(nnx.Rngs(0)).linear.kernel.out_sharding == ("embed", "mlp")
    assert params_specs(lambda: Block(nnx.Rngs(0)))["linear"] == {
        "kernel": P(None, "model"),
        "bias": P(),
    }


def test_nnx_stacked_layers_keep_names_aligned_with_dims():
    specs = params_specs(lambda: stacked(nnx.Rngs(0), ("embed", "mlp")))
    assert specs["linear"]["kernel"] == P(None, None, "model")


def test_nnx_stacking_without_a_name_for_the_new_dim_is_refused():
    unnamed = nnx.split_rngs(splits=3)(nnx.vmap(lambda rngs: Block(rngs), in_axes=0, out_axes=0))
    with pytest.raises(
        ValueError,
        match="`linear/kernel` of shape .3, 8, 8. has 3 dims and 2 names.*PARTITION_NAME",
    ):
        params_specs(lambda: unnamed(nnx.Rngs(0)))


def test_nnx_partitioning_names_and_specs_are_respected():
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


def test_dim_names_without_rules_are_all_listed_with_their_parameters():
    rules = sl.AxisRules(batch="data")
    with pytest.raises(
        ValueError,
        match=r"`embed` on `a/w`, `b/w`; `mlp` on `a/w`\. The rules know `batch`\. Add rules, .*embed=None, mlp=None",
    ):
        params_specs(
            lambda: sl.annotate(
                {k: {"w": jnp.ones((4, 4))} for k in "ab"},
                {"a/w": ("embed", "mlp"), "b/w": ("embed", None)},
            ),
            sl.Strategy(mesh="data=8", rules=rules),
        )


def test_annotate_adds_names_to_library_modules():
    def make():
        model = nnx.MultiHeadAttention(num_heads=2, in_features=8, decode=False, rngs=nnx.Rngs(0))
        return sl.annotate(
            model,
            {
                r"(query|key|value)/kernel": ("embed", None, "mlp"),
                "out/kernel": (None, "mlp", "embed"),
            },
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
        (
            {"linear/kernel": ("embed",)},
            "`linear/kernel` of shape .8, 8. has 2 dims and was given 1 names",
        ),
        (
            {"linear/kernel": ("embed", "mlp"), "linear/k.*": ("mlp", "embed")},
            "`linear/kernel` is named .* by one pattern",
        ),
    ],
)
def test_annotate_refuses_patterns_that_match_nothing_conflict_or_misfit(names, message):
    with pytest.raises(ValueError, match=message):
        sl.annotate(Plain(), names)


class Plain(nnx.Module):
    def __init__(self):
        self.linear = nnx.Linear(8, 8, rngs=nnx.Rngs(0))


class LinenMLP(nn.Module):
    @nn.compact
    def __call__(self, x):
        init = nn.initializers.lecun_normal()
        x = nn.Dense(
            16, kernel_init=nn.with_logical_partitioning(init, ("embed", "mlp")), use_bias=False
        )(x)
        x = nn.BatchNorm(use_running_average=False, axis_name="data")(x)
        return nn.Dense(4, kernel_init=nn.with_partitioning(init, ("model", None)))(x)


def test_linen_boxes_give_names_and_batch_stats_are_not_parameters():
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


def test_trainable_parameters_can_be_chosen():
    is_up = lambda path, leaf: path == "up"
    state = sl.init(
        lambda: {"up": jnp.ones(4), "down": jnp.ones(4)}, optax.sgd(0.1), STRATEGY, trainable=is_up
    )
    assert state.params["down"] is None
    assert state.rest["up"] is None
    assert state.model["down"].shape == (4,)
    kernels = sl.init(
        lambda: Plain(),
        optax.sgd(0.1),
        STRATEGY,
        trainable=nnx.PathContains("kernel"),
        abstract=True,
    )
    assert list(kernels.params["linear"]) == ["kernel"]


def test_specs_of_a_model_work_with_plain_jit():
    model = nnx.eval_shape(lambda: Block(nnx.Rngs(0)))
    specs = sl.specs(model, RULES, STRATEGY.device_mesh)
    assert specs == {"linear": {"kernel": P(None, "model"), "bias": P()}}
    with STRATEGY.scope():
        build = jax.jit(
            lambda: nnx.to_pure_dict(nnx.state(Block(nnx.Rngs(0)), nnx.Param)), out_shardings=specs
        )
        assert build()["linear"]["kernel"].sharding.spec == P(None, "model")
    with pytest.raises(ValueError, match="needs the rules and the mesh"):
        sl.specs(model)


def test_init_of_a_sharded_model_equals_the_unsharded_model():
    state = sl.init(lambda: stacked(nnx.Rngs(0), ("embed", "mlp")), optax.adam(1e-3), STRATEGY)
    whole = nnx.to_pure_dict(
        nnx.state(jax.jit(lambda: nnx.state(stacked(nnx.Rngs(0), ("embed", "mlp")), nnx.Param))())
    )
    np.testing.assert_array_equal(state.params["linear"]["kernel"], whole["linear"]["kernel"])
    kernel = state.params["linear"]["kernel"]
    assert {shard.data.shape for shard in kernel.addressable_shards} == {(3, 8, 2)}
    assert state.opt_state[0].mu["linear"]["kernel"].sharding == kernel.sharding


def test_indivisible_parameters_are_refused_or_replicated_never_padded():
    make = lambda: sl.annotate({"w": jnp.ones((8, 6))}, {"w": ("embed", "mlp")})
    with pytest.raises(
        ValueError, match="dim 1, `mlp`=6, of `w` of shape .8, 6.: `model=4` does not divide 6"
    ):
        params_specs(make)
    strategy = sl.Strategy(mesh="data=2,model=4", rules=RULES.indivisible(mlp="replicate"))
    with pytest.warns(sl.ShardingWarning, match="`mlp`=6, of `w`.*replicated"):
        state = sl.init(make, optax.sgd(0.1), strategy)
    assert "does not divide 6; replicated" in str(sl.describe(state))
    with pytest.raises(
        ValueError, match="`w` of shape .8, 6. is a stored parameter, and `pad` would.*shape .8, 8."
    ):
        params_specs(make, sl.Strategy(mesh="data=2,model=4", rules=RULES.indivisible(mlp="pad")))


def test_describe_says_which_rule_candidate_was_chosen():
    rules = sl.AxisRules(batch="data", heads=["model", "data", None])
    make = lambda: sl.annotate({"w": jnp.ones(6), "v": jnp.ones(5)}, {"[wv]": ("heads",)})
    description = sl.describe(sl.init(make, None, sl.Strategy(mesh="data=2,model=4", rules=rules)))
    remarks = {row.path: row.remark for row in description.rows}
    assert remarks["w"] == "`heads`: data (candidates: model, data, replicated)"
    assert remarks["v"] == "`heads`: replicated (candidates: model, data, replicated)"


def test_init_refuses_modules_inside_a_plain_tree():
    linear = lambda: nnx.Linear(8, 8, rngs=nnx.Rngs(0))
    strategy = sl.Strategy(mesh="data=8", rules=sl.AxisRules(batch="data"))
    for make, where in (
        (lambda: {"l": linear()}, "`l`"),
        (lambda: [nnx.Param(jnp.ones(3))], "`0`"),
    ):
        with pytest.raises(ValueError, match=f"at {where}. Make it a module, `nnx.Dict"):
            sl.init(make, None, strategy)
    assert sl.init(lambda: nnx.Dict(l=linear()), None, strategy).params["l"]["kernel"].shape == (
        8,
        8,
    )


def test_init_names_module_attributes_that_must_be_nnx_data():
    class Model(nnx.Module):
        def __init__(self, table):
            self.linear, self.table = nnx.Linear(8, 8, rngs=nnx.Rngs(0)), table()

    strategy = sl.Strategy(mesh="data=8", rules=sl.AxisRules(batch="data"))
    for table in (lambda: jnp.arange(8.0), lambda: [1, 2], lambda: {"a": 1}):
        with pytest.raises(ValueError, match="attribute `table` holds a .*nnx.data"):
            sl.init(lambda: Model(table), None, strategy)  # noqa: B023
    state = sl.init(lambda: Model(lambda: nnx.data(jnp.arange(8.0))), None, strategy)
    np.testing.assert_array_equal(state.rest["table"], np.arange(8.0))


def test_dim_names_are_checked_where_they_are_given():
    with pytest.raises(ValueError, match="takes the names one by one"):
        sl.logical(nnx.initializers.ones, ("embed", "mlp"))
    with pytest.raises(ValueError, match="`w` has None"):
        sl.annotate({"w": jnp.ones(3)}, {"w": None})
    within = {"a": jnp.ones(2), "a/b/c": jnp.ones(2)}
    with pytest.raises(ValueError, match="`a/b/c` of the model seems to be within the leaf `a`"):
        sl.specs(within, sl.AxisRules(), sl.make_mesh("data=8"))
    with pytest.raises(ValueError, match="Two leaves of the model are called `a/b`"):
        sl.specs(
            {"a/b": jnp.ones(3), "a": {"b": jnp.ones(3)}}, sl.AxisRules(), sl.make_mesh("data=8")
        )


def test_optimizer_state_of_a_single_array_is_sharded_like_the_array():
    strategy = sl.Strategy(
        mesh="data=2,model=4", rules=sl.AxisRules(batch="data", embed=None, mlp="model")
    )
    make = lambda: sl.annotate(jnp.ones((8, 4)), {"": ("embed", "mlp")})
    state = sl.init(make, optax.adam(0.1), strategy)
    assert state.opt_state[0].mu.sharding.spec == state.params.sharding.spec == P(None, "model")


# Names fewer than dims, which Flax's attention and `DenseGeneral` have by their own nature:
# google/flax#3892, google/flax#3676.


ATTENTION = sl.AxisRules(batch="data", embed="model", kv=None, layers=None, heads=None)
ON_TWO = sl.Strategy(mesh="data=4,model=2", rules=ATTENTION)


def linen_attention(names):
    kernel_init = nn.with_logical_partitioning(nn.initializers.lecun_normal(), names)
    layer = nn.MultiHeadDotProductAttention(num_heads=2, kernel_init=kernel_init, use_bias=False)
    return layer.init(jax.random.key(0), jnp.ones((1, 2, 8)))


def nnx_attention(init, rngs):
    return nnx.MultiHeadAttention(2, 8, decode=False, kernel_init=init, rngs=rngs)


@pytest.mark.parametrize(
    "of", [lambda i, *n: nnx.with_partitioning(i, n), sl.logical], ids=["flax", "ours"]
)
def test_nnx_dims_without_a_name_are_not_sharded(of):
    make = lambda: nnx_attention(of(LECUN, "embed", "kv"), nnx.Rngs(0))
    specs = params_specs(make, ON_TWO)
    assert specs["query"]["kernel"] == P("model", None, None)
    none = lambda: nnx_attention(of(LECUN, None), nnx.Rngs(0))
    assert params_specs(none, ON_TWO)["query"]["kernel"] == P(None, None, None)
    three = lambda: nnx_attention(of(LECUN, "embed", "heads", "kv"), nnx.Rngs(0))
    assert params_specs(three, ON_TWO)["query"]["kernel"] == P("model", None, None)
    assert sl.specs(make, ATTENTION, ON_TWO.device_mesh) == specs, "of the function that makes it"
    with sl.unsharded():
        made = make()
    with pytest.raises(
        ValueError, match="`key/kernel` of shape .8, 2, 4. has 3 dims and 2 names.*`sl.annotate"
    ):
        sl.specs(made, ATTENTION, ON_TWO.device_mesh)


def test_linen_dims_without_a_name_are_not_sharded():
    specs = params_specs(lambda: linen_attention(("embed", "kv")), ON_TWO)["params"]
    assert specs["query"]["kernel"] == P("model", None, None)
    specs = params_specs(lambda: linen_attention(("embed", "heads", "kv")), ON_TWO)["params"]
    assert specs["query"]["kernel"] == P("model", None, None)


@pytest.mark.parametrize(
    "of", [lambda i, *n: nnx.with_partitioning(i, n), sl.logical], ids=["flax", "ours"]
)
def test_nnx_stacked_attention_needs_a_name_for_the_new_dim(of):
    """Lost when the axis has no name, and then one dim off: google/flax#5112."""
    build = lambda rngs: nnx_attention(of(LECUN, "embed", "kv"), rngs)
    stack = lambda **how: nnx.split_rngs(splits=3)(nnx.vmap(build, **how))(nnx.Rngs(0))
    named = {"transform_metadata": {nnx.PARTITION_NAME: "layers"}}
    specs = params_specs(lambda: stack(**named), ON_TWO)
    assert specs["query"]["kernel"] == P(None, "model", None, None)
    specs = params_specs(lambda: stack(**named, out_axes=1), ON_TWO)
    assert specs["query"]["kernel"] == P("model", None, None, None)
    with pytest.raises(
        ValueError,
        match="`key/kernel` of shape .3, 8, 2, 4. has 4 dims and 2 names.*PARTITION_NAME",
    ):
        params_specs(stack, ON_TWO)


def test_optimizer_state_of_stacked_layers_follows_their_names():
    """Where `nnx.Optimizer` loses the dim that a transform added: google/flax#5112,
    google/flax#5172.
    """
    state = sl.init(
        lambda: stacked(nnx.Rngs(0), ("embed", "mlp")), optax.adam(1e-3), STRATEGY, abstract=True
    )
    assert sl.specs(state).opt_state[0].nu["linear"]["kernel"] == P(None, None, "model")


def linen_dense(**options):
    kernel_init = nn.with_logical_partitioning(nn.initializers.lecun_normal(), ("embed", "mlp"))
    return nn.Dense(8, kernel_init=kernel_init, **options)


def test_linen_stacks_keep_names_aligned_or_are_refused():
    """google/flax#3870: without a name for the new axis, Flax itself refuses."""
    rng, x = jax.random.split(jax.random.key(0), 3), jnp.ones((3, 1, 8))
    lifted = lambda **how: nn.vmap(
        nn.Dense, variable_axes={"params": 0}, split_rngs={"params": True}, **how
    )
    named = lifted(metadata_params={nn.PARTITION_NAME: "layers"})
    kernel_init = nn.with_logical_partitioning(nn.initializers.lecun_normal(), ("embed", "mlp"))
    specs = params_specs(lambda: named(8, kernel_init=kernel_init).init(rng[0], x))
    assert specs["params"]["kernel"] == P(None, None, "model")
    by_hand = lambda: jax.vmap(linen_dense().init)(rng, x)  # which Flax's boxes do not notice
    with pytest.raises(
        ValueError, match="`params/kernel` of shape .3, 8, 8. has 3 dims and 2 names"
    ):
        params_specs(by_hand)


def test_nnx_modules_inside_linen_keep_their_names():
    """Linen's transforms leave the names of such variables alone: google/flax#5589."""
    bridged = nnx.bridge.to_linen(nnx.Linear, 8, 8, kernel_init=sl.logical(LECUN, "embed", "mlp"))
    x = jnp.ones((1, 8))
    assert params_specs(lambda: bridged.init(jax.random.key(0), x))["params"]["kernel"] == P(
        None, "model"
    )
    state = sl.init(lambda: bridged.init(jax.random.key(0), x), optax.sgd(0.1), STRATEGY)
    step = sl.train_step(
        lambda variables, x, rng: jnp.mean(bridged.apply(variables, x) ** 2), STRATEGY
    )
    assert np.isfinite(step(state, np.ones((4, 8), "f"))[1]["loss"])

    class Twice(nn.Module):
        @nn.compact
        def __call__(self, x):
            how = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}, "length": 2}
            layers = nn.scan(
                lambda layer, x, _: (layer(x), None),
                **how,
                metadata_params={nn.PARTITION_NAME: "layers"},
            )
            return layers(
                nnx.bridge.to_linen(
                    nnx.Linear, 8, 8, kernel_init=sl.logical(LECUN, "embed", "mlp")
                ),
                x,
                None,
            )

    with pytest.raises(ValueError, match=r"kernel` of shape .2, 8, 8. has 3 dims and 2 names"):
        params_specs(lambda: Twice().init(jax.random.key(0), x))


def test_parameters_with_more_names_than_dims_are_refused():
    of_nnx = lambda: nnx.Linear(
        8, 8, kernel_init=sl.logical(LECUN, "embed", "mlp", None), rngs=nnx.Rngs(0)
    )
    of_linen = lambda: {"kernel": nn.LogicallyPartitioned(jnp.ones(3), ("embed", "mlp"))}
    for make in (of_nnx, of_linen):
        with pytest.raises(
            ValueError,
            match="`kernel` of shape .* dims and [23] names .*overridden by `sl.annotate",
        ):
            params_specs(make)


# What variables bring along: rules of their own, a mesh, mesh axes as names.


def linear_with(names, **metadata):
    return lambda: nnx.Linear(
        8, 8, kernel_init=nnx.with_partitioning(LECUN, names, **metadata), rngs=nnx.Rngs(0)
    )


def linen_with(names, **more):
    kernel_init = nn.with_logical_partitioning(nn.initializers.lecun_normal(), names, **more)
    return lambda: nn.Dense(8, kernel_init=kernel_init).init(jax.random.key(0), jnp.ones((1, 8)))[
        "params"
    ]


OWN = (("ffn", "model"),)


@pytest.mark.parametrize(
    "make",
    [linear_with(("embed", "ffn"), sharding_rules=OWN), linen_with(("embed", "ffn"), rules=OWN)],
)
def test_variable_sharding_rules_are_kept_and_conflicts_refused(make):
    assert params_specs(make)["kernel"] == P(None, "model")
    same = sl.Strategy(mesh="data=2,model=4", rules=RULES | sl.AxisRules(ffn="model"))
    assert params_specs(make, same)["kernel"] == P(None, "model")
    for other in (None, ["model", None]):
        another = sl.Strategy(mesh="data=2,model=4", rules=RULES | sl.AxisRules(ffn=other))
        with pytest.raises(
            ValueError, match="`kernel` has a rule of its own, `ffn='model'` .*rules say `ffn="
        ):
            params_specs(make, another)


def test_variable_sharding_rules_that_disagree_or_name_no_axis_are_refused():
    make = lambda *own: nnx.Sequential(
        *(linear_with(("embed", "ffn"), sharding_rules=(("ffn", axis),))() for axis in own)
    )
    with pytest.raises(
        ValueError,
        match="`layers/1/kernel` has a rule of its own, `ffn=None` .*another variable "
        "is `ffn='model'`",
    ):
        params_specs(lambda: make("model", None))
    with pytest.raises(
        ValueError, match="rule for `ffn` uses the mesh axis `nosuch`; the mesh has"
    ):
        params_specs(lambda: make("nosuch"))


def test_variable_mesh_must_be_the_mesh_of_the_strategy():
    """google/flax#5105: variables of several meshes."""
    mesh, other = STRATEGY.device_mesh, sl.make_mesh("data=4,model=2")
    assert params_specs(linear_with((None, "model"), mesh=mesh))["kernel"] == P(None, "model")
    with pytest.raises(
        ValueError,
        match="`kernel` was made for the mesh .*'model': 2.* and is to be laid out on .*'model': 4",
    ):
        params_specs(linear_with((None, "model"), mesh=other))
    sharding = jax.sharding.NamedSharding(mesh, P(None, "model"))
    assert params_specs(linear_with(sharding))["kernel"] == P(None, "model")


def test_dim_names_that_are_mesh_axes_mean_those_axes():
    for make in (linear_with((None, "model")), linen_with((None, "model"))):
        assert params_specs(make)["kernel"] == P(None, "model")
    mixed = sl.init(linear_with(("embed", "model")), optax.adam(0.1), STRATEGY)
    assert mixed.opt_state[0].mu["kernel"].sharding.spec == P(None, "model")
    assert "model" in str(sl.describe(mixed))
    with pytest.raises(ValueError, match="`kernel` is laid out as .*manual over `data`"):
        params_specs(linear_with((None, "data")))


# Models that are built outside `init`.


@pytest.mark.long("flax")
@pytest.mark.parametrize(
    "of", [lambda i, *n: nnx.with_partitioning(i, n), sl.logical], ids=["flax", "ours"]
)
def test_nnx_models_built_under_rules_are_created_sharded(of):
    build = lambda: nnx.Linear(8, 8, kernel_init=of(LECUN, "embed", "mlp"), rngs=nnx.Rngs(0))
    with sl.use(RULES, STRATEGY.device_mesh):
        model = build()
        assert model.kernel.sharding.spec == P(None, "model")
        assert nnx.jit(build)().kernel.sharding.spec == P(None, "model")
        assert sl.Layers([build(), build()]).stacked.kernel.out_sharding == (
            "layers",
            "embed",
            "mlp",
        )
        vmapped = nnx.split_rngs(splits=2)(
            nnx.vmap(
                lambda rngs: nnx.Linear(8, 8, kernel_init=of(LECUN, "embed", "mlp"), rngs=rngs),
                transform_metadata={nnx.PARTITION_NAME: "layers"},
            )
        )
        assert vmapped(nnx.Rngs(0)).kernel.shape == (2, 8, 8)
    with STRATEGY.scope():
        assert build().kernel.sharding.spec == P(None, "model")
    for whole in (sl.use(RULES), sl.unsharded()):
        with whole:
            np.testing.assert_array_equal(build().kernel, model.kernel)
    with jax.set_mesh(STRATEGY.device_mesh):  # a mesh alone says nothing of names
        assert (
            sl.logical(LECUN, "embed", "mlp")(jax.random.key(0), (8, 8)).metadata["eager_sharding"]
            is False
        )


def test_specs_of_an_nnx_state_match_its_structure():
    model = Block(nnx.Rngs(0))
    graph, state = nnx.split(model)
    specs = sl.specs(state, RULES, STRATEGY.device_mesh)
    with STRATEGY.scope():
        placed = jax.device_put(state, specs)
        assert placed["linear"]["kernel"].sharding.spec == P(None, "model")
        again = jax.jit(lambda state: state, in_shardings=(specs,), out_shardings=specs)(placed)
    assert nnx.merge(graph, again).linear.kernel.sharding.spec == P(None, "model")
    some = nnx.state(model, nnx.Param)
    assert list(sl.specs(some, RULES, STRATEGY.device_mesh)) == ["linear"]
    with pytest.raises(
        ValueError, match="Parameters carry names that no rule knows: `embed` on `linear/kernel`"
    ):
        sl.specs(state, sl.AxisRules(batch="data"), STRATEGY.device_mesh)


def test_init_refuses_a_model_without_trainable_arrays():
    with pytest.raises(
        ValueError, match="nothing to move.* `make_model` returned a model without arrays"
    ):
        sl.init(dict, optax.sgd(0.1), STRATEGY)
    with pytest.raises(ValueError, match="nothing to move.* There are: counts"):
        sl.init(lambda: {"counts": jnp.arange(3)}, optax.sgd(0.1), STRATEGY)
