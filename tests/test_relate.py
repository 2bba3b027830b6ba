"""Which parameter each leaf of an optimizer's state follows: by hand for some optimizers, and for
all of optax.
"""

import inspect
import warnings
from collections import Counter
from functools import cache, partial

import jax
import jax.numpy as jnp
import optax
import pytest

from shardlib._tree import named_leaves
from shardlib.layouts._relate import Relation, relate


def shapes(dtype=jnp.float32, **params):
    return {name: jax.ShapeDtypeStruct(shape, dtype) for name, shape in params.items()}


def kinds(optimizer, params):
    """Of each leaf the kind alone, or with what it follows."""
    return {
        path: (found.kind, found.parameter, found.dims)
        if found.parameter is not None
        else found.kind
        for path, found in relate(optimizer.init, params).items()
    }


def same(name, rank):
    return ("same", name, tuple(range(rank)))


PARAMS = shapes(w=(8, 16), b=(16,))
OF_PARAMS = {"w": same("w", 2), "b": same("b", 1)}


def copies(*where, of=OF_PARAMS):
    return {f"{at}/{path}": found for at in where for path, found in of.items()}


def of_sgdm(rate):
    return optax.chain(optax.trace(0.9), optax.scale(rate))


def by_rank(params):
    return jax.tree.map(lambda p: "matrix" if len(p.shape) > 1 else "vector", params)


