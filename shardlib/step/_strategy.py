"""A strategy: everything that decides how a machine runs a model, as one value that prints,
compares and hashes.

What is asked for is in its fields. All else is derived from them, and named once here: the mesh,
the axes over which the step is manual, those that ZeRO splits over, those of the slow network.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, Literal

import optax
from jax.sharding import Mesh

from shardlib.checks import _arguments as check
from shardlib.collectives._exact import Exact, Exchange
from shardlib.collectives._zero import Zero, resolve_zero
from shardlib.layouts._annotate import Scope, put_in_force
from shardlib.layouts._remat_policy import (
    Remat,
    RematBudget,
    RematByBlock,
    checked_remat,
)
from shardlib.layouts._rules import (
    BATCH,
    EXPERTS,
    LAYERS,
    SEQUENCE,
    AxisRules,
    counts_layers,
    counts_positions,
    rules_without,
)
from shardlib.layouts._specs import as_tuple, axes_within, axes_without
from shardlib.machine._mesh import make_mesh, parse_axes, slow_axes, with_first
from shardlib.machine._portable_mesh import PortableMesh
from shardlib.pipeline.schedules._schedule import Schedule
from shardlib.step._exchange_checks import check_apart, check_exchange
from shardlib.step._offload import Offload, resolve_offload, with_offloaded
from shardlib.step._precision import Precision, resolve_precision
from shardlib.step._strategy_checks import check_combined_passes, check_offload, check_pipeline

# The count of microbatches is an int32 in the compiled step.
_MOST_MICROBATCHES = 2**31 - 1


@dataclass(frozen=True)
class Strategy:
    """How to train a model on a mesh of devices: what is split, computed, kept and sent, and how.

    - `mesh`: text such as `"data=2,model=4"`, for the devices that JAX has, or a `Mesh`, which may
      be of devices that are not present.
    - `rules`: which names of dims those axes split, `AxisRules`, such as `sl.rules.data`.
    - `dcn`: which of the axes cross the data-centre network, as in `make_mesh`; only for a mesh
      that is given as text. By default none does.
    - `zero`: what ZeRO splits over the axes of data and of sequences: its stage, from 0 (nothing)
      to 3; one of FSDP's names (`"NO_SHARD"`, `"SHARD_GRAD_OP"`, `"FULL_SHARD"`,
      `"HYBRID_SHARD"`); or a `Zero`.
    - `accumulate`: microbatches per step, whose gradients are summed, in float32 unless `precision`
      says otherwise.
    - `precision`: the dtype to compute in, such as `"bf16"`, or a `Precision`. What is stored are
      the master weights. `"float32"`, the default, computes with parameters as they are stored.
    - `clip`: the global norm above which a gradient is scaled down to it, or an optax
      transformation without state that clips otherwise: `optax.clip(1.0)` by value,
      `optax.adaptive_grad_clip(0.01)` adaptively. None clips nothing.
    - `frozen`: patterns that match the whole path of parameters which stay as they are: no
      gradient, no state.
    - `nonfinite`: what happens if the gradient of a step is not finite. `"skip"` leaves parameters,
      optimizer and the model's other state unchanged. `"count"` applies the update anyway, so one
      bad batch may make every parameter nan. Either way `state.nonfinite` counts the step.
    - `remat`: what blocks marked with `sl.remat` keep for the backward pass; all else in them is
      computed again. `"none"`, the default, keeps all activations; `"full"` only the inputs of
      blocks; `"dots"` and `"dots_without_batch"` results of matrix products too; `"minimal"` those
      of projections and attention's context; `"selective"` everything but attention's scores and
      their softmax; `"sublinear"` the inputs of few blocks of a loop; `"stage"`, under a pipeline,
      only what was sent to each stage, and, while a stage is recomputed, only the inputs of its
      blocks. Finer choices are a `sl.Remat`: `Remat.save("context")` keeps activations by name,
      `Remat.offload("block_in")` in the memory of the host, `Remat.slots(4)` the inputs of so many
      blocks of a loop, `Remat.layers((8, "none"), rest="full")` not the same in all layers, and
      `Remat.budget("14GiB")` what fits.
    - `offload`: what stays in the memory of the host while it is not used: `"optimizer"`, its
      state; `"parameters"`; `"all"`, both; or an `Offload`. None keeps all of it on the devices.
    - `exchange`: how devices combine their gradients. `sl.Exact()`, the default, adds them up
      exactly. `sl.collectives` has alternatives for some of the data axes: compressed sums, such as
      `OneBit("pod")`, and workers that train apart, such as `DiLoCo("pod", every=500)`.
    - `pipeline`: a schedule, such as `sl.pipeline.OneFOneB(stages=4, microbatches=16)`; None for no
      pipeline. The axis that the rule `layers` names holds the stages, and the schedule decides the
      order in which microbatches go through them. (On the trainer's command line: `1f1b:4:16`.)
    - `draws`: with `"same"`, random numbers are the same on every mesh, and only threefry keys are
      accepted. With `"by_mesh"` they may depend on the mesh, which allows `rbg` keys (faster on
      TPUs); the loss then gets a key of JAX's default implementation, `jax_default_prng_impl`.
    - `combine_passes`: whether a pipeline tick with a forward and a backward pass runs both
      together, one layer of each at a time. Communication of one pass, such as to experts, can then
      overlap with the computation of the other. This needs a model with one loop over layers and a
      schedule with such ticks, such as `DualPipeV` or `ZBV` with `paired=True`, and compiles a
      third pass through the layers.
    - `hide_collectives`: whether the sparse cores of a TPU run gathers and scatters while its
      tensor cores multiply matrices. Only v5p, v6e and 7x can do this.
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
    remat: str | Remat | RematByBlock | RematBudget = "none"
    offload: str | Offload | None = None
    exchange: Exchange = field(default_factory=Exact)
    manual: tuple[str, ...] | None = None
    pipeline: Schedule | None = None
    draws: Literal["same", "by_mesh"] = "same"
    hide_collectives: bool = True
    combine_passes: bool = False

    def __post_init__(self) -> None:
        self._check_fields()
        axes = self.axis_sizes
        # Each field is checked by itself first, and then what must fit together, so that errors
        # name the simplest cause.
        self.rules.check_mesh(axes)
        self._check_mesh()
        self._check_manual()
        resolve_precision(self.precision)
        check_exchange(self.exchange, self.zero, self.sharding, self.data_axes, self.rules, axes)
        check_apart(self, self.apart)
        self._check_sizes(axes)
        if self.pipeline is None and self.remat == "stage":
            raise ValueError(
                '`Strategy(remat="stage")` keeps what is sent to each stage of a pipeline: '
                'give one, `pipeline=...`, or use `remat="full"`.'
            )

    @property
    def axis_sizes(self) -> dict[str, int]:
        """The sizes of the mesh's axes, without asking JAX for its devices.

        An axis that takes the devices that are left is of size -1.
        """
        if isinstance(self.mesh, str):
            return parse_axes(self.mesh)
        return dict(self.mesh.shape)

    def _check_sizes(self, axes: Mapping[str, int]) -> None:
        """Refuse what does not go together on axes of these sizes, as far as they are known."""
        check_offload(self, axes)
        check_combined_passes(self)
        if self.pipeline is not None:
            check_pipeline(self, axes)

    def _check_fields(self) -> None:
        """Refuse values of a wrong type or out of range, each field by itself.

        What does not go together is mostly found out later, when the axes of the mesh are known.
        """
        takes = "`AxisRules`, such as `sl.rules.data`; of a dict, `sl.AxisRules(**rules)`"
        check.kind("Strategy", "rules", self.rules, AxisRules, takes)
        takes = 'text such as `"data=2,model=4"`, or a mesh: `sl.make_mesh(...)`'
        check.kind("Strategy", "mesh", self.mesh, str | Mesh, takes)
        takes = 'text: `"pod"`, or `"data=2"` for a factor of an axis'
        check.text("Strategy", "dcn", self.dcn, takes)
        # Which axes of a mesh are on the slow network is known once it is made.
        if not isinstance(self.mesh, str) and self.dcn:
            raise ValueError(
                f"`Strategy(dcn={self.dcn!r})` is for a mesh given as text; this one is made: "
                "`sl.make_mesh(..., dcn=...)`."
            )
        takes = "a number of microbatches"
        accumulate = check.whole(
            "Strategy", "accumulate", self.accumulate, takes, least=1, most=_MOST_MICROBATCHES
        )
        takes = 'an exchange, such as `sl.Exact()` or `sl.collectives.OneBit("data")`'
        check.kind("Strategy", "exchange", self.exchange, Exchange, takes)
        check.texts("Strategy", "manual", self.manual, "a tuple of axes", optional=True)
        check.patterns("Strategy", "frozen", self.frozen)
        check.choice("Strategy", "nonfinite", self.nonfinite, ("skip", "count"))
        check.choice("Strategy", "draws", self.draws, ("same", "by_mesh"))
        checked_remat("Strategy", "remat", self.remat)
        # Activations are named by both fields. What contradicts itself is refused here, and not
        # later.
        with_offloaded(self.remat, resolve_offload(self.offload))
        hide = check.boolean("Strategy", "hide_collectives", self.hide_collectives)
        combine = check.boolean("Strategy", "combine_passes", self.combine_passes)
        clip = self.clip
        # Any transformation of the gradient may clip; a number is the norm of the whole.
        if clip is not None and not isinstance(clip, optax.GradientTransformation):
            takes = (
                "a largest global norm, or an optax transformation without state, such as "
                "`optax.clip(1.0)`"
            )
            clip = check.number("Strategy", "clip", clip, takes, above=0)
        check.assign(self, accumulate=accumulate, clip=clip)
        check.assign(self, hide_collectives=hide, combine_passes=combine)

    def _check_mesh(self) -> None:
        """Refuse explicit axes, over which the partitioner decides nothing."""
        # Text is made into a mesh here, always with automatic axes.
        if not isinstance(self.mesh, str) and self.mesh.explicit_axes:
            raise ValueError(
                f"`Strategy(mesh=...)` has the explicit axes {self.mesh.explicit_axes}; the step "
                "needs automatic ones: `sl.make_mesh(...)` makes them. Only annotations work on "
                "explicit axes: `with sl.use(rules, mesh):`."
            )

    def _check_manual(self) -> None:
        """Refuse manual axes along which devices do not have examples of their own."""
        # Along an axis that splits no examples, devices would do the same work twice.
        for axis in self.manual or ():
            if axis not in self.rules.batch_axes:
                raise ValueError(
                    f"`Strategy(manual={self.manual})`: `{axis}` does not split the batch; its "
                    f"axes are {self.rules.batch_axes}."
                )

    def __getstate__(self) -> dict[str, Any]:
        """The fields only: what was derived from them holds devices of this process."""
        # Derived values are computed again where the strategy is unpickled.
        chosen = {field.name: getattr(self, field.name) for field in fields(self)}
        # Devices mean nothing in another process: their places on the mesh do.
        if isinstance(self.mesh, Mesh):
            chosen["mesh"] = PortableMesh.of(self.mesh)
        return chosen

    def __setstate__(self, chosen: dict[str, Any]) -> None:
        mesh = chosen["mesh"]
        if isinstance(mesh, PortableMesh):
            mesh = mesh.here()
        # A frozen dataclass takes no assignments.
        self.__dict__.update(chosen, mesh=mesh)

    def __copy__(self) -> "Strategy":
        # Nothing of a strategy ever changes, and a mesh cannot be copied.
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> "Strategy":
        return self

    @cached_property
    def stage_axis(self) -> str | None:
        """The axis that has the stages of the pipeline; None without one."""
        if self.pipeline is None:
            return None
        return as_tuple(self.rules[LAYERS][0])[0]

    @cached_property
    def layer_names(self) -> tuple[str, ...]:
        """The names of stacked dims that the stages split.

        Each of a model's loops over layers has one, and they are in the order of the loops.
        """
        if self.stage_axis is None:
            return ()
        names = []
        for name, choices in self.rules.items():
            # A rule may have several choices, of which any may be taken.
            axes_of_choices = [as_tuple(axes) for axes in choices]
            if counts_layers(name) and axes_of_choices == [(self.stage_axis,)]:
                names.append(name)
        return tuple(names)

    @cached_property
    def manual_axes(self) -> tuple[str, ...]:
        """All axes over which the step is manual: those of the data, and that of the stages."""
        if self.stage_axis is None:
            return self.data_axes
        return (*self.data_axes, self.stage_axis)

    @cached_property
    def every_axis(self) -> tuple[str, ...]:
        """All axes of the mesh, the manual ones first.

        What each device has of its own, such as errors of compression, is split over these.
        """
        automatic = axes_without(self.device_mesh.shape, self.manual_axes)
        return (*self.manual_axes, *automatic)

    @property
    def microbatches(self) -> int:
        """The number of parts that a device's examples are divided into, one after the other."""
        if self.pipeline is None:
            return self.accumulate
        return self.pipeline.microbatches

    @cached_property
    def device_mesh(self) -> Mesh:
        """The mesh, of real devices or of those that a program is compiled for.

        Axes of an exchange come before other axes of data: each device has the same place on them.
        """
        mesh = self.mesh
        if isinstance(mesh, str):
            mesh = make_mesh(mesh, dcn=self.dcn)
            # Now the size of an axis that takes the devices that are left is known.
            self._check_sizes(mesh.shape)
        # Compilers take a region that is manual over the other axes, within one that is manual over
        # those of workers, only in this order of the mesh.
        return with_first(mesh, self.data_axes, self.exchange.axes)

    @cached_property
    def data_axes(self) -> tuple[str, ...]:
        """The axes of the batch over which the step is manual.

        Each device along them has gradients of its own. By default they are the axes that split
        nothing but the batch and experts.
        """
        # The axes of an exchange come first, so that the examples of a worker follow each other.
        workers = axes_within(self.rules.batch_axes, self.exchange.axes)
        batch_axes = (*workers, *axes_without(self.rules.batch_axes, workers))
        if self.manual is not None:
            return axes_within(batch_axes, self.manual)
        others: dict[str, Any] = {}
        for name, axes in self.rules.items():
            if name not in (BATCH, EXPERTS):
                others[name] = list(axes)
        used_elsewhere = AxisRules(others).axes
        return axes_without(batch_axes, used_elsewhere)

    @cached_property
    def apart(self) -> tuple[str, ...]:
        """The axes along which the exchange keeps workers apart, in the order of the data axes."""
        return axes_within(self.data_axes, self.exchange.apart)

    def of_worker(self, apart: tuple[str, ...]) -> "Strategy":
        """How one worker trains where workers have parameters of their own along `apart`.

        It is the same strategy on the same mesh, as it is where the axes of the workers are manual
        already: nothing is split over these, and gradients are summed within the worker.
        """
        zero = self.sharding
        if zero.stage:
            # In words that mean the same where fewer axes are left.
            zero = replace(zero, axes=self.zero_axes)
        return replace(
            self,
            mesh=self.device_mesh,
            dcn="",
            rules=rules_without(self.rules, apart),
            zero=zero,
            exchange=self.exchange.within,
            manual=None if self.manual is None else axes_without(self.manual, apart),
        )

    @cached_property
    def sequence_axes(self) -> tuple[str, ...]:
        """The axes that split the positions of sequences and nothing else.

        ZeRO splits over them too, while the step leaves them to the partitioner. Stages of a
        pipeline use their layers in every tick, so that there are none beside one.
        """
        if self.pipeline is not None:
            return ()
        if not self.rules.says(SEQUENCE):
            return ()
        others: dict[str, Any] = {}
        for name, axes in self.rules.items():
            if not counts_positions(name):
                others[name] = list(axes)
        split = AxisRules({SEQUENCE: list(self.rules[SEQUENCE])}).axes
        return axes_without(split, AxisRules(others).axes)

    @property
    def offloaded(self) -> Offload | None:
        """The `Offload` that `offload` stands for; None where it leaves the state on the device."""
        offload = resolve_offload(self.offload)
        if offload is None or not offload.of_state:
            return None
        return offload

    @property
    def skips(self) -> bool:
        """Whether a step with a gradient that is not finite changes no parameter."""
        return self.nonfinite == "skip"

    @property
    def crossing(self) -> tuple[str, ...]:
        """The axes that cross the slow network."""
        if not isinstance(self.mesh, str):
            return slow_axes(self.mesh)
        # Each entry is an axis, or an axis and the factor of it that crosses: "pod", "data=2".
        crossing: list[str] = []
        for entry in self.dcn.split(","):
            name, _, factor = entry.partition("=")
            # An axis with a factor of one stays within a slice.
            if name.strip() and factor.strip().lstrip("0") != "1":
                crossing.append(name.strip())
        return tuple(crossing)

    @cached_property
    def sharding(self) -> Zero:
        """The `Zero` that `zero` stands for, whether it is a stage, a name of FSDP's or one."""
        return resolve_zero(self.zero, self.crossing, self.data_axes, self.sequence_axes)

    @cached_property
    def zero_axes(self) -> tuple[str, ...]:
        """The axes that ZeRO splits over, those on the fast network first.

        By default those are all data axes that the exchange does not take, then those of sequences.
        Over other data axes the state is repeated. Under a pipeline, what is outside the stages is
        split over their axis too, whatever the stage of ZeRO.
        """
        zero = self.sharding
        axes: tuple[str, ...] = ()
        if zero.stage and zero.axes is not None:
            axes = zero.axes
        elif zero.stage:
            axes = axes_without((*self.data_axes, *self.sequence_axes), self.exchange.axes)
        if self.stage_axis is not None:
            axes = (*axes, self.stage_axis)
        return tuple(sorted(axes, key=lambda axis: axis in self.crossing))

    @property
    def dtypes(self) -> Precision:
        """The `Precision` that `precision` stands for."""
        return resolve_precision(self.precision)

    @property
    def batch_axes(self) -> tuple[str, ...]:
        """The axes that split the batch, manual ones first.

        In this order the examples of each device follow each other in the batch.
        """
        automatic = axes_without(self.rules.batch_axes, self.data_axes)
        return (*self.data_axes, *automatic)

    @property
    def kept_by_blocks(self) -> Remat | None:
        """What blocks marked with `sl.remat` keep; None where they keep everything."""
        return with_offloaded(self.remat, resolve_offload(self.offload))

    @property
    def offloaded_activations(self) -> tuple[str, ...]:
        """The names of activations that blocks keep in the memory of the host."""
        kept = self.kept_by_blocks
        return () if kept is None else kept.offloaded

    def scope(self) -> AbstractContextManager[Scope]:
        """A context with this strategy's rules and mesh, for your own code outside the step.

        Use it for evaluation, sampling or a plain `jax.jit`: `with strategy.scope():`.
        """
        return put_in_force(self.rules, self.device_mesh, self.kept_by_blocks, self.crossing)
