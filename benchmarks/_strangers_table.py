"""What `_strangers_calls` calls: for every public name a call that works, and values of every kind
to put in its arguments.

A call is Python, as text, so that one that fails can be printed and run again.
"""

import contextlib
import io
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import PartitionSpec

import shardlib as sl
from shardlib.pipeline import SCHEDULES

VALUES: dict[str, tuple[str, ...]] = {
    "none": ("None",),
    "bool": ("True", "False"),
    "int": ("0", "-1", "1", "2", "7", "2**31", "2**63", "10**24", "-(10**24)", "10**5000"),
    "float": ("0.5", "1.5", "-2.0", "5e-324", "1e300"),
    "nan": ("float('nan')",),
    "inf": ("1e999", "-1e999"),
    "text": ("''", "'x'", "'data'", "'data=2,'", "'a\\x00b\\n\\ud800ü'", "'x' * 10_000",
    "'9' * 5_000", "'('", "'[' * 300"),
    "bytes": ("b'data'", "b'\\xff' * 10_000"),
    "list": ("[]", "[1, 2]", "['data']", "['x', None, 3.0]", "[[[]]]", "[object()]",
    "[1.0, float('nan')]"),
    "tuple": ("()", "('data',)", "(1, 2)", "('data', 'data')", "('x',) * 100", "(None, object())",
    "('(',)"),
    "dict": ("{}", "{'a': 1}", "{1: 'x'}", "{'w': np.ones((8, 8), 'f4')}", "{'a': object()}",
    "{'data': {}}"),
    "set": ("set()", "{1, 2}", "frozenset({'data'})"),
    "object": ("object()", "Hostile()"),
    "function": ("(lambda *of, **more: None)", "(lambda *of, **more: object())"),
    "class": ("int", "dict", "Exception", "sl.Strategy", "np.ndarray"),
    "scalar": ("np.int64(3)", "np.uint8(200)", "np.float32('nan')", "np.float64(0.5)",
    "np.bool_(True)", "np.str_('data')",
               "np.datetime64('2020')", "np.complex64(1j)"),
    "array": ("np.zeros((0, 3))", "np.zeros(())", "np.ones((8, 8), 'f4')", "np.arange(8)",
    "np.array(['a', 'b'])",
              "np.array([object()])", "np.ones(8, 'c8')", "np.zeros(3, [('a', 'i4')])",
              "np.ones((1,) * 20, 'i1')",
              "np.array('2020', 'M8[s]')", "np.ones(8, np.longdouble)",
              "jnp.ones((8, 8), 'bfloat16')",
              "jnp.ones(8, 'float8_e4m3fn')", "jax.random.key(0)",
              "jax.ShapeDtypeStruct((8, 8), 'float32')"),
    "path": ("Path('x' * 10_000)", "Path('a/' * 3_000)", "Path('/dev/null/x')", "Path('odd\\x00')"),
    "iterator": ("(n for n in range(3))", "iter([1, 2])"),
}  # fmt: skip
"""Values by kind, each as Python."""

_ALL = tuple(VALUES)
NEVER: dict[type, tuple[str, ...]] = {
    bool: tuple(kind for kind in _ALL if kind not in ("bool", "scalar")),
    int: tuple(kind for kind in _ALL if kind not in ("int", "scalar")),
    float: tuple(kind for kind in _ALL if kind not in ("int", "float", "scalar")),
    str: tuple(kind for kind in _ALL if kind not in ("text", "scalar")),
    tuple: tuple(kind for kind in _ALL if kind not in ("tuple",)),
}
"""For an argument whose example is of a type, the kinds that can never be right."""

NEVER_AT_ALL = ("object", "nan", "bytes")
"""The kinds that are right for no argument, whatever its example is."""


@dataclass(frozen=True)
class Call:
    """A call that works.

    - `text`: Python with `{names}` for arguments; `arguments` has what works for each, as Python
      too.
    - `also`: for an argument the kinds that it takes beside those of its example; `"any"` is all of
      them.
    - `slow`: it is drawn one time in ten.
    """

    name: str
    text: str
    arguments: dict[str, str]
    also: dict[str, tuple[str, ...]] = field(default_factory=dict)
    slow: bool = False

    def written(self, changed: dict[str, str]) -> str:
        """The call with some arguments changed, as Python."""
        return self.text.format(**{**self.arguments, **changed})

    def takes(self, argument: str, kind: str, example: Any) -> bool:
        """Whether an argument may take a value of a kind; where that cannot be told, it may."""
        also = self.also.get(argument, ())
        if kind in also or "any" in also:
            return True
        return kind not in NEVER.get(type(example), NEVER_AT_ALL)


def _call(
    name: str,
    /,
    *positional: str,
    of: str = "{call}",
    also: dict[str, tuple[str, ...]] | None = None,
    slow: bool = False,
    **named: str,
) -> Call:
    """A call of `name`, with positional arguments called `at0`, `at1` and so on; `of` is what is
    written around it.
    """
    numbered = {f"at{place}": example for place, example in enumerate(positional)}
    inside = ", ".join(
        [*(f"{{{one}}}" for one in numbered), *(f"{one}={{{one}}}" for one in named)]
    )
    written = of.replace("{call}", f"{name}({inside})")
    return Call(name, written, {**numbered, **named}, also or {}, slow)


_OPTIONAL = ("none",)
_UNDER = "under(lambda: {call})"
_MANUAL = "manual(lambda x: {call})"
_ABSTRACT = "abstract(lambda: {call})"