MOMENTS = {"0/count": "scalar", **copies("0/mu", "0/nu")}
CASES = {
    "sgd": (optax.sgd(0.1), {}),
    "adamw": (optax.adamw(0.1), MOMENTS),
    "a schedule": (
        optax.adamw(optax.cosine_decay_schedule(0.1, 10)),
        {**MOMENTS, "2/count": "scalar"},
    ),
    "chained": (
        optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1)),
        {f"1/{path}": found for path, found in MOMENTS.items()},
    ),
    "hyperparameters": (
        optax.inject_hyperparams(of_sgdm)(rate=0.1),
        {"count": "scalar", "hyperparams/rate": "scalar", **copies("inner_state/0/trace")},
    ),
    "masked": (
        optax.masked(optax.trace(0.9), {"w": True, "b": False}),
        {"inner_state/trace/w": same("w", 2)},
    ),
    "partitioned": (
        optax.partition({"matrix": optax.trace(0.9), "vector": optax.scale_by_rms()}, by_rank),
        {
            "inner_states/matrix/inner_state/trace/w": same("w", 2),
            "inner_states/vector/inner_state/nu/b": same("b", 1),
        },
    ),
    "accumulated": (
        optax.MultiSteps(optax.trace(0.9), 4),
        {
            "mini_step": "scalar",
            "gradient_step": "scalar",
            **copies("inner_opt_state/trace", "acc_grads"),
        },
    ),
    "sm3": (
        optax.scale_by_sm3(),
        {
            "mu/w/0": ("part", "w", (0,)),
            "mu/w/1": ("part", "w", (1,)),
            "mu/b/0": same("b", 1),
            **copies("nu"),
        },
    ),
    "flattened": (optax.flatten(optax.trace(0.9)), {"trace": "none"}),
    "a history": (
        optax.scale_by_lbfgs(memory_size=4),
        {
            "count": "scalar",
            "weights_memory": "none",
            **copies("params", "updates"),
            **{f"diff_{of}_memory/w": ("part", "w", (None, 0, 1)) for of in ("params", "updates")},
            **{f"diff_{of}_memory/b": ("part", "b", (None, 0)) for of in ("params", "updates")},
        },
    ),
    "muon": (
        optax.contrib.muon(0.1),
        {
            "inner_states/muon/inner_state/0/count": "scalar",
            "inner_states/muon/inner_state/0/mu/w": same("w", 2),
            "inner_states/muon/inner_state/0/ns_coeffs": "none",
            "inner_states/adam/inner_state/0/count": "scalar",
            "inner_states/adam/inner_state/0/mu/b": same("b", 1),
            "inner_states/adam/inner_state/0/nu/b": same("b", 1),
        },
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_optimizer_state_relations_for_a_matrix_and_a_vector(case):
    optimizer, expected = CASES[case]
    assert kinds(optimizer, PARAMS) == expected


FACTORED = {"v": "scalar", "v_row": ("part", "w", (0,)), "v_col": ("part", "w", (1,))}
UNFACTORED = {"v": same("w", 2), "v_row": "scalar", "v_col": "scalar"}
UNCLEAR = ("ambiguous", "w", (None,))


@pytest.mark.parametrize(
    ("shape", "expected"),
    {
        (256, 512): FACTORED,
        (512, 256): {"v": "scalar", "v_row": ("part", "w", (1,)), "v_col": ("part", "w", (0,))},
        (256, 257): FACTORED,
        (3, 256, 512): {
            "v": "scalar",
            "v_row": ("part", "w", (0, 1)),
            "v_col": ("part", "w", (0, 2)),
        },
        (256, 256): {"v": "scalar", "v_row": UNCLEAR, "v_col": UNCLEAR},  # either may be the rows
        (8, 16): UNFACTORED,
        (127, 4096): UNFACTORED,  # factored if it were one longer
        (128, 4096): FACTORED,  # and not if it were one shorter
        (1, 16): UNFACTORED,
    }.items(),
)
def test_optimizer_state_relations_of_factored_moments(shape, expected):
    found = kinds(optax.scale_by_factored_rms(), shapes(w=shape))
    assert found == {
        "count": "scalar",
        **{f"{of}/w": relation for of, relation in expected.items()},
    }


def test_optimizer_state_relations_keep_apart_paths_with_equal_endings():
    params = {
        "w": jnp.ones((4, 4)),
        "a": {"w": jnp.ones((4, 4))},
        "b": {"a": {"w": jnp.ones((4, 4))}},
    }
    found = relate(optax.scale_by_adam().init, params)
    assert {
        path: relation.parameter for path, relation in found.items() if relation.kind == "same"
    } == {f"{of}/{path}": path for of in ("mu", "nu") for path in ("w", "a/w", "b/a/w")}


def test_optimizer_state_relations_do_not_depend_on_names():
    """A state whose paths say the contrary of what it is."""
    params = shapes(w=(4, 8), b=(4, 8))
    found = relate(
        lambda p: {"w": jnp.zeros_like(p["b"]), "b": p["w"].T, "x": jnp.zeros((4, 8))}, params
    )
    assert found["w"] == Relation("same", "b", (0, 1))
    assert found["b"] == Relation("part", "w", (1, 0), "follows dim 1, 0 of `w`")
    assert found["x"] == Relation("none", None, (None, None), "follows no parameter")


def test_optimizer_state_relations_of_a_single_array_model():
    assert kinds(optax.scale_by_adam(), jnp.ones((4, 4))) == {
        "count": "scalar",
        "mu": same("", 2),
        "nu": same("", 2),
    }


def test_optimizer_state_relations_of_empty_models_and_tiny_shapes():
    assert kinds(optax.scale_by_adam(), {}) == {"count": "scalar"}
    assert kinds(optax.trace(0.9), shapes(s=(), one=(1,), ones=(1, 1), empty=(0, 3))) == {
        "trace/s": "scalar",
        "trace/one": same("one", 1),
        "trace/ones": same("ones", 2),
        "trace/empty": same("empty", 2),
    }
    assert set(kinds(optax.trace(0.9), shapes(s=())).values()) == {"scalar"}


def test_optimizer_state_relations_of_lookahead_follow_the_fast_copy():
    params = optax.LookaheadParams(fast=PARAMS, slow=PARAMS)
    found = kinds(optax.lookahead(optax.trace(0.9), 2, 0.5), params)
    assert found == {
        "fast_state/trace/b": same("fast/b", 1),
        "fast_state/trace/w": same("fast/w", 2),
        "steps_since_sync": "scalar",
    }


def test_optimizer_state_relations_of_preconditioners_and_random_keys():
    def init(params):
        n, m = params["w"].shape
        return {
            "left": jnp.eye(n),
            "right": jnp.eye(m),
            "key": jax.random.key(0),
            "keys": jax.random.split(jax.random.key(0), n),
            "longer": jnp.zeros(n + 1),
            "twice": jnp.zeros(2 * n),
            "sum": jnp.zeros(n + m),
            "number": 3,
            "nothing": None,
        }

    assert kinds(optax.GradientTransformation(init, lambda *_: _), shapes(w=(8, 8))) == {
        "left": ("part", "w", (0, 0)),
        "right": ("part", "w", (1, 1)),
        "key": "scalar",
        "keys": ("part", "w", (0,)),
        **dict.fromkeys(("longer", "twice", "sum"), UNCLEAR),
        "number": "scalar",
    }


@pytest.mark.parametrize("multiple", [8, 3])
def test_optimizer_state_relations_when_init_accepts_only_some_shapes(multiple):
    def init(params):
        if any(size % multiple for p in params.values() for size in p.shape):
            raise ValueError("no")
        return optax.trace(0.9).init(params), jnp.zeros((5,))

    assert kinds(optax.GradientTransformation(init, None), shapes(w=(24, 48), v=(24, 48))) == {
        "0/trace/w": same("w", 2),
        "0/trace/v": same("v", 2),
        "1": "none",
    }


def test_optimizer_state_relations_are_ambiguous_for_a_fixed_shape_init():
    def init(params):
        assert params["w"].shape == (8, 16)
        return optax.scale_by_adam().init(params)

    found = relate(init, PARAMS)
    assert {path: relation.kind for path, relation in found.items()} == {
        path: "scalar" if path == "count" else "ambiguous" for path in found
    }
    with pytest.raises(AssertionError):
        relate(init, shapes(w=(8, 17)))


def test_optimizer_state_relations_when_leaves_depend_on_size():
    params = shapes(big=(64, 64), less=(63, 64))
    large = optax.masked(
        optax.trace(0.9), lambda tree: jax.tree.map(lambda p: p.shape[0] >= 64, tree)
    )
    assert kinds(large, params) == {"inner_state/trace/big": same("big", 2)}


def test_optimizer_state_relations_when_labels_compare_sizes():
    def label(p):
        return "wide" if p.shape[-1] == 64 else "narrow"

    labels = lambda tree: jax.tree.map(label, tree)
    choices = {"wide": optax.adam(0.1), "narrow": optax.sm3(0.1)}
    found = kinds(optax.partition(choices, labels), shapes(square=(64, 64), w=(16, 64), b=(8,)))
    moments = {path: kind for path, kind in found.items() if kind != "scalar"}
    assert {path for path in moments if "wide" in path} == {
        f"inner_states/wide/inner_state/0/{moment}/{name}"
        for moment in ("mu", "nu")
        for name in ("square", "w")
    }
    for path, kind in moments.items():
        name = path.rpartition("/")[2]
        assert kind == same(name, 2) or "narrow" in path

    def listed(params):
        """A list of moments without the names of parameters, and of some sizes alone."""
        return [jnp.zeros_like(p) for p in params.values() if p.shape == (64, 64)]

    five = dict.fromkeys("abcde", (64, 64))
    found = kinds(optax.GradientTransformation(listed, None), shapes(**five))
    for number, name in enumerate(five):
        relation = found[f"{number}"]
        assert relation == same(name, 2) or relation[0] != "same"

    def factored(params):
        """Has the factors of a matrix only as it is."""
        matrix = params["w"]
        return {"rows": jnp.zeros(64), "whole": matrix} if matrix.shape == (64, 64) else {}

    found = kinds(optax.GradientTransformation(factored, None), shapes(w=(64, 64)))
    assert found == {"rows": ("ambiguous", "w", (None,)), "whole": same("w", 2)}


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.complex64])
def test_optimizer_state_relations_probe_with_the_parameter_dtype(dtype):
    seen = []

    def init(params):
        seen.extend(p.dtype for p in jax.tree.leaves(params))
        return optax.scale_by_adam().init(params)

    assert all(
        r.kind == "same"
        for path, r in relate(init, shapes(dtype, w=(4, 8), b=(8,))).items()
        if path != "count"
    )
    assert set(seen) == {jnp.dtype(dtype)}


