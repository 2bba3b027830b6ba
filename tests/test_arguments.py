"""Arguments that nobody should give: every public name refuses them by a `ValueError` that says
what it takes.
"""

import random
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import shardlib as sl
from benchmarks import _strangers_calls as strangers
from benchmarks._strangers_table import CALLS, NOT_CALLED, Call, namespace
from examples.configs import tiny, tiny_onebit
from examples.fields import fields, override
from examples.run import Muon
from models import gpt
from shardlib.checks import _arguments as check
from shardlib.kernels._norm import IMPLEMENTATIONS

LONG = "x" * 10_000
STRATEGY = sl.Strategy(mesh="data=8", rules=sl.rules.data)
NOT_NUMBERS = (None, "x", b"1", [1], (), {}, object(), int, len, float("nan"), 1j, np.ones(2), True)


@pytest.fixture(scope="module")
def names(tmp_path_factory):
    """What calls are written with."""
    before = jax.config.jax_traceback_filtering
    jax.config.update("jax_traceback_filtering", "off")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("calls"))
        made = namespace()
        yield made
        made["checkpoints"].close()
    jax.config.update("jax_traceback_filtering", before)


def test_argument_fuzzer_covers_or_excludes_every_public_name():
    assert strangers.not_covered() == []
    assert set(NOT_CALLED) <= set(strangers.public_names())


def test_argument_fuzzer_base_calls_work(names):
    for call in CALLS:
        if not call.slow:
            eval(call.written({}), dict(names))


@pytest.mark.long
def test_argument_fuzzer_calls_work_or_are_refused_clearly():
    found = strangers.run(900, seed=0)
    assert found.failures == () and found.ran + found.refused == found.drawn == 900
    assert found.ran > 5 and found.refused > 500


def test_argument_fuzzer_classifies_outcomes_and_is_reproducible(names):
    def broken(size):
        return {}[size]

    def taking(size):
        return size

    def refusing(size):
        return check.whole("refusing", "size", size)

    outcomes = {}
    for function in (broken, taking, refusing):
        call = Call(function.__name__, f"{function.__name__}({{size}})", {"size": "3"})
        drawn = strangers.Draw(call, {"size": ("object", "object()")})
        outcomes[function.__name__] = strangers.outcome(
            drawn, {**names, function.__name__: function}
        )[0]
    assert outcomes == {"broken": "raw error", "taking": "silent", "refusing": "refused"}
    assert strangers.draw(0, 7) == strangers.draw(0, 7) and strangers.draw(0, 7) != strangers.draw(
        1, 7
    )