def _strategy(**changed: str) -> dict[str, Any]:
    plain = {
        "mesh": "'data=8'", "rules": "sl.rules.data", "dcn": "''", "zero": "0", "accumulate": "1",
        "precision": "'float32'",
        "clip": "1.0", "frozen": "()", "nonfinite": "'skip'", "remat": "'none'",
        "offload": "'optimizer'",
        "exchange": "sl.Exact()",
        "manual": "('data',)", "pipeline": "None",
    }  # fmt: skip
    return plain | changed


CALLS: tuple[Call, ...] = (
    # Annotations
    _call("sl.replicate", "ones(8, 4)", of=_UNDER, also={"at0": ("array",)}),
    _call("sl.shard", "ones(8, 4)", "'batch'", "None", of=_UNDER, also={"at1": _OPTIONAL,
    "at2": ("text",)}),
    _call("sl.split", "ones(8, 4)", "0", "8", axis="'data'", of=_UNDER, also={"axis": ("none",
    "tuple")}),
    _call("sl.use", "sl.rules.data", "mesh", remat="'none'", of="entered({call})"),
    _call("sl.unsharded", of="entered({call})"),
    _call("sl.remat", "lambda x: x", "'full'", checkpoint="jax.checkpoint",
    also={"at1": _OPTIONAL}),
    _call("sl.remat", "lambda x: x", part="'scores'", also={"part": _OPTIONAL}),
    _call("sl.Offload", optimizer="True", parameters="True", update="'device'",
          activations="('block_in',)"),
    _call("sl.Remat", names="('context',)", products="'all'", dropped="('scores',)",
          offloaded="('block_in',)"),
    _call("sl.Remat", chain="sl.Remat.slots(4).chain", also={"chain": _OPTIONAL}),
    _call("sl.Remat.drop", "'scores'"),
    _call("sl.Remat.save", "'context'"),
    _call("sl.Remat.paths", "('encoder/.*', 'full')", rest="'none'", also={"rest": _OPTIONAL}),
    _call("sl.Remat.offload", "'block_in'"),
    _call("sl.Remat", compressed="(('mlp_up', 'int8'),)"),
    _call("sl.Remat.compress", "'int8'", "'mlp_up'"),
    _call("sl.Remat.every", "4"),
    _call("sl.Remat.layers", "(8, 'none')", rest="'full'", also={"rest": _OPTIONAL}),
    _call("sl.Remat.budget", "'14GiB'", offload="('block_in',)"),
    _call("sl.Remat.sublinear"),
    _call("sl.Remat.slots", "4"),
    _call("sl.checkpoint_name", "ones(4)", "'context'"),
    _call("sl.zero3_layer", "lambda x: x"),
    _call("sl.reshard", "ones(8, 4)", "P('data', None)", source="P(None, None)", of=_UNDER,
    slow=True),
    # Losses
    _call("sl.weighted_mean", "6.0", "3", also={"at0": ("nan", "inf", "array"), "at1": ("float",
    "nan", "inf", "array")}),
    _call("sl.gather_batch", "ones(8, 4)", "None", also={"at1": ("text",)}),
    _call("sl.batch_mean", "ones(8, 4)", axis="0", of=_ABSTRACT, also={"axis": ("tuple",)}),
    _call("sl.replicated_draws", "jax.random.key(0)"),
    # Models
    _call("sl.annotate", "{'w': ones(8, 4)}", "{'w': ('embed', 'mlp')}", also={"at0": ("any",)}),
    _call("sl.logical", "nnx.initializers.lecun_normal()", "'embed'", "None",
    also={"at1": _OPTIONAL, "at2": ("text",)}),
    _call("sl.Layers", "[layer(), layer()]", name="'layers'", also={"at0": ("list",)}, slow=True),
    _call("sl.specs", "model()", "rules", "mesh", also={"at0": ("any",), "at1": _OPTIONAL,
    "at2": _OPTIONAL}),
    # Meshes and rules
    _call("sl.make_mesh", "'data=8'", dcn="''", devices="jax.devices()",
    axis_type="jax.sharding.AxisType.Auto",
          allow_split_physical_axes="True", also={"at0": ("dict",), "dcn": ("dict",),
          "devices": ("none", "list")}),
    _call("sl.make_mesh", data="8"),
    _call("sl.describe_mesh", "mesh"),
    _call("sl.simulate_devices", "8"),
    _call("sl.AxisRules", "{'batch': 'data'}", embed="('data',)", heads="['data', None]",
          also={"at0": ("none", "dict"), "embed": ("none", "text", "list", "scalar"),
          "heads": ("none", "text", "tuple")}),
    _call("sl.AxisRules.knowing", "'embed'", "'mlp'"),
    _call("sl.AxisRules(heads='model', mlp='model').indivisible", "'replicate'", mlp="'drop'",
    also={"at0": _OPTIONAL}),
    _call("sl.AxisRules(heads='model').policy", "'heads'"),
    _call("sl.AxisRules(seq='context').attention", context="'ring'"),
    _call("sl.AxisRules(seq='context').attention_form", "'context'"),
    _call("sl.rules.context", form="'ring'", axis="'context'", order="'zigzag'"),
    _call("sl.context.arrange", "np.zeros((2, 8))", "1", name="'seq'"),
    _call("sl.context.restore", "np.zeros((2, 8))", "1", name="'seq'"),
    _call("sl.context.is_arranged", "8", "'seq'"),
    _call("sl.context.costs", tokens="1024", devices="8", heads="32", key_heads="8",
          head_size="128", itemsize="2"),
    _call("sl.AxisRules(heads='model').check_mesh", "{'model': 4}", also={"at0": ("dict",)}),
    # Runs
    _call("sl.Zero", "3", axes="('data',)", small="0", stacked="('layers',)",
    layers="r'layers/\\d+'", bucket_bytes="2**20",
          strict="True", also={"axes": _OPTIONAL, "layers": _OPTIONAL}),
    _call("sl.Precision", "'bf16'", keep="('.*norm.*',)", accumulate="'float32'",
    reduce="'float32'",
          also={"at0": ("none", "class"), "accumulate": ("class",), "reduce": ("class",)}),
    _call("sl.Strategy", **_strategy(),
          also={"zero": ("text",), "clip": _OPTIONAL, "manual": _OPTIONAL, "precision": _OPTIONAL}),
    _call("sl.Strategy", **_strategy(mesh="mesh", zero="sl.Zero(3)", clip="None",
    nonfinite="'skip'", manual="None")),
    _call("sl.Strategy", **_strategy(
        mesh="'data=2,stage=4'", rules="sl.rules.data | sl.rules.pipeline", manual="None",
        remat="'stage'",
        pipeline="sl.pipeline.OneFOneB(4, 8)",
    ), also={"clip": _OPTIONAL, "precision": _OPTIONAL}),
    _call("strategy.scope", of="entered({call})"),
    _call("sl.init", "model", "optax.adam(1e-3)", "strategy", seed="0", trainable="None",
    abstract="True",
          also={"at0": ("any",), "at1": _OPTIONAL, "trainable": ("any",)}),
    _call("sl.init", "lambda: layer()", "None", "strategy", seed="0", trainable="nnx.Param",
    abstract="True",
          also={"at0": ("any",), "trainable": ("any",)}),
    _call("state.with_weights", "{'w': ones(8, 4)}", also={"at0": ("any",)}, slow=True),
    _call("sl.describe", "state"),
    _call("sl.train_step", "loss", "strategy"),
    _call("step", "copied(state)", "{'x': ones(8, 8)}", also={"at1": ("any",)}, slow=True),
    _call("step.trace", "state", "{'x': ones(8, 8)}", also={"at1": ("any",)}),
    _call("step.lower", "state", "{'x': ones(8, 8)}", also={"at1": ("any",)}, slow=True),
    _call("sl.evaluation", "loss", "strategy"),
    _call("evaluation", "state", "[{'x': ones(8, 8)}]", at_most="1", also={"at1": ("any",),
    "at_most": _OPTIONAL}, slow=True),
    _call("evaluation.trace", "state", "{'x': ones(8, 8)}", also={"at1": ("any",)}),
    _call("sl.batches", "[{'x': ones(8, 8)}]", "strategy", ahead="1", of="first({call})",
    also={"at0": ("any",)}),
    _call("sl.batches([], strategy).restore", "{'batches': 1, 'source': None}"),
    _call("sl.local_rows", "8", "strategy"),
    _call("sl.Loop", steps="10", log_every="1", evaluate_every="5", save_every="5", keep="1",
    keep_every="10", nonfinite="3",
          profile="(1, 2)", also={"keep_every": _OPTIONAL, "profile": _OPTIONAL}),
    _call("sl.fit", "step", "copied(state)", "[{'x': ones(8, 8)}] * 2", "sl.Loop(steps=2)",
    folder="None", evaluate="None",
          records="sl.Records(sinks=[silent])", about="{'a': 1}",
          also={"at2": ("any",), "folder": ("any",), "evaluate": ("any",), "records": _OPTIONAL,
                "about": ("any",)}, slow=True),
    _call("sl.Records", sinks="[silent]", watch="{'rate': silent_number}", unit="'examples'",
          flops_per_unit="1.0",
          also={"sinks": ("any",), "watch": ("any",), "flops_per_unit": _OPTIONAL}),
    _call("sl.Checkpoints", "folder()", keep="2", keep_every="3", of="closed({call})",
          also={"at0": ("text",), "keep_every": _OPTIONAL}, slow=True),
    _call("sl.Checkpoints(folder()).save", "state", data="None", about="{'a': 1}",
          also={"data": ("any",), "about": ("any",)}, slow=True),
    _call("checkpoints.restore", "state", step="None", release="False", also={"step": ("any",)},
    slow=True),
    _call("checkpoints.about", "None", also={"at0": ("any",)}, slow=True),
    _call("sl.JsonLines", "'metrics.jsonl'", also={"at0": ("path",)}),
    _call("sl.JsonLines('records.jsonl')", "{'step': 1, 'loss': 2.0}", also={"at0": ("any",)}),
    _call("sl.TensorBoard", "'board'", also={"at0": ("path",)}),
    _call("sl.Progress", "10", file="io.StringIO()", width="24", also={"file": _OPTIONAL}),
    _call("sl.Progress(10, io.StringIO())", "{'step': 1, 'loss': 2.0}", also={"at0": ("any",)}),
    _call("sl.require_agreement", "{'configuration': 'batch = 8'}", also={"at0": ("dict",)}),
    _call("sl.initialize_distributed"),
    # Exchanges
    _call("sl.Exact", "2**20", overlap="True"),
    _call("sl.collectives.OneBit", "'data'", feedback="True", exact="('w',)", scale="'mean'",
    block="2048",
          also={"at0": ("tuple",)}),
    _call("sl.collectives.Quantised", "('data',)", feedback="True", exact="()", bits="8",
    block="256", also={"at0": ("text",)}),
    _call("sl.collectives.PowerSGD", "('data',)", rank="4", ranks="(('w', 2),)", feedback="True",
    exact="()", also={"at0": ("text",)}),
    _call("sl.collectives.TopK", "('data',)", part="0.1", feedback="True", exact="()",
    also={"at0": ("text",)}),
    _call("sl.collectives.LocalSGD", "('data',)", every="4", exchange="None", fragments="2",
    overlap="True", also={"at0": ("text",), "exchange": _OPTIONAL}),
    _call("sl.collectives.DiLoCo", "('data',)", every="4", exchange="None", fragments="2",
    overlap="True", learning_rate="0.7", momentum="0.9",
    also={"at0": ("text",), "exchange": _OPTIONAL}),
    _call("sl.collectives.ElasticAveraging", "('data',)", every="4", exchange="None",
    fragments="2", overlap="True", rate="0.9", also={"at0": ("text",), "exchange": _OPTIONAL}),
    _call("sl.collectives.ParameterServer", "('data',)", also={"at0": ("text",)}),
    _call("sl.collectives.Signs", "'mean'", block="2048"),
    _call("sl.collectives.Integers", "8", block="256"),
    _call("sl.collectives.Signs().size", "64"),
    _call("sl.collectives.Integers().size", "64"),
    _call("sl.collectives.Signs().encode", "ones(2, 64)", alive="None", of=_ABSTRACT,
    also={"alive": ("array",)}),
    _call("sl.collectives.Integers().encode", "ones(2, 64)", alive="None", of=_ABSTRACT,
    also={"alive": ("array",)}),
    _call("sl.collectives.Signs().decode", "np.zeros((2, 12), 'u1')", "64", of=_ABSTRACT),
    _call("sl.collectives.Integers().decode", "np.zeros((2, 68), 'u1')", "64", of=_ABSTRACT),
    _call("sl.collectives.all_gather", "x", "'data'", "sl.collectives.Signs()", dim="0",
    of=_MANUAL, also={"at1": ("tuple",)}),
    _call("sl.collectives.psum_scatter", "x", "'data'", "sl.collectives.Signs()", dim="0",
    of=_MANUAL, also={"at1": ("tuple",)}),
    _call("sl.collectives.pmean", "x", "'data'", "sl.collectives.Signs()", "None", alive="None",
    shared="()", of=_MANUAL,
          also={"at0": ("any",), "at1": ("tuple",), "shared": ("text",), "at3": ("any",),
          "alive": ("any",)}),
    _call("sl.collectives.no_errors", "x", "'data'", shared="()", of=_MANUAL,
          also={"at0": ("any",), "at1": ("tuple",), "shared": ("text",)}),
    _call("sl.collectives.pmean_bytes", "64", "8", "sl.collectives.Signs()", shared="1"),
    _call("sl.collectives.all_gather_bytes", "64", "8", "sl.collectives.Signs()"),
    _call("sl.collectives.psum_scatter_bytes", "64", "8", "sl.collectives.Signs()"),
    # Optimizers
    _call("sl.optimizers.per_layer_and_expert", "optax.lamb(0.1)", "lambda path, leaf: 0"),
    _call("sl.optimizers.onebit_adam", "1e-3", freeze="0.2", b1="0.9", b2="0.99", eps="1e-8",
    weight_decay="0.1", mask="None",
          steps="100", also={"at0": ("function", "array"), "freeze": ("text",), "mask": ("any",),
          "steps": _OPTIONAL}),
    _call("sl.optimizers.onebit_lamb", "1e-3", freeze="0.2", b1="0.9", b2="0.99", eps="1e-8",
    weight_decay="0.1", mask="None", ratios="(0.01, 10.0)", factors="(0.5, 4.0)", memory="0.9",
          steps="100", also={"at0": ("function", "array"), "freeze": ("text",), "mask": ("any",),
          "steps": _OPTIONAL}),
    _call("sl.optimizers.zero_one_adam", "1e-3", freeze="0.2", kappa="16", apart="0.1",
    double="0.2", longest="16", b1="0.9", b2="0.99", eps="1e-8", weight_decay="0.1", mask="None",
          steps="100", also={"at0": ("function", "array"), "mask": ("any",),
          "steps": _OPTIONAL}),
    _call("sl.optimizers.delayed", "optax.sgd(0.1)", "1"),
    _call("sl.optimizers.Apart", "silent", "silent", averages="silent", alike="silent",
    meets="silent", message="silent", met="silent", for_run="silent", unmasked="silent",
    also={"unmasked": _OPTIONAL}),
    _call("sl.optimizers.Local", "silent", "silent", sends="silent", message="silent",
    for_run="silent", unmasked="silent", also={"unmasked": _OPTIONAL}),
    # Experts
    _call("sl.experts.local_experts", "8"),
    _call("sl.experts.load_picture", "[{'step': 1, 'load': [1.0, 1.0]}]", "'load'"),
    _call("sl.experts.Top2", "1.0", jitter="0.1", also={"at0": _OPTIONAL}),
    _call("sl.experts.Switch", "1.0", jitter="0.1", also={"at0": _OPTIONAL}),
    _call("sl.experts.TopK", "2", capacity="1.0", jitter="0.1", renormalize="True", groups="2",
    groups_taken="1", also={"capacity": _OPTIONAL}),
    _call("sl.experts.SigmoidTopK", "2", capacity="1.0", jitter="0.1", scale="2.5",
    normalize="True", groups="2", groups_taken="1", also={"capacity": _OPTIONAL}),
    _call("sl.experts.NoisyTopK", "2", capacity="1.0", importance="1.0", load="1.0",
    also={"capacity": _OPTIONAL}),
    _call("sl.experts.Hash", "2", capacity="1.0", seed="0", also={"capacity": _OPTIONAL}),
    _call("sl.experts.ExpertChoice", "2.0", sees_later_tokens="True"),
    _call("sl.experts.shares", "sl.experts.Seen(ones(4, 2))",
    "sl.experts.TopK(1).choose(sl.experts.Seen(ones(4, 2)))"),
    _call("sl.experts.balanced", "optax.sgd(0.1)", "0.1", pattern="'.*bias'",
    also={"at1": ("function",)}),
    _call("sl.experts.moe", "ones(2, 4, 8)", "sl.experts.TopK(1)", "lambda w, x: x @ w",
    gate="ones(8, 2)",
          weights="ones(2, 8, 8)", key="jax.random.key(0)", group="4", form="'scatter'",
          real="None",
          names="('batch', 'seq', 'act_embed')", of="unsharded(lambda: {call})",
          also={"weights": ("any",), "key": _OPTIONAL, "group": _OPTIONAL, "names": ("any",)}),
    _call("sl.experts.dropless", "ones(2, 4, 8)", "sl.experts.TopK(1)",
    "lambda w, x, groups: sl.kernels.grouped_matmul(x, w, groups)", gate="ones(8, 2)",
          weights="ones(2, 8, 8)", key="jax.random.key(0)", group="4", buffer="1.25",
          sending="'dense'", real="None", bias="None", noise_gate="None", ids="None",
          names="('batch', 'seq', 'act_embed')", of="unsharded(lambda: {call})",
          also={"weights": ("any",), "key": _OPTIONAL, "group": _OPTIONAL, "names": ("any",),
          "sending": _OPTIONAL}),
    _call("sl.experts.moe", "ones(2, 4, 8)", "sl.experts.SigmoidTopK(1)", "lambda w, x: x @ w",
    gate="ones(8, 2)", weights="ones(2, 8, 8)", bias="ones(2)", causal="True",
          of="unsharded(lambda: {call})", also={"weights": ("any",), "bias": _OPTIONAL}),
    _call("sl.experts.moe", "ones(2, 4, 8)", "sl.experts.NoisyTopK(1)", "lambda w, x: x @ w",
    gate="ones(8, 2)", weights="ones(2, 8, 8)", noise_gate="ones(8, 2)",
          of="unsharded(lambda: {call})", also={"weights": ("any",)}),
    _call("sl.experts.moe", "ones(2, 4, 8)", "sl.experts.Hash()", "lambda w, x: x @ w",
    gate="ones(8, 2)", weights="ones(2, 8, 8)", ids="np.zeros((2, 4), 'i4')",
          of="unsharded(lambda: {call})", also={"weights": ("any",)}),
    # Kernels
    _call("sl.kernels.softmax", "ones(4, 128)", names="None", where="None", scale="1.0",
    causal="False",
          implementation="'reference'", of=_ABSTRACT, also={"implementation": _OPTIONAL}),
    _call("sl.kernels.rms_norm", "ones(4, 128)", "ones(128)", residual="None", names="None",
    epsilon="1e-6",
          implementation="'reference'", of=_ABSTRACT, also={"implementation": _OPTIONAL}),
    _call("sl.kernels.layer_norm", "ones(4, 128)", "ones(128)", "ones(128)", residual="None",
    names="None", epsilon="1e-6",
          implementation="'reference'", of=_ABSTRACT, also={"implementation": _OPTIONAL}),
    _call("sl.kernels.glu", "ones(4, 128)", "ones(4, 128)", activation="'silu'", of=_ABSTRACT),
    _call("sl.kernels.activate", "ones(4, 128)", "ones(128)", activation="'gelu_tanh'",
          of=_ABSTRACT, also={"at1": _OPTIONAL}),
    _call("sl.kernels.rotate", "ones(4, 128)", "ones(4, 64)", "ones(4, 64)", of=_ABSTRACT),
    _call("sl.kernels.grouped_matmul", "ones(4, 8)", "ones(2, 8, 16)", "jnp.array([1, 2])",
          names="None", implementation="'reference'", of="unsharded(lambda: {call})",
          also={"names": _OPTIONAL, "implementation": _OPTIONAL}),
    _call("sl.kernels.Groups", "jnp.array([[1, 2]])", row_axes="()", feature_axes="()",
    also={"at0": ("any",), "row_axes": ("any",), "feature_axes": ("any",)}),
    _call("sl.kernels.projections", "ones(4, 8)", "[ones(16, 8), ones(8, 8)]",
          names="None", outputs="None", joined="None", of=_ABSTRACT,
          also={"names": _OPTIONAL, "outputs": _OPTIONAL, "joined": _OPTIONAL}),
    _call("sl.kernels.linear_cross_entropy", "ones(4, 8)", "ones(16, 8)", "np.zeros(4, 'i4')",
    names="None", vocab_name="None",
          vocab="16", z_loss="0.1", smoothing="0.1", cap="30.0", ignored="-1",
          implementation="'reference'", of=_ABSTRACT,
          also={"vocab": _OPTIONAL, "cap": _OPTIONAL, "implementation": _OPTIONAL}),
    _call("sl.kernels.attention", "ones(1, 4, 2, 8)", "ones(1, 4, 2, 8)", "ones(1, 4, 2, 8)",
          names="None", kv_names="None", arranged="False", causal="True", window="(2, None)",
          segment_ids="np.zeros((1, 4), 'i4')", block_mask="None", scale="1.0", soft_cap="None",
          sinks="None", starts="(0, 0)", with_lse="False", implementation="'reference'",
          of=_ABSTRACT, also={"window": ("int", "none"), "segment_ids": _OPTIONAL,
                              "starts": _OPTIONAL, "implementation": _OPTIONAL}),
    _call("sl.kernels.BlockMask", "np.ones((2, 2), bool)", "8"),
    _call("sl.kernels.fixed_blocks", "64", "8", local="4", summaries="1"),
    _call("sl.kernels.longformer_blocks", "64", "8", window="3", everywhere="(0,)"),
    _call("sl.kernels.bigbird_blocks", "64", "8", window="3", everywhere="(0,)", random="1",
          seed="0"),
    _call("sl.kernels.on_shards", "lambda x: x", "[('batch', None)]", "('batch', None)",
          also={"at0": ("any",), "at1": ("any",), "at2": ("any",)}),
    _call("sl.kernels.in_tiles", "lambda x: x", "ones(4, 8)", "2", names="None"),
    _call("sl.kernels.explain", "sl.kernels.softmax", "ones(4, 128)", also={"at1": ("any",)}),
    # Pipelines
    *(_call(f"sl.pipeline.SCHEDULES[{name!r}]", "2", "4") for name in SCHEDULES),
    *(_call(f"sl.pipeline.SCHEDULES[{name!r}]", "2", "4",
    costs="sl.pipeline.UNIT") for name in ("zb-v", "zb-1p", "zb-2p")),
    *(_call(f"sl.pipeline.{name}", "2", "4", paired="True")
      for name in ("GPipe", "OneFOneB", "Eager1F1B", "ZBH1", "ZBH2", "VMin", "VHalf", "DualPipeV")),
    _call("sl.pipeline.Interleaved", "2", "4", chunks="2", paired="True"),
    _call("sl.pipeline.ZBV", "2", "4", costs="sl.pipeline.UNIT", paired="True"),
    _call("sl.pipeline.ZeroBubble", "2", "4", costs="sl.pipeline.UNIT", limit="2.0", paired="True",
          also={"limit": ("none", "inf")}),
    *(_call(f"sl.pipeline.{name}(2, 4).gap", "sl.pipeline.UNIT")
      for name in ("GPipe", "OneFOneB", "Eager1F1B", "ZBH1", "ZBH2", "Interleaved", "VMin",
      "VHalf", "ZBV", "DualPipeV")),
    _call("sl.pipeline.Costs", "1.0", "(1.0, 2.0)", weights="1.0", send="0.5", kept="0.5",
          also={"at0": ("tuple", "list", "array"), "at1": ("float", "int", "list", "array",
          "scalar"),
                "weights": ("tuple", "list", "array")}),
    _call("sl.pipeline.Op", "'F'", "0", "0", of="sl.pipeline.Table((({call},),), (0,))"),
    _call("sl.pipeline.Table", "((('F', 0, 0), ('B', 0, 0)),)", "(0,)", also={"at0": ("list",),
    "at1": ("list",)}),
    _call("sl.pipeline.Table.parse", "'F0 B0'", placement="None", also={"placement": ("tuple",
    "list")}),
    _call("sl.pipeline.Custom", "table", paired="True"),
    _call("sl.pipeline.simulate", "table", "sl.pipeline.UNIT"),
    _call("sl.pipeline.pack", "table", "True"),
    _call("sl.pipeline.pack(table, True).makespan", "sl.pipeline.UNIT"),
    _call("sl.pipeline.pack(table, True).bubble", "sl.pipeline.UNIT"),
    _call("sl.pipeline.svg", "timeline", title="'a title'"),
    _call("sl.pipeline.text", "timeline", width="80", colour="False"),
    # Planning
    _call("sl.break_even", parameters="1e9", workers="8", bandwidth="3e9", shards="8",
          exchange="sl.collectives.OneBit('pod')", compute_seconds="0.1",
          memory_bandwidth="8e11", itemsize="4", width="64",
          optimizer="sl.optimizers.onebit_adam(0.1, freeze=2)", steps="10",
          also={"bandwidth": ("inf",), "memory_bandwidth": ("inf",), "exchange": _OPTIONAL,
          "width": _OPTIONAL}),
    _call("sl.planning.Decoder", layers="2", width="64", heads="4", sequence="32", vocab="256",
    kv_heads="2", head_dim="16",
          hidden="128", norm="'layer'", mlp="'gelu'", positions="'learned'", bias="True",
          tied="True", final_norm="True",
          also={"kv_heads": _OPTIONAL, "head_dim": _OPTIONAL, "hidden": _OPTIONAL}),
    _call("decoder.modules", "1", itemsize="2", tensor="1"),
    _call("decoder.megatron_activation_bytes", "1", tensor="1", sequence_parallel="False",
    recompute="'none'"),
    _call("sl.zero_bytes", "1000", devices="8", stage="1", weights="2", gradients="2", state="12"),
    _call("sl.planning.ItemSizes", compute="2", parameters="4", weights="2",
          also={"weights": _OPTIONAL}),
    _call("sl.planning.Parallelism", data="8", zero="1", tensor="1", sequence="False"),
    _call("sl.estimate", "decoder", examples="4", itemsizes="sl.planning.ItemSizes()",
          parallelism="sl.planning.Parallelism()", optimizer="'adamw'", recompute="'none'",
          accumulate="2", training="True",
          also={"itemsizes": _OPTIONAL, "parallelism": _OPTIONAL}),
    _call("sl.Target", "'cpu:8'"),
    _call("sl.Target('cpu:8').mesh", "'data=8'", dcn="''"),
    _call("sl.plan", "step", "state", "{'x': ones(8, 8)}", target="'cpu:8'", estimate="None",
    name="'the step'",
          also={"at0": ("any",), "at2": ("any",), "target": _OPTIONAL}, slow=True),
    _call("sl.planning.flops", "step", "state", "{'x': ones(8, 8)}",
          also={"at0": ("any",), "at1": ("any",), "at2": ("any",)}, slow=True),
    _call("sl.planning.frontier", "blocks_step", "blocks_state", "ones(8, 8)", target="'cpu:8'",
          points="0", compiled="False", cache="None",
          also={"at2": ("any",), "target": _OPTIONAL, "cache": _OPTIONAL}, slow=True),
    _call("sl.planning.largest_microbatch", "blocks_step", "blocks_state", "ones(8, 8)",
          target="'cpu:8'", memory="'1GiB'", cache="None",
          also={"at2": ("any",), "target": _OPTIONAL, "memory": _OPTIONAL, "cache": _OPTIONAL},
          slow=True),
    # Data
    _call("sl.data.Corpus", "'*.txt'", format="'text'", field="None", separator="None",
    tokenizer="'bytes'", end="None",
          held_out="0.1", bad="'stop'", also={"at0": ("tuple",), "tokenizer": ("path",)}),
    _call("sl.data.Chat", "'{role}: '", "'\\n'", between="'\\n'", begin="''",
          roles="(('user', 'user'),)", learned="('user',)", special="()",
          also={"roles": ("list",), "learned": ("list",), "special": ("list",)}),
    _call("sl.data.cache_folder", "'cache'", also={"at0": ("none", "path")}),
    _call("sl.data.load_tokenizer", "'bytes'", end="None"),
    _call("sl.data.prepare", "corpus", "'cache'", also={"at1": ("none", "path")}, slow=True),
    _call("sl.data.Tokens", "np.zeros(64, 'u2')", "np.array([64])", "257", "256", "64",
    fingerprint="'f'"),
    _call("sl.data.Sequences", "tokens", length="8", batch="2", seed="0", documents="'cut'",
    also={"seed": _OPTIONAL}),
    # LoRA
    _call("sl.lora.add", "nnx.Linear(8, 8, rngs=nnx.Rngs(0))", "2", alpha="4.0", paths="('.*',)",
          rngs="nnx.Rngs(0)", also={"alpha": _OPTIONAL, "paths": ("list",)}),
    _call("sl.lora.merged", "adapted()"),
    # Weights
    _call("sl.weights.Part", "'two'", "0", "2"),
    _call("sl.weights.Span", "'in'", "0", "2"),
    _call("sl.weights.Rule", "'h.{layers}.w'", "'w'", "'in -> layers in'", "None",
          numbers="{'layers': (0, 1)}", orders="{'in': (1, 0)}", also={"at3": _OPTIONAL}),
    _call("sl.weights.Table", "names.rules", ignored="('x',)", sizes="{'in': 3}"),
    _call("sl.weights.save", "folder()", "{'w': ones(2, 3)}", "names", dtype="'bfloat16'",
          file_size="'5GB'", also={"at1": ("any",), "dtype": ("none", "class")}, slow=True),
    _call("sl.weights.open_tensors", "files[0]", also={"at0": ("text",)}),
    _call("sl.weights.load", "files[0]", "{'w': ones(2, 3)}", "names",
          keep="()", release="False", also={"at0": ("text",), "at1": ("any",)}, slow=True),
    _call("sl.weights.local_folder", "'runs/tiny'", also={"at0": ("text",)}),
    # Testing
    _call("sl.testing.mesh_shapes", "('data', 'model')", devices="8", also={"at0": ("list",),
    "devices": _OPTIONAL}),
    _call("sl.testing.count_traces", "silent"),
    _call("sl.testing.memory_traffic", "compiled"),
    _call("sl.testing.collectives", "compiled", "mesh", also={"at0": ("text",), "at1": _OPTIONAL}),
    _call("sl.testing.summary", "sl.testing.collectives(compiled)", also={"at0": ("any",)}),
    _call("sl.testing.assert_collectives", "step", "state", "{'x': ones(8, 8)}", sends="{}",
          target="None", ignore_below="2**20", also={"at0": ("any",), "at1": ("any",),
          "at2": ("any",), "sends": ("any",)},
          slow=True),
    _call("sl.testing.assert_memory", "step", "state", "{'x': ones(8, 8)}",
    at_most="{'parameters': 2**20}", target="None",
          also={"at0": ("any",), "at1": ("any",), "at2": ("any",), "at_most": ("any",)}, slow=True),
)  # fmt: skip