@pytest.mark.parametrize("count", [1, 2, 3, 5, 40])
def test_optimizer_state_relations_take_few_probes_for_many_parameters(count):
    params = {f"{i}": jax.ShapeDtypeStruct((4, 4), jnp.float32) for i in range(count)}
    asked = []

    def init(params):
        asked.append(len(params))
        return {f"of {i}": jnp.zeros_like(p) for i, p in params.items()}

    assert kinds(optax.GradientTransformation(init, None), params) == {
        f"of {i}": same(i, 2) for i in params
    }
    assert len(asked) <= 1 + 9 + 3


# Every optimizer of optax, found rather than listed.

# What an argument without a default is, by its name.
ARGUMENTS = {
    "learning_rate": 0.1,
    "step_size": -0.1,
    "step_size_fn": lambda count: 0.1,
    "decay": 0.9,
    "eta": 0.01,
    "gamma": 0.5,
    "clipping": 1.0,
    "max_delta": 1.0,
    "threshold": 1.0,
    "max_norm": 1.0,
    "l2_norm_clip": 1.0,
    "noise_multiplier": 0.1,
    "max_consecutive_errors": 3,
    "max_backtracking_steps": 3,
    "max_linesearch_steps": 3,
    "every_k_schedule": 2,
    "sync_period": 2,
    "slow_step_size": 0.5,
    "seed": 0,
    "mask": True,
    "freeze_mask": False,
    "measure_name": "norm",
    "should_transform_fn": lambda count: count >= 0,
    "measure": optax.tree.norm,
    "measures": {"norm": optax.measure_with_ema(optax.tree.norm, 0.9)},
    **dict.fromkeys(
        ("inner", "opt", "optimizer", "base_optimizer", "fast_optimizer", "tx"),
        optax.sgd(0.1, momentum=0.9),
    ),
    "adv_optimizer": optax.sgd(0.05),
    "transforms": {"all": optax.adam(0.1)},
    "param_labels": "all",
}

