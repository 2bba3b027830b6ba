"""A strategy: everything that decides how a machine runs a model, as one value that prints,
compares and hashes.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, Literal

import optax
from jax.sharding import Mesh

from shardlib.checks import _arguments as check
from shardlib.collectives._exact import Exact, Exchange
from shardlib.collectives._zero import Zero, resolve_zero
from shardlib.layouts._annotate import Remat, Scope, use
from shardlib.layouts._rules import BATCH, EXPERTS, LAYERS, AxisRules, as_tuple, counts_layers
from shardlib.machine._mesh import make_mesh, parse_axes, slow_axes
from shardlib.machine._portable_mesh import PortableMesh
from shardlib.modeling._remat import REMATS
from shardlib.pipeline._program import table_of
from shardlib.pipeline.schedules._schedule import Schedule
from shardlib.pipeline.schedules._table import Table
from shardlib.step._precision import Precision, resolve_precision


@dataclass(frozen=True)
class Strategy:
    """How to run a model on a mesh.

    - `mesh`: text such as `"data=2,model=4"`, of the devices JAX has, or a `Mesh` (of devices that
      are not there, say).
    - `rules`: which names those axes split.
    - `dcn`: which of the axes cross the data-centre network, as in `make_mesh`.
    - `zero`: ZeRO's stage, 0 to 3, one of FSDP's names (`"FULL_SHARD"`, `"SHARD_GRAD_OP"`,
      `"HYBRID_SHARD"`), or a `Zero`: what is split over the axes of data.
    - `accumulate`: microbatches per step, whose gradients are summed, in float32 unless `precision`
      says otherwise.
    - `precision`: the dtype to compute in, `"bf16"`, or a `Precision`. What is stored are the
      master weights.
    - `clip`: the global norm above which a gradient is scaled down to it, or an optax
      transformation without state that clips otherwise: `optax.clip(1.0)` by value,
      `optax.adaptive_grad_clip(0.01)` adaptively.
    - `frozen`: patterns that match the whole path of parameters which stay as they are: no
      gradient, no state.
    - `nonfinite`: what happens to a step whose gradient is not finite: it is counted; and `"skip"`
      leaves parameters and optimizer as they were, `"count"` takes the step all the same, so that
      one bad batch may make every parameter nan.
    - `remat`: what is kept for the backward pass: `"none"` keeps all activations; `"full"` keeps
      only the inputs of blocks marked with `sl.remat`; `"stage"`, under a pipeline, keeps only what
      was sent to each stage, and, while a stage is recomputed, only the inputs of its blocks.
    - `exchange`: what happens to gradients between devices: `sl.Exact()`, or over some of the axes
      of data what `sl.collectives` has, `sl.collectives.OneBit("pod")`.
    - `pipeline`: a schedule, such as `sl.pipeline.OneFOneB(stages=4, microbatches=16)`: the axis
      that the rule `layers` names has a stage at each place, and the microbatches go through as the
      schedule says. (To the trainer, `1f1b:4:16`.)
    - `draws`: `"same"`, random numbers are the same on every mesh, and keys of other
      implementations than threefry are refused. `"by_mesh"`, they may depend on the mesh, so that
      keys of `rbg`, faster on TPUs, may be used; the key that a loss is given is then of JAX's
      default implementation, `jax_default_prng_impl`.
    - `manual`: the axes over which the step is manual, so that local gradients exist. By default
      the axes of the batch that split nothing else but `experts`; an axis that splits other weights
      too, as in `sl.rules.fsdp`, is left to the partitioner.

    >>> import shardlib as sl
    >>> sl.Strategy(mesh="data=2,model=4", rules=sl.rules.data | sl.rules.tensor,
    ...     accumulate=4).data_axes
    ('data',)
    """

    mesh: str | Mesh
    rules: AxisRules
    dcn: str = ""
    zero: int | str | Zero = 0
    accumulate: int = 1
    precision: str | Precision = "float32"
    clip: float | optax.GradientTransformation | None = None
    frozen: tuple[str, ...] = ()
    nonfinite: Literal["skip", "count"] = "skip"
    remat: Remat = "none"
    exchange: Exchange = field(default_factory=Exact)
    manual: tuple[str, ...] | None = None
    pipeline: Schedule | None = None
    draws: Literal["same", "by_mesh"] = "same"

    def __post_init__(self) -> None:
        check.kind(
            "Strategy", "rules", self.rules, AxisRules, "`AxisRules`, such as `sl.rules.data`"
        )
        check.kind(
            "Strategy",
            "mesh",
            self.mesh,
            str | Mesh,
            'text such as `"data=2,model=4"`, or a mesh: `sl.make_mesh(...)`',
        )
        check.text(
            "Strategy", "dcn", self.dcn, 'text: `"pod"`, or `"data=2"` for a factor of an axis'
        )
        if not isinstance(self.mesh, str) and self.dcn:
            raise ValueError(
                f"`Strategy(dcn={self.dcn!r})` is for a mesh given as text; this one is made: "
                "`sl.make_mesh(..., dcn=...)`."
            )
        accumulate = check.whole(
            "Strategy",
            "accumulate",
            self.accumulate,
            "a number of microbatches",
            least=1,
            most=2**31 - 1,
        )
        takes = 'an exchange, such as `sl.Exact()` or `sl.collectives.OneBit("data")`'
        check.kind("Strategy", "exchange", self.exchange, Exchange, takes)
        check.texts("Strategy", "manual", self.manual, "a tuple of axes", optional=True)
        check.patterns("Strategy", "frozen", self.frozen)
        check.choice("Strategy", "nonfinite", self.nonfinite, ("skip", "count"))
        check.choice("Strategy", "draws", self.draws, ("same", "by_mesh"))
        check.choice("Strategy", "remat", self.remat, REMATS)
        clip = self.clip
        if clip is not None and not isinstance(clip, optax.GradientTransformation):
            takes = (
                "a largest global norm, or an optax transformation without state, such as "
                "`optax.clip(1.0)`"
            )
            clip = check.number("Strategy", "clip", clip, takes, above=0)
        check.assign(self, accumulate=accumulate, clip=clip)
        axes = parse_axes(self.mesh) if isinstance(self.mesh, str) else dict(self.mesh.shape)
        self.rules.check_mesh(axes)
        if not isinstance(self.mesh, str) and self.mesh.explicit_axes:
            raise ValueError(
                f"`Strategy(mesh=...)` has the explicit axes {self.mesh.explicit_axes}; the step "
                "needs automatic ones: `sl.make_mesh(...)` makes them. Annotations alone work on "
                "explicit axes: `with sl.use(rules, mesh):`."
            )
        for axis in self.manual or ():
            if axis not in self.rules.batch_axes:
                raise ValueError(
                    f"`Strategy(manual={self.manual})`: `{axis}` does not split the batch; its "
                    f"axes are {self.rules.batch_axes}."
                )
        resolve_precision(self.precision)
        zero = self.sharding
        self._check_exchange(axes, zero)
        self._check_pipeline(axes)

    def __getstate__(self) -> dict[str, Any]:
        """The fields alone: what was derived from them holds devices, which belong to this
        process.
        """
        chosen = {one.name: getattr(self, one.name) for one in fields(self)}
        if isinstance(self.mesh, Mesh):
            chosen["mesh"] = PortableMesh.of(self.mesh)
        return chosen

    def __setstate__(self, chosen: dict[str, Any]) -> None:
        mesh = chosen["mesh"]
        self.__dict__.update(chosen, mesh=mesh.here() if isinstance(mesh, PortableMesh) else mesh)

    def __copy__(self) -> "Strategy":
        return self  # nothing of it ever changes

    def __deepcopy__(self, memo: dict[int, Any]) -> "Strategy":
        return self

    def _check_exchange(self, axes: Mapping[str, int], zero: Zero) -> None:
        """Refuse an exchange over axes that carry no gradients, or over which ZeRO splits."""
        taken = self.exchange.axes
        if taken and not self.data_axes:
            raise ValueError(
                f"`Strategy(exchange={self.exchange})` would never run: no axis splits the batch "
                "and nothing else, so the partitioner sums the gradients. Give `batch` an axis of "
                "its own in the rules, or name it: `manual=(...)`."
            )
        for axis in taken:
            if axis not in self.data_axes:
                why = "is no axis of the mesh"
                if axis in self.rules.batch_axes:
                    why = (
                        "splits weights too, or is not manual, so that the partitioner sums "
                        "gradients along it"
                    )
                elif axis in axes:
                    why = (
                        "splits no batch, so that no gradients differ along it; for it to, `rules "
                        "| sl.AxisRules(batch=(...))`"
                    )
                raise ValueError(
                    f"`Strategy(exchange={self.exchange})`: `{axis}` {why}. The mesh has "
                    f"{', '.join(map(repr, axes))}; gradients are exchanged over "
                    f"{', '.join(map(repr, self.data_axes))}."
                )
            if zero.stage and axis in (zero.axes or ()):
                raise ValueError(
                    f"`Strategy(zero={self.zero!r}, exchange={self.exchange})`: ZeRO would split "
                    f"parameters over `{axis}` too, and every step gather them whole again over "
                    "it, in more bytes than the exchange saves. Split over other axes."
                )
        if taken and zero.stage and set(taken) >= set(self.data_axes):
            raise ValueError(
                f"`Strategy(zero={self.zero!r}, exchange={self.exchange})`: the exchange takes all "
                "axes of data, and none is left for ZeRO, which would gather parameters whole over "
                "it in every step, in more bytes than are saved. Leave `zero` out; or exchange "
                'over some of the axes, those of the slow network say: `mesh="pod=4,data=8"`, with '
                '`exchange=...(axis="pod")`.'
            )

    def _check_pipeline(self, axes: Mapping[str, int]) -> None:
        """Refuse what a schedule cannot be run with."""
        schedule = self.pipeline
        if schedule is None:
            if self.remat == "stage":
                raise ValueError(
                    '`Strategy(remat="stage")` keeps what is sent to each stage of a pipeline: '
                    'give one, `pipeline=...`, or use `remat="full"`.'
                )
            return
        if isinstance(schedule, str):
            raise ValueError(
                f"`Strategy(pipeline={check.shown(schedule)})`: text is for the trainer's command "
                "line; here it is a schedule, such as `sl.pipeline.OneFOneB(stages=4, "
                "microbatches=16)`."
            )
        if isinstance(schedule, Table):
            raise ValueError(
                "`Strategy(pipeline=...)`: of a table a schedule is made by "
                "`sl.pipeline.Custom(table)`."
            )
        if isinstance(schedule, type) or not all(
            hasattr(schedule, name) for name in ("stages", "microbatches", "paired", "table")
        ):
            raise ValueError(
                f"`Strategy(pipeline={check.shown(schedule)})` takes a schedule, such as "
                "`sl.pipeline.OneFOneB(stages=4, microbatches=16)`: what has `stages`, "
                "`microbatches`, `paired` and `table()`."
            )
        table = table_of(schedule)
        if (table.stages, table.microbatches) != (schedule.stages, schedule.microbatches):
            raise ValueError(
                f"`{schedule}` says {schedule.stages} stages and {schedule.microbatches} "
                f"microbatches, and its table has {table.stages} and {table.microbatches}."
            )
        if not table.trains:
            raise ValueError(
                f"The table of `{schedule}` has forward passes alone: nothing would be learned."
            )
        counts = [table.placement.count(stage) for stage in range(table.stages)]
        if len(set(counts)) > 1:
            raise ValueError(
                f"The table of `{schedule}` has {counts} parts on its stages: one program has as "
                "many on each."
            )
        candidates = next((of for name, of in self.rules.items() if name == LAYERS), (None,))
        if len(candidates) != 1 or len(as_tuple(candidates[0])) != 1:
            raise ValueError(
                f"`Strategy(pipeline=...)`: the rule `{LAYERS}` says which mesh axis has the "
                "stages, and it is "
                f"{candidates[0] if len(candidates) == 1 else list(candidates)!r}. Name one: "
                f'`rules | sl.AxisRules({LAYERS}="stage")`, as `sl.rules.pipeline` does.'
            )
        (axis,) = as_tuple(candidates[0])
        if axes[axis] != schedule.stages:
            raise ValueError(
                f"`{schedule}` has {schedule.stages} stages, and the mesh axis `{axis}` that the "
                f"rule `{LAYERS}` names has size {axes[axis]}: make them the same."
            )
        if axis in self.rules.batch_axes:
            raise ValueError(
                f"The axis `{axis}` splits the batch, and `{LAYERS}` too: every stage "
                "sees all examples."
            )
        if self.accumulate != 1:
            raise ValueError(
                f"`Strategy(accumulate={self.accumulate}, pipeline=...)`: the schedule says how "
                f"many microbatches there are, {schedule.microbatches}: leave `accumulate` out."
            )
        if self.sharding.stage > 1:
            raise ValueError(
                f"`Strategy(zero={self.zero!r}, pipeline=...)`: each stage uses its layers in "
                "every tick, so that stages 2 and 3 of ZeRO would scatter gradients, and gather "
                "weights, once for every microbatch. Use `zero=1`, which splits parameters and "
                "optimizer state at rest alike."
            )
        if isinstance(self.exchange, Exact) and self.exchange.overlap:
            raise ValueError(
                "`Exact(overlap=True)` is for steps without a pipeline: here gradients go after "
                "the last tick."
            )

    @cached_property
    def stage_axis(self) -> str | None:
        """The axis that has the stages of the pipeline."""
        return None if self.pipeline is None else as_tuple(self.rules[LAYERS][0])[0]

    @cached_property
    def layer_names(self) -> tuple[str, ...]:
        """The names of stacked dims that the stages split: of each loop over layers one, in the
        order of the loops.
        """
        if self.stage_axis is None:
            return ()
        return tuple(
            name
            for name, axes in self.rules.items()
            if counts_layers(name) and [as_tuple(of) for of in axes] == [(self.stage_axis,)]
        )

    @cached_property
    def manual_axes(self) -> tuple[str, ...]:
        """All axes over which the step is manual: those of the data, and that of the stages."""
        return self.data_axes if self.stage_axis is None else (*self.data_axes, self.stage_axis)

    @cached_property
    def every_axis(self) -> tuple[str, ...]:
        """All axes of the mesh, the manual ones first: how what each device has of its own lies."""
        return (
            *self.manual_axes,
            *(axis for axis in self.device_mesh.shape if axis not in self.manual_axes),
        )

    @property
    def microbatches(self) -> int:
        """Into how many parts a device's examples are split, one after the other."""
        return self.accumulate if self.pipeline is None else self.pipeline.microbatches

    @cached_property
    def device_mesh(self) -> Mesh:
        """The mesh, of real devices."""
        return make_mesh(self.mesh, dcn=self.dcn) if isinstance(self.mesh, str) else self.mesh

    @cached_property
    def data_axes(self) -> tuple[str, ...]:
        """The axes over which the step is manual: each device along them has gradients of its
        own.
        """
        if self.manual is not None:
            return tuple(axis for axis in self.rules.batch_axes if axis in self.manual)
        elsewhere = AxisRules(
            {name: list(axes) for name, axes in self.rules.items() if name not in (BATCH, EXPERTS)}
        ).axes
        return tuple(axis for axis in self.rules.batch_axes if axis not in elsewhere)

    @property
    def skips(self) -> bool:
        """Whether a step whose gradient is not finite leaves parameters and optimizer as they
        were.
        """
        return self.nonfinite == "skip"

    @property
    def crossing(self) -> tuple[str, ...]:
        """The axes that cross the slow network."""
        if isinstance(self.mesh, str):
            return tuple(part.split("=")[0].strip() for part in self.dcn.split(",") if part.strip())
        return slow_axes(self.mesh)

    @cached_property
    def sharding(self) -> Zero:
        """What `zero` comes to."""
        return resolve_zero(self.zero, self.crossing, self.data_axes)

    @cached_property
    def zero_axes(self) -> tuple[str, ...]:
        """The axes that ZeRO splits over, those on the fast network first; over the other data
        axes, state is repeated.

        By default those are all that the exchange does not take.

        Under a pipeline what is outside the stages is split over these too, whatever the stage of
        ZeRO.
        """
        zero = self.sharding
        free = tuple(axis for axis in self.data_axes if axis not in self.exchange.axes)
        axes = () if not zero.stage else free if zero.axes is None else zero.axes
        axes = axes if self.stage_axis is None else (*axes, self.stage_axis)
        return tuple(sorted(axes, key=lambda axis: axis in self.crossing))

    @property
    def dtypes(self) -> Precision:
        """What `precision` comes to."""
        return resolve_precision(self.precision)

    @property
    def batch_axes(self) -> tuple[str, ...]:
        """The axes that split the batch, manual ones first: each device's examples are
        consecutive.
        """
        return self.data_axes + tuple(
            axis for axis in self.rules.batch_axes if axis not in self.data_axes
        )

    def scope(self) -> AbstractContextManager[Scope]:
        """Rules and mesh in force, for code of your own beside the step: evaluation, sampling, a
        plain `jax.jit`.
        """
        return use(self.rules, self.device_mesh, remat=self.remat)