@pytest.mark.parametrize(
    ("ends", "kind", "code"),
    [
        ("import os; os.abort()", "abort", -6),
        (
            "import faulthandler, time; faulthandler.dump_traceback_later(0.1, exit=True); "
            "time.sleep(60)",
            "hang",
            1,
        ),
    ],
)
def test_argument_fuzzer_reports_calls_that_abort_or_hang(ends, kind, code):
    lines = (
        "print('[3]', flush=True); print('[3, \"worked\", \"\"]', flush=True); print('[4]', "
        "flush=True)"
    )
    first, second = strangers.watched([sys.executable, "-c", f"{lines}; {ends}"])
    assert (
        first == (3, "worked", "") and second[:2] == (4, kind) and f"exit code {code}" in second[2]
    )


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: sl.make_mesh(devices="x"), "make_mesh.devices='x'.. takes devices"),
        (lambda: sl.make_mesh(devices=[jax.devices()[0]] * 8), "make_mesh.devices=.*each once"),
        (lambda: sl.make_mesh(devices=[[1], [2, 3]]), "make_mesh.devices="),
        (lambda: sl.make_mesh({"data": "8"}), "axis `data` must be a whole number.*got '8'"),
        (lambda: sl.make_mesh(data=10**5000), "axis `data` must be a whole number.*got <int>"),
        (lambda: sl.make_mesh("data=8", axis_type="auto"), "make_mesh.axis_type='auto'"),
        (lambda: sl.local_rows(8, "x"), "local_rows.strategy='x'.. takes a `sl.Strategy`"),
        (lambda: sl.local_rows(10**24, STRATEGY), "local_rows.size=10+.. takes a number of "
                                                  "examples, at least 1 and at most"),
        (lambda: sl.batches([], "x"), "batches.strategy='x'.. takes a `sl.Strategy`"),
        (lambda: sl.batches(np.zeros(()), STRATEGY), "`source` is an iterable of batches"),
        (lambda: sl.Strategy(mesh="data=8", rules=sl.rules.data, frozen=1), "Strategy.frozen=1.. takes a tuple of patterns"),
        (lambda: sl.Strategy(mesh="data=8", rules=sl.rules.data, frozen=("(",)), r"frozen='\('.*no regular expression"),
        (lambda: sl.Strategy(mesh="data=8", rules=sl.rules.data, clip=True), "Strategy.clip=True.. takes a largest"),
        (lambda: sl.Strategy(mesh="data=8", rules=sl.rules.data, clip=1e999), "Strategy.clip=inf"),
        (lambda: sl.Strategy(mesh="data=8", rules=sl.rules.data, manual=(1,)), "Strategy.manual=.1,... takes a tuple of axes"),
        (lambda: sl.Checkpoints(3), "Checkpoints.folder=3.. takes a path"),
        (lambda: sl.Checkpoints(LONG), "Checkpoints.folder='xxx.*at most 4,096 bytes, and 255 "
                                       "between slashes"),
        (lambda: sl.JsonLines("a/" * 3_000), "JsonLines.path='a/a/"),
        (lambda: sl.JsonLines(b"a"), "JsonLines.path=b'a'"),
        (lambda: sl.TensorBoard("a\0"), r"TensorBoard.folder='a.x00'.*no zero bytes"),
        (lambda: sl.Zero(3, layers="data=2,"), "Zero.layers='data=2,'.. is plain text"),
        (lambda: sl.Zero(3, layers="layers"), r"plain text.*tells layers apart, `layers/\\d\+`"),
        (lambda: sl.Precision(keep=(1, 2)), r"Precision.keep=\(1, 2\).. takes a tuple of patterns"),
        (lambda: sl.Precision(keep=("[",)), "Precision.keep='.'.*no regular expression"),
        (lambda: sl.Precision(accumulate=None), "Precision.accumulate=None"),
        (lambda: sl.Precision("9" * 5_000), "Precision.compute='9999"),
        (lambda: sl.optimizers.onebit_adam("none"), "onebit_adam.learning_rate='none'"),
        (lambda: sl.optimizers.onebit_adam(float("nan")), "onebit_adam.learning_rate=nan"),
        (lambda: sl.optimizers.onebit_adam(0.1, eps=-1), "onebit_adam.eps=-1.*at least 0"),
        (lambda: sl.optimizers.onebit_adam(0.1, weight_decay=-1), "onebit_adam.weight_decay=-1.*at least 0"),
        (lambda: sl.optimizers.onebit_adam(0.1, mask="x"), "onebit_adam.mask='x'"),
        (lambda: sl.train_step(lambda model, x: 0.0, STRATEGY).trace(state(), np.ones((8, 8), "f4")), "takes three arguments"),
        (lambda: sl.init(lambda rngs: {}, None, STRATEGY), "make_model=.*called with no arguments"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_refused_with_what_is_accepted(call, said):
    with pytest.raises(ValueError, match=said):
        call()


def state():
    return sl.init(lambda: {"w": jnp.zeros((8, 8))}, optax.sgd(0.1), STRATEGY, abstract=True)


@pytest.mark.parametrize("name", ["b1", "b2", "eps", "weight_decay"])
@pytest.mark.parametrize("value", NOT_NUMBERS, ids=lambda value: type(value).__name__)
def test_onebit_adam_refuses_hyperparameters_that_are_not_numbers(name, value):
    with pytest.raises(ValueError, match=f"onebit_adam.{name}="):
        sl.optimizers.onebit_adam(1e-3, **{name: value})


def test_misspelt_keywords_of_experts_and_kernels_are_refused():
    """These take typed keywords, which only a type checker would look at."""
    x = jnp.ones((2, 4, 8))
    with pytest.raises(TypeError, match=r"moe\(\) .*'groop'; it takes `group`, `form`"):
        sl.experts.moe(
            x, sl.experts.Top2(), lambda w, y: y, gate=jnp.ones((8, 2)), weights={}, groop=2
        )
    with pytest.raises(TypeError, match=r"linear_cross_entropy\(\) .*'z_los'; it takes `vocab`"):
        sl.kernels.linear_cross_entropy(
            x, jnp.ones((16, 8)), jnp.zeros((2, 4), jnp.int32), z_los=1e-4
        )


@pytest.mark.parametrize(
    "value", [None, 0, 1, "true", (), np.ones(1), object()], ids=lambda value: type(value).__name__
)
def test_boolean_options_accept_only_true_and_false(value):
    takes = "takes True or False"
    for make in (
        lambda: sl.Zero(1, strict=value),
        lambda: sl.Exact(overlap=value),
        lambda: sl.pipeline.Custom(sl.pipeline.Table.parse("F0 B0"), paired=value),
        lambda: sl.experts.TopK(1, renormalize=value),
        lambda: sl.collectives.OneBit("data", feedback=value),
        *(lambda kind=kind: kind(2, 4, paired=value) for kind in SCHEDULES),
    ):
        with pytest.raises(ValueError, match=takes):
            make()


SCHEDULES = [kind for kind in sl.pipeline.SCHEDULES.values() if isinstance(kind, type)]


@pytest.mark.parametrize("name", ["zb-v", "zb-1p", "zb-2p"])
@pytest.mark.parametrize("value", NOT_NUMBERS, ids=lambda value: type(value).__name__)
def test_pipeline_schedules_refuse_costs_and_limits_of_the_wrong_kind(name, value):
    with pytest.raises(ValueError, match="costs=.*takes `sl.pipeline.Costs`"):
        sl.pipeline.SCHEDULES[name](2, 4, costs=value)
    if value is not None:
        with pytest.raises(ValueError, match="ZeroBubble.limit="):
            sl.pipeline.ZeroBubble(2, 4, limit=value)
        with pytest.raises(ValueError, match="Costs.send="):
            sl.pipeline.Costs(send=value)


def test_numpy_numbers_are_accepted_and_kept_as_python_numbers():
    """And are kept as Python's own, which print and save as such."""
    loop = sl.Loop(np.int32(20), keep_every=np.uint8(200))
    assert repr(loop) == repr(sl.Loop(20, keep_every=200))
    assert repr(sl.Zero(1, small=np.int64(3), strict=np.bool_(True))) == repr(
        sl.Zero(1, small=3, strict=True)
    )
    assert repr(sl.pipeline.Costs(np.float32(0.5), np.ones(2))) == repr(
        sl.pipeline.Costs(0.5, (1.0, 1.0))
    )
    assert sl.zero_bytes(np.uint8(200), devices=np.uint8(2), stage=3) == 200 * 16 / 2
    assert (
        type(check.number("f", "x", np.float32(0.5))) is float
        and type(check.whole("f", "x", np.uint8(7))) is int
    )


def test_error_messages_show_any_value_briefly():
    class Hostile:
        def __repr__(self):
            raise RuntimeError

    assert check.shown(Hostile()) == "<Hostile>" and check.shown(10**5000) == "<int>"
    assert "\n" not in check.shown(np.ones((50, 50))) and len(check.shown("9" * 10**6)) < 250


# The trainer's command line.


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            ["--optimizer.learning_rate", "1e999"],
            r"Muon\(learning_rate=inf\)`: a finite number, above 0",
        ),
        (["--optimizer.learning_rate", "1" + "0" * 400], r"learning_rate=inf"),
        (["--optimizer.learning_rate", "nan"], "`learning_rate` is a number"),
        (["--optimizer.b1", "1.5"], r"Muon\(b1=1.5\)`.*at least 0 and below 1"),
        (["--optimizer.b2", "-0.1"], r"Muon\(b2=-0.1\)`"),
        (["--optimizer.momentum", "-1"], r"Muon\(momentum=-1.0\)`"),
        (["--optimizer.weight_decay", "1e999"], r"Muon\(weight_decay=inf\)`"),
        (["--optimizer.final", "2"], r"Muon\(final=2.0\)`"),
        (["--optimizer.reach", "0"], r"Muon\(reach=0.0\)`.*above 0"),
        (["--optimizer.warmup", "-1"], r"Muon\(warmup=-1\)`: a whole number"),
        (["--batch", str(10**24)], r"Run\(batch=1000.*: a whole number, 1 to"),
        (["--seed", "-1"], r"Run\(seed=-1\)`"),
        (["--folder", LONG], r"Run\(folder='xxx.*at most 255 bytes"),
        (["--name", ""], r"Run\(name=''\)`"),
        (["--model.dtype", "int8"], r"GPTConfig\(dtype='int8'\)` must be `bfloat16`"),
        (["--model.dtype", "anything"], r"GPTConfig\(dtype='anything'\)`"),
        (["--model.dtype", "float16"], r"GPTConfig\(dtype='float16'\)`.*zero in float16"),
        (["--model.param_dtype", "9" * 5_000], r"GPTConfig\(param_dtype='999"),
        (["--model.kernels", "fast"], r"GPTConfig\(kernels='fast'\)`: choose 'reference'"),
        (["--model.dropout", "nan"], "`dropout` is a number"),
        (["--model.norm_epsilon", "-1"], r"GPTConfig\(norm_epsilon=-1.0\)`"),
        (["--model.layers", str(10**24)], r"GPTConfig\(layers=1000"),
        (["--strategy.precision", "9" * 5_000], r"Precision\(compute='999"),
        (["--strategy.precision", "fp16"], r"Precision\(compute='fp16'\)`: in float16"),
        (["--strategy.pipeline", "1f1b:" + "9" * 5_000 + ":2"], "A pipeline is a schedule"),
        (["--strategy.accumulate", str(10**24)], r"Strategy\(accumulate=1000"),
        (["--loop.steps", str(10**24)], r"Loop\(steps=1000"),
        (["--prompt", "a\\"], "`prompt` has a backslash that begins nothing"),
        (["--prompt", r"\begin{document}"], "`prompt` has a backslash that begins nothing"),
    ],
)
def test_trainer_command_line_refuses_wrong_field_values(options, said):
    with pytest.raises(ValueError, match=said):
        override(tiny.run(), options)