# Those that are made otherwise.
BY_HAND = {
    "MultiSteps": lambda: optax.MultiSteps(optax.adam(0.1), 2).gradient_transformation(),
    "add_noise": lambda: optax.add_noise(0.01, 0.5, key=0),
    "chain": lambda: optax.chain(optax.clip(1.0), optax.adam(0.1)),
    "freeze": lambda: optax.freeze(False),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adam)(learning_rate=0.1),
    "inject_stateful_hyperparams": lambda: optax.inject_stateful_hyperparams(optax.adam)(
        learning_rate=0.1
    ),
    "named_chain": lambda: optax.named_chain(("clip", optax.clip(1.0)), ("adam", optax.adam(0.1))),
    "noisy_sgd": lambda: optax.noisy_sgd(0.1, key=0),
    "stateless": lambda: optax.stateless(lambda updates, params: updates),
    "stateless_with_tree_map": lambda: optax.stateless_with_tree_map(lambda update, param: update),
}

# Public functions that are said to make one and are left out, and why.
SKIPPED: dict[str, str] = {}

# What makes a state of any parameters, but takes no step from them, their gradients and a loss
# alone; and why.
LOSS, EXAMPLES = "takes the loss as a function", "takes a gradient for each example"
UNTRAINABLE = {
    "lbfgs": LOSS,
    "scale_by_backtracking_linesearch": LOSS,
    "scale_by_zoom_linesearch": LOSS,
    "contrib.sophia": LOSS,
    "contrib.hutchinson_estimator_diag_hessian": LOSS,
    "contrib.dpsgd": EXAMPLES,
    "contrib.differentially_private_aggregate": EXAMPLES,
    "contrib.scale_by_muon": "takes matrices alone",
    "lookahead": "takes two copies of the parameters",
    "measure_with_ema": "makes a measurement of gradients, and no updates",
    "monitor": "has leaves in its state after a step that were not there before",
}
# And what takes no parameters without dims, or gives them one.
NO_SCALARS = ("sm3", "scale_by_sm3", "scale_by_distance_over_gradients")


def makers():
    """Every public function of optax and its `contrib`, by name; a few are classes."""
    for prefix, module in (("", optax), ("contrib.", optax.contrib)):
        for name, make in vars(module).items():
            if not name.startswith("_") and (inspect.isfunction(make) or name in BY_HAND):
                yield prefix + name, make


