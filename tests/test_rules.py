import pickle
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import shardlib as sl
from shardlib.layouts._resolve import resolve
from shardlib.layouts._specs import check_spec, keep_axes, spec_axes

MESH = {"data": 2, "model": 4}


def spec(rules, names, shape, **kwargs):
    return resolve(rules, MESH, names, shape, **kwargs).spec


def test_rules_map_a_name_to_its_axis_or_split_it_over_a_tuple():
    rules = sl.AxisRules(batch=("data", "model"), embed=None, mlp="model")
    assert spec(rules, ("batch", "embed"), (8, 4)) == P(("data", "model"), None)
    assert spec(rules, ("embed", "mlp"), (4, 8)) == P(None, "model")
    assert spec(rules, (None, P.UNCONSTRAINED), (4, 8)) == P(None, P.UNCONSTRAINED)


def test_rules_pick_the_first_candidate_that_is_free_and_divides():
    rules = sl.AxisRules(a=["model", "data", None], b=["model", "data"])
    assert spec(rules, ("a",), (8,)) == P("model")
    assert spec(rules, ("a",), (6,)) == P("data")
    assert spec(rules, ("a",), (5,)) == P(None)
    assert spec(rules, ("a", "b"), (8, 8)) == P("model", "data")


def test_rules_are_immutable_ordered_hashable_and_survive_pickling():
    rules = sl.AxisRules(b="data", a=["model", None]).indivisible(a="pad")
    assert list(rules) == ["b", "a"]
    assert hash(rules) == hash(sl.AxisRules(b="data", a=["model", None]).indivisible(a="pad"))
    assert rules != sl.AxisRules(b="data", a=["model", None])
    assert pickle.loads(pickle.dumps(rules)) == rules
    with pytest.raises(TypeError):
        rules["a"] = None
    with pytest.raises(AttributeError):
        rules.a = None
    assert eval(repr(rules), {"AxisRules": sl.AxisRules}) == rules


def test_rules_union_prefers_the_right_and_any_rule_over_a_known_name():
    known = sl.AxisRules.knowing("mlp")
    assert (known | sl.AxisRules(mlp="model"))["mlp"] == ("model",)
    assert (sl.AxisRules(mlp="model") | known)["mlp"] == ("model",)
    assert (sl.AxisRules(mlp="model") | sl.AxisRules(mlp=None))["mlp"] == (None,)


@pytest.mark.parametrize("left", [sl.rules.data, sl.rules.fsdp])
@pytest.mark.parametrize("right", [sl.rules.tensor, sl.rules.tensor_sequence])
def test_rules_presets_combine_in_either_order(left, right):
    assert dict(left | right) == dict(right | left)


def test_rules_drop_manual_axes_only_from_the_batch():
    rules = sl.AxisRules(batch=("data", "model"), experts="data")
    assert spec(rules, ("batch",), (4,), manual=frozenset({"data"})) == P("model")
    with pytest.raises(ValueError, match="`experts`=8.*`data`, which is manual"):
        spec(rules, ("experts",), (8,), manual=frozenset({"data"}))


@pytest.mark.parametrize(
    ("policy", "expected", "padded"),
    [("replicate", P(None), 6), ("drop", P("data"), 6), ("pad", P(("data", "model")), 8)],
)
def test_indivisible_policies_apply_and_report_what_they_did(policy, expected, padded):
    rules = sl.AxisRules(a=("data", "model")).indivisible(a=policy)
    found = resolve(rules, MESH, ("a",), (6,), what="w")
    assert (found.spec, found.padded_shape) == (expected, (padded,))
    assert "`a`=6, of `w`" in found.said[0]
    assert "`data=2` x `model=4` does not divide 6" in found.said[0]


@pytest.mark.parametrize(
    ("rules", "names", "shape", "message"),
    [
        (
            dict(a="modle"),
            ("a",),
            (8,),
            "rule for `a` uses the mesh axis `modle`; the mesh has `data=2`, `model=4`",
        ),
        (
            dict(a="model", b="model"),
            ("a", "b"),
            (8, 8),
            "`b` and `a`, two dims of `w` of shape \\(8, 8\\), both map to the mesh axis `model`",
        ),
        (dict(a="model"), ("a",), (6,), "dim 0, `a`=6, of `w`.*`model=4` does not divide 6"),
        (dict(a="model"), ("a",), (8, 8), "has 2 dims and was given 1 names"),
        (
            dict(heads="model"),
            ("haeds",),
            (8,),
            "Unknown name `haeds`.*Did you mean `heads`.*know `heads`",
        ),
        (dict(a="model"), (3,), (8,), "was given the name 3"),
    ],
)
def test_rules_errors_name_the_array_dimension_axis_and_sizes(rules, names, shape, message):
    with pytest.raises(ValueError, match=message):
        resolve(sl.AxisRules(**rules), MESH, names, shape, what="w")


@pytest.mark.parametrize("value", [3, ("data", 1), ("data", "data"), [], [["data"]]])
def test_rules_that_are_malformed_are_refused(value):
    with pytest.raises(ValueError, match="rule for `a`"):
        sl.AxisRules(a=value)


def test_indivisible_policies_refuse_unknown_names_and_policies():
    with pytest.raises(ValueError, match="Unknown name `b`"):
        sl.AxisRules(a=None).indivisible(b="pad")
    with pytest.raises(ValueError, match="indivisible.policy='shrug'.. takes one of 'error'"):
        sl.AxisRules(a=None).indivisible("shrug")


@pytest.mark.parametrize(
    ("literal", "shape", "message"),
    [
        (P("x"), (8,), "names the axis `x`"),
        (P("data", "data"), (8, 8), "uses the axis `data` twice"),
        (P("model"), (6,), "splits dim 0 of .* into 4, which does not divide 6"),
        (P(None, "data"), (8,), "1 dims and was given"),
    ],
)
def test_literal_specs_that_do_not_fit_are_refused(literal, shape, message):
    with pytest.raises(ValueError, match=message):
        check_spec(MESH, literal, shape)


axes = st.sampled_from([None, "data", "model", ("data", "model"), ("model", "data")])


@given(
    st.lists(
        st.tuples(st.lists(axes, min_size=1, max_size=3, unique=True), st.integers(1, 16)),
        min_size=1,
        max_size=3,
    )
)
def test_rules_resolve_to_a_valid_spec_from_the_candidates(dims):
    rules = sl.AxisRules({f"n{i}": candidates for i, (candidates, _) in enumerate(dims)})
    shape = tuple(size for _, size in dims)
    try:
        found = spec(rules, tuple(f"n{i}" for i in range(len(dims))), shape)
    except ValueError as error:
        assert "does not divide" in str(error) or "both map to" in str(error)
        return
    check_spec(MESH, found, shape)
    assert all(entry in candidates for entry, (candidates, _) in zip(found, dims, strict=True))
    assert set(spec_axes(keep_axes(found, {"data"}))) <= {"data"}


@pytest.mark.long
def test_rules_survive_a_pickle_into_another_process():
    rules = sl.AxisRules(batch="data", heads=["model", None]).indivisible(
        heads="drop"
    ) | sl.AxisRules.knowing("seq")
    # Made anew there, the same rules must hash as those that came from here.
    code = (
        "import pickle, sys, shardlib as sl; r = pickle.load(sys.stdin.buffer); print(hash(r) == "
        "hash(r | sl.AxisRules()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], input=pickle.dumps(rules), capture_output=True, check=True
    )
    assert done.stdout.strip() == b"True"
    assert pickle.loads(pickle.dumps(rules)) == rules