# Of patterns such as `[[a]`, which compile.
@pytest.mark.filterwarnings("ignore:Possible:FutureWarning")
def test_trainer_command_line_accepts_or_refuses_random_texts():
    texts = [
        "",
        "x",
        "0",
        "-1",
        "1.5",
        "1e999",
        "nan",
        "none",
        "true",
        "()",
        "(1,",
        "[" * 300,
        "9" * 5_000,
        LONG,
        "\\",
        "a|b",
    ]
    texts += [
        "\0",
        "ü\ud800",
        "{'a': 1}",
        "'x'",
        "data=2,model=4",
        "1f1b:0:0",
        "onebit:",
        "1" + "0" * 24,
        "b'x'",
        "object()",
    ]
    chance = random.Random(0)
    refused = 0
    for run in (tiny.run(), tiny_onebit.run()):
        names = [name for name, _ in fields(run) if not name.startswith("data.")]
        for _ in range(300):
            options = [f"--{chance.choice(names)}", chance.choice(texts)]
            try:
                override(run, options)
            except ValueError as error:
                refused += 1
                # Text in quotes is that text.
                given = [option.strip("-").strip("'") for option in options]
                parts = {part for option in given for part in option.split(".")}
                assert any(
                    part and check.shown(part)[1:40].rstrip("'") in str(error) for part in parts
                ), (
                    options,
                    str(error),
                )
    assert 200 < refused < 600


def test_gpt_kernels_option_accepts_only_existing_implementations():
    known = [one.name for one in IMPLEMENTATIONS]
    known += [f"{one.name}_simulated" for one in IMPLEMENTATIONS if one.simulates]
    for name in ("xla", *known, None):
        assert gpt.tiny(kernels=name).kernels == name
    with pytest.raises(ValueError, match="choose 'reference'"):
        gpt.tiny(kernels="reference_simulated")


def test_trainer_optimizer_refuses_wrong_settings_when_constructed():
    for name, value in (
        ("learning_rate", 0),
        ("b1", float("nan")),
        ("momentum", 1),
        ("weight_decay", True),
        ("reach", "1"),
    ):
        with pytest.raises(ValueError, match=f"Muon.{name}="):
            Muon(**{name: value})