NOT_CALLED: dict[str, str] = {
    **dict.fromkeys(
        (
            "WeightedMean", "Chip", "collectives.Parameter", "BreakEven", "planning.Estimate",
            "planning.Module", "planning.Memory", "planning.Flops", "planning.Activation",
            "planning.Frontier", "planning.FrontierPoint", "planning.LargestMicrobatch",
            "planning.TriedMicrobatch",
            "planning.Piece", "Plan", "planning.Price", "Restored",
            "Description", "State", "collectives.Encoded", "collectives.Errors",
            "collectives.ExchangeInputs", "experts.MoEStats",
            "experts.Choices", "experts.Seen", "experts.Shares", "experts.Taken",
            "kernels.Explained", "kernels.Explanation",
            "optimizers.OneBitAdamState", "optimizers.OneBitLambState",
            "optimizers.ZeroOneAdamState", "optimizers.DelayedState", "pipeline.Ticks",
            "pipeline.Timeline", "data.Skipped", "data.Prepared", "data.Reader", "testing.Moved",
            "testing.Collective",
            "testing.Comparison", "Batches", "Evaluation", "Step", "testing.CountedTraces",
            "lora.Adapter",
        ),
        "made by the library, and given to users",
    ),
    **dict.fromkeys(
        ("collectives.Codec", "experts.Router", "pipeline.Schedule", "data.Tokenizer", "Exchange",
        "experts.Form", "experts.DispatchOptions",
        "experts.DroplessOptions", "kernels.LossOptions",
        "kernels.AttentionOptions"),
        "a class to derive from, or a type",
    ),
    **dict.fromkeys(
        ("pipeline.UNIT", "lora.FROZEN", "lora.PARAMETERS", "ShardingWarning"),
        "a value, or a warning",
    ),
    "testing.check_step": "compiles for seconds; its arguments are those of `init`, `train_step` "
                          "and `Strategy`",
}  # fmt: skip
"""Public names that are not called, and why."""