@cache
def public_optimizers() -> dict[str, optax.GradientTransformation]:
    """Every `GradientTransformation` that a public function of optax, or of its `contrib`, makes of
    generic arguments.
    """
    found = {}
    for name, make in makers():
        parameters = inspect.signature(make).parameters.values()
        needed = [
            p.name for p in parameters if p.default is p.empty and p.kind is not p.VAR_KEYWORD
        ]
        if name not in SKIPPED and (name in BY_HAND or ARGUMENTS.keys() >= set(needed)):
            # The deprecated are optimizers all the same.
            with warnings.catch_warnings(action="ignore"):
                made = (
                    BY_HAND[name]()
                    if name in BY_HAND
                    else make(**{of: ARGUMENTS[of] for of in needed})
                )
            if isinstance(made, optax.GradientTransformation):
                found[name] = made
    return found


def updated(optimizer, params, gradients, state, value):
    """One step, with what the optimizer takes besides gradients: the loss, and the gradients as
    they were.
    """
    takes = inspect.signature(optimizer.update).parameters.values()
    more = (
        {"value": value, "grad": gradients} if any(p.kind is p.VAR_KEYWORD for p in takes) else {}
    )
    return optimizer.update(gradients, state, params, **more)


def test_optax_public_optimizers_are_all_collected():
    assert len(public_optimizers()) >= 120
    said = {
        name
        for name, make in makers()
        if "GradientTransformation" in str(inspect.signature(make).return_annotation)
    }
    assert said - public_optimizers().keys() == SKIPPED.keys()
    assert UNTRAINABLE.keys() <= public_optimizers().keys()


EVERY = shapes(w=(256, 128), square=(16, 16), b=(24,), s=())


@pytest.mark.parametrize("name", public_optimizers())
def test_optimizer_state_relations_hold_for_every_optax_optimizer(name):
    init = public_optimizers()[name].init
    state = dict(named_leaves(jax.eval_shape(init, EVERY)))
    relations = relate(init, EVERY)
    assert list(relations) == list(state)
    for path, (kind, parameter, dims, reason) in relations.items():
        leaf = state[path]
        assert len(dims) == len(leaf.shape)
        assert (kind in ("same", "part")) == any(dim is not None for dim in dims)
        assert (reason == "") == (kind in ("same", "scalar"))
        if kind in ("same", "part"):
            followed = EVERY[parameter].shape
            assert all(
                dim is None or followed[dim] == size
                for dim, size in zip(dims, leaf.shape, strict=True)
            )
            assert path.split("/").count(parameter) == 1  # as optax happens to call them
        if kind == "same":
            assert leaf.shape == followed
        elif leaf.shape and leaf.shape in {p.shape for p in EVERY.values()}:
            assert kind == "part" or "galore" in name  # whose projections of a square are squares


@pytest.mark.parametrize("name", public_optimizers())
def test_optax_optimizers_take_a_step_unless_listed_as_untrainable(name):
    optimizer = public_optimizers()[name]
    params = {path: p for path, p in EVERY.items() if p.shape or name not in NO_SCALARS}

    def like(tree):
        return [(path, leaf.shape, leaf.dtype) for path, leaf in named_leaves(tree)]

    def steps():
        state = jax.eval_shape(optimizer.init, params)
        updates, after = jax.eval_shape(
            partial(updated, optimizer), params, params, state, jnp.float32(1)
        )
        return like(updates) == like(params) and like(after) == like(state)

    try:
        assert steps() is (name not in UNTRAINABLE)
    except (TypeError, ValueError, AttributeError):
        assert name in UNTRAINABLE


@pytest.mark.parametrize(
    "name", ["adam", "adamw", "lamb", "adamax", "contrib.adopt", "contrib.schedule_free_adamw"]
)
def test_optimizer_state_relations_find_every_moment(name):
    found = relate(
        public_optimizers()[name].init, {path: p for path, p in EVERY.items() if path != "s"}
    )
    moments = [
        relation.kind for path, relation in found.items() if {"mu", "nu"} & set(path.split("/"))
    ]
    assert Counter(moments) == {"same": len(moments)}
    assert moments