class Hostile:
    """An object of which nothing works."""

    def _fail(self, *of: Any, **more: Any) -> Any:
        raise ArithmeticError("hostile")

    __repr__ = __str__ = __len__ = __eq__ = __hash__ = __bool__ = __float__ = __index__ = (
        __array__
    ) = _fail


def namespace() -> dict[str, Any]:
    """The names that calls and values are written with."""
    rules = sl.AxisRules(batch="data", embed=None, mlp=None)
    strategy = sl.Strategy(mesh="data=8", rules=rules)
    mesh = strategy.device_mesh
    state = sl.init(_model, optax.sgd(0.1), strategy)
    step = sl.train_step(_loss, strategy)
    table = sl.pipeline.Table.parse("F0 F1 B0 B1\nF0 B0 F1 B1")
    Path("text.txt").write_text("one\ntwo\n" * 20)
    tokens = sl.data.Tokens(np.zeros(64, np.uint16), np.array([64]), 257, 256, 64)

    def under(call: Callable[[], Any]) -> Any:
        with sl.use(sl.AxisRules(batch="data", embed=None), mesh):
            return call()

    def unsharded(call: Callable[[], Any]) -> Any:
        with sl.unsharded():
            return jax.eval_shape(lambda: jax.tree.leaves(call()))

    def manual(call: Callable[[Any], Any]) -> Any:
        def on_shard(x: Any) -> Any:
            made.append(call(x))
            return x

        made: list[Any] = []
        spec = PartitionSpec("data")
        return jax.eval_shape(
            jax.shard_map(on_shard, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False),
            _ones(64, 8),
        )

    checkpoints = sl.Checkpoints(_folder())
    names = sl.weights.Table((sl.weights.Rule("h.{layers}.w", "w", "in -> layers in"),))
    files = sl.weights.save(_folder(), {"w": _ones(2, 3)}, names)
    checkpoints.save(state)
    checkpoints.wait()
    return {
        "sl": sl,
        "np": np,
        "jnp": jnp,
        "jax": jax,
        "optax": optax,
        "nnx": nnx,
        "Path": Path,
        "P": PartitionSpec,
        "io": io,
        "Hostile": Hostile,
        "ones": _ones,
        "rules": rules,
        "strategy": strategy,
        "mesh": mesh,
        "state": state,
        "step": step,
        "evaluation": sl.evaluation(_loss, strategy),
        "model": _model,
        "loss": _loss,
        "blocks_step": sl.train_step(_loss_of_blocks, strategy),
        "blocks_state": state,
        "layer": _layer,
        "under": under,
        "unsharded": unsharded,
        "manual": manual,
        "abstract": lambda call: jax.eval_shape(lambda: jax.tree.leaves(call())),
        "entered": _entered,
        "closed": _closed,
        "folder": _folder,
        "copied": lambda tree: jax.tree.map(jnp.copy, tree),
        "first": lambda batches: _first(batches),
        "silent": lambda *of, **more: None,
        "silent_number": lambda *of: 0.0,
        "table": table,
        "timeline": sl.pipeline.simulate(table),
        "checkpoints": checkpoints,
        "names": names,
        "adapted": lambda: sl.lora.add(nnx.Linear(8, 8, rngs=nnx.Rngs(0)), 2, rngs=nnx.Rngs(1)),
        "files": files,
        "tokens": tokens,
        "decoder": sl.planning.Decoder(layers=2, width=64, heads=4, sequence=32, vocab=256),
        "corpus": sl.data.Corpus("text.txt"),
        "compiled": jax.jit(lambda x: x @ x).lower(_ones(8, 8)).compile(),
    }


def _ones(*shape: int) -> Any:
    return jnp.ones(shape, jnp.float32)


def _model() -> Any:
    return sl.annotate({"w": jnp.ones((8, 4))}, {"w": ("embed", "mlp")})


def _layer() -> nnx.Module:
    return nnx.Linear(4, 4, rngs=nnx.Rngs(0))


def _loss(model: Any, batch: Any, rng: Any) -> Any:
    return jnp.mean((batch["x"] @ model["w"]) ** 2)


def _loss_of_blocks(model: Any, batch: Any, rng: Any) -> Any:
    def block(x: Any) -> Any:
        return sl.checkpoint_name(jnp.tanh(x @ model["w"]), "squashed")

    return jnp.mean(sl.remat(block)(batch) ** 2)


def _entered(context: Any) -> None:
    with context:
        pass


def _closed(checkpoints: Any) -> None:
    checkpoints.close()


def _first(batches: Iterator[Any]) -> Any:
    with contextlib.closing(batches):  # type: ignore[type-var]
        return next(batches, None)


def _folder() -> str:
    return tempfile.mkdtemp(dir=Path.cwd())
