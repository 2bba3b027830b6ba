"""The executor: one program, in which each stage does in each tick what the table says. Manual over
the stages' axis.

In a tick a stage may go forward, backward and make gradients of weights, each under a `cond`: what
the stages do differs, the program does not. Between ticks, what was made is sent on: one permute
for each way that the schedule sends.

Around the loop of ticks nothing differs from any other step: the weights outside the stages are
whole on each, those of the stages are there alone, and so are the sums of gradients that come out.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from shardlib.pipeline._cut import Cut
from shardlib.pipeline._layer import layer
from shardlib.pipeline._program import Program, channel

Arrays = list[Any]
Buffers = dict[str, Any]


@dataclass(eq=False)
class Executor:
    """A cut function, run as a program says, over the mesh axis `axis`.

    `weights` are all weights, of the stacked ones this stage's layers, part after part.
    `inputs(microbatch)` are the function's, and `totals` those of its outputs that are added up.
    """

    cut: Cut
    program: Program
    axis: str
    weights: Sequence[Any]
    inputs: Callable[[Any], Arrays]
    totals: Sequence[int]

    def __post_init__(self) -> None:
        cut, self.table = self.cut, self.program.table
        self.layers = [layer(loop, cut.trained, self.table.splits) for loop in cut.loops]
        self.outer = [self.weights[k] for k in cut.outer]
        self.shared = [cut.shared(loop, self.outer) for loop in range(len(cut.loops))]
        self.stacks = [[self.weights[k] for k in loop.stacked] for loop in cut.loops]
        self.trained = [[k for k in loop.stacked if k in cut.trained] for loop in cut.loops]
        self.parts = self.table.parts // len(cut.loops)  # of each loop
        self.chunks = self.parts // self.table.stages  # of each loop on each stage
        self.per = [loop.layers // self.parts for loop in cut.loops]  # layers of a part

    # What a stage has of it all.

    def buffers(self) -> Buffers:
        """All that waits, nothing yet. What is sent has one slot more than is used."""
        slots = self.program.slots

        return {
            "activations": _empty(self.cut.wire, slots["activations"][0] + 1),
            "gradients": _empty(self.cut.wire_back, slots["gradients"][0] + 1),
            "kept": [
                _empty(of.kept, *of_slots)
                for of, *of_slots in zip(self.layers, slots["kept"], self.per, strict=True)
            ],
            "left": [
                _empty(of.left, *of_slots)
                for of, *of_slots in zip(self.layers, slots["left"], self.per, strict=True)
            ],
        }

    def of_loop(self, part: Any, do: Callable[..., Any], *given: Any) -> Any:
        """`do(loop, ...)` for the loop that a part is of."""
        if len(self.cut.loops) == 1:
            return do(0, *given)
        return lax.switch(
            part // self.parts, [partial(do, loop) for loop in range(len(self.cut.loops))], *given
        )

    def is_first(self, part: Any, loop: int) -> Any:
        """Whether it is a loop's first part."""
        return part == loop * self.parts

    def weights_of(self, loop: int, of_layer: Arrays) -> Arrays:
        """What a layer takes as weights: what all layers share, and its own."""
        return [*self.shared[loop][0], *of_layer]

    def chunk(self, row: dict[str, Any], kind: str, loop: int) -> tuple[Any, Arrays]:
        """The first of the stage's layers that are of a pass's part, and their weights."""
        if self.chunks == 1:
            return 0, self.stacks[loop]
        first = (row[f"{kind}.chunk"] - loop * self.chunks) * self.per[loop]
        return first, [
            lax.dynamic_slice_in_dim(x, first, self.per[loop]) for x in self.stacks[loop]
        ]

    def own(self, row: dict[str, Any], kind: str, loop: int) -> tuple[Any, Arrays, Arrays, Arrays]:
        """The first layer of a pass's part; the inputs of its microbatch; what is made of them for
        all layers, and for each.
        """
        given = self.inputs(row[f"{kind}.microbatch"])
        same, plain = self.cut.fixed(loop, self.outer, given)
        first = (row[f"{kind}.part"] - loop * self.parts) * self.per[loop]
        same = [*self.shared[loop][1], *same]
        return (
            first,
            given,
            same,
            [lax.dynamic_slice_in_dim(x, first, self.per[loop]) for x in plain],
        )

    # Passes.

    def come(
        self, loop: int, row: dict[str, Any], kind: str, buffers: Buffers, given: Arrays
    ) -> Arrays:
        """What travels into a pass's part."""
        arrived = _read(buffers["activations"], row[f"{kind}.activations"])

        def start() -> Arrays:
            before = self.cut.unpacked(loop - 1, arrived) if loop else []
            return self.cut.start(loop, self.outer, given, before)

        first = self.is_first(row[f"{kind}.part"], loop)
        return lax.cond(first, start, lambda: self.cut.unpacked(loop, arrived))

    def through(
        self, loop: int, row: dict[str, Any], kind: str, buffers: Buffers, keep: Arrays, slot: Any
    ) -> tuple[Arrays, Arrays]:
        """Through a part: what travels on, and the buffers `keep` with what is kept of each layer
        in a slot.

        It is written where it will lie, layer by layer: stacked first, it would be written twice.
        """
        first, given, same, plain = self.own(row, kind, loop)
        come = self.come(loop, row, kind, buffers, given)
        entering = len(self.cut.loops[loop].entering)

        def body(
            carry: tuple[Arrays, Arrays], scanned: Any
        ) -> tuple[tuple[Arrays, Arrays], Arrays]:
            (travelling, keep), (number, mine, of_layer) = carry, scanned
            mine = self.weights_of(loop, mine)
            travelling, told, kept = self.layers[loop].forward(travelling, mine, [*same, *of_layer])
            return (travelling, _put(keep, slot, number, kept) if keep else keep), told

        scanned = jnp.arange(self.per[loop]), self.chunk(row, kind, loop)[1], plain
        (travelling, keep), told = lax.scan(body, (come[:entering], keep), scanned)
        told = _filled(come[len(come) - len(told) :], first, told)
        return [*travelling, *come[entering : len(come) - len(told)], *told], keep

    def forward(self, row: dict[str, Any], buffers: Buffers) -> tuple[Arrays, Buffers]:
        """What is sent on."""

        def through(loop: int, buffers: Buffers) -> tuple[Arrays, Buffers]:
            keep = [] if self.program.recompute or not self.table.trains else buffers["kept"][loop]
            travelled, keep = self.through(loop, row, "F", buffers, keep, row["F.kept"])
            return self.cut.packed(loop, travelled), _with(
                buffers, "kept", loop, keep
            ) if keep else buffers

        return self.of_loop(row["F.part"], through, buffers)

    def head(
        self, row: dict[str, Any], sent: Arrays, buffers: Buffers, sums: Arrays, totals: Arrays
    ) -> tuple[Buffers, Arrays, Arrays]:
        """What comes after the last part, and at once its gradient, lest what it keeps waits."""
        given, last = self.inputs(row["F.microbatch"]), len(self.cut.loops) - 1
        trained = [k for k in self.cut.leave if self.cut.outer[k] in self.cut.trained]
        floats, together = _parted(self.cut.unpacked(last, sent), self.cut.loops[last].smooth)

        def loss(floats: Arrays, of_trained: Arrays) -> tuple[Any, Arrays]:
            outer = _replaced(self.outer, trained, of_trained)
            total, *rest = self.cut.after(outer, given, together(floats), [0, *self.totals])
            return total, rest

        of_trained = [self.outer[k] for k in trained]
        (_, found), (back, gradients) = jax.value_and_grad(loss, (0, 1), has_aux=True)(
            floats, of_trained
        )
        back = self.cut.packed(last, back, back=True)
        buffers = buffers | {"gradients": _write(buffers["gradients"], row["F.gradients"], back)}
        return (
            buffers,
            self.added(sums, trained, gradients),
            [a + b for a, b in zip(totals, found, strict=True)],
        )

    def backward(
        self, row: dict[str, Any], buffers: Buffers, sums: list[Arrays]
    ) -> tuple[Arrays, Buffers, list[Arrays]]:
        """Gradients of what came; of weights, where passes are not split."""

        def back(
            loop: int, buffers: Buffers, sums: list[Arrays]
        ) -> tuple[Arrays, Buffers, list[Arrays]]:
            of, layer = self.cut.loops[loop], self.layers[loop]
            first, _, same, plain = self.own(row, "B", loop)
            gradients = self.cut.unpacked(
                loop, _read(buffers["gradients"], row["B.gradients"]), back=True
            )
            moving = sum(of.smooth[: len(of.entering)])
            told = sum(of.smooth[len(of.smooth) - len(of.told) :])
            passing = gradients[moving:]
            of_told = [
                lax.dynamic_slice_in_dim(x, first, self.per[loop])
                for x in gradients[len(gradients) - told :]
            ]
            kept, slot = buffers["kept"][loop], row["B.kept"]
            if self.program.recompute:
                kept, slot = (kept, slot) if kept else (_empty(layer.kept, 1, self.per[loop]), 0)
                _, kept = self.through(loop, row, "B", buffers, kept, slot)
            place, weights = self.chunk(row, "B", loop)

            def whole(carry: Any, scanned: Any) -> Any:
                (gradients, sums), (number, mine, of_layer, of_told) = carry, scanned
                mine, residuals = self.weights_of(loop, mine), _get(kept, slot, number)
                found = layer.backward(residuals, mine, [*same, *of_layer], [*gradients, *of_told])
                return (found[0], self.added_layer(loop, sums, place + number, found[1])), None

            def split(carry: Any, scanned: Any) -> Any:
                (gradients, left), (number, mine, of_layer, of_told) = carry, scanned
                mine, residuals = self.weights_of(loop, mine), _get(kept, slot, number)
                gradients, new = layer.inputs(
                    residuals, mine, [*same, *of_layer], [*gradients, *of_told]
                )
                return (gradients, _put(left, row["B.left"], number, new)), None

            scanned = (jnp.arange(self.per[loop]), weights, plain, of_told)
            body, start = (
                (split, buffers["left"][loop]) if self.table.splits else (whole, sums[loop])
            )
            (moved, end), _ = lax.scan(body, (gradients[:moving], start), scanned, reverse=True)
            if self.table.splits:
                buffers = _with(_with(buffers, "left", loop, end), "kept", loop, kept)
            else:
                sums = [*sums[:loop], end, *sums[loop + 1 :]]
            return self.cut.packed(loop, [*moved, *passing], back=True), buffers, sums

        return self.of_loop(row["B.part"], back, buffers, sums)

    def enter(
        self, row: dict[str, Any], sent: Arrays, buffers: Buffers, sums: Arrays
    ) -> tuple[Arrays, Arrays]:
        """What comes before a loop's first part, backward: done again, for it is little."""

        def back(loop: int, sent: Arrays, sums: Arrays) -> tuple[Arrays, Arrays]:
            given, smooth = self.inputs(row["B.microbatch"]), self.cut.loops[loop].smooth
            trained = [k for k in self.cut.enter(loop) if self.cut.outer[k] in self.cut.trained]
            before = (
                self.cut.unpacked(loop - 1, _read(buffers["activations"], row["B.activations"]))
                if loop
                else []
            )
            floats, together = _parted(before, self.cut.loops[loop - 1].smooth if loop else [])

            def come(floats: Arrays, of_trained: Arrays) -> Arrays:
                outer = _replaced(self.outer, trained, of_trained)
                return _parted(self.cut.start(loop, outer, given, together(floats)), smooth)[0]

            _, derivative = jax.vjp(come, floats, [self.outer[k] for k in trained])
            of_before, gradients = derivative(self.cut.unpacked(loop, sent, back=True))
            sent = self.cut.packed(loop - 1, of_before, back=True) if loop else sent
            return sent, self.added(sums, trained, gradients)

        return self.of_loop(row["B.part"], back, sent, sums)

    def of_weights(self, row: dict[str, Any], buffers: Buffers, sums: list[Arrays]) -> list[Arrays]:
        """Gradients of weights, after those of what came."""

        def found(loop: int, sums: list[Arrays]) -> list[Arrays]:
            _, _, same, plain = self.own(row, "W", loop)
            place, weights = self.chunk(row, "W", loop)

            def body(sums: Arrays, scanned: Any) -> tuple[Arrays, None]:
                number, mine, of_layer = scanned
                kept, left = (
                    _get(buffers[name][loop], row[f"W.{name}"], number) for name in ("kept", "left")
                )
                found = self.layers[loop].weights(
                    kept, self.weights_of(loop, mine), [*same, *of_layer], left
                )
                return self.added_layer(loop, sums, place + number, found), None

            of_loop, _ = lax.scan(body, sums[loop], (jnp.arange(self.per[loop]), weights, plain))
            return [*sums[:loop], of_loop, *sums[loop + 1 :]]

        return self.of_loop(row["W.part"], found, sums)

    def added(self, sums: Arrays, which: Sequence[int], gradients: Arrays) -> Arrays:
        """The sums of the outer weights with gradients of some."""
        return _replaced(
            sums,
            which,
            [sums[k] + g.astype(sums[k].dtype) for k, g in zip(which, gradients, strict=True)],
        )

    def added_layer(self, loop: int, sums: Arrays, place: Any, gradients: Arrays) -> Arrays:
        """The sums of what a loop's layers share, and of its weights, with the gradients of the
        layer at a place.
        """
        shared = len(self.shared[loop][0])
        return [
            x + gradient.astype(x.dtype)
            if k < shared
            else x.at[place].add(gradient.astype(x.dtype))
            for k, (x, gradient) in enumerate(zip(sums, gradients, strict=True))
        ]

    def sums_of_shared(self, loop: int) -> Arrays:
        """Sums of gradients of what a loop's layers share, before any."""
        return [
            jnp.zeros(x.shape, jnp.promote_types(x.dtype, jnp.float32))
            for x in self.shared[loop][0]
        ]

    def share(self, loop: int, sums: Arrays, of_shared: Arrays) -> Arrays:
        """The sums of the outer weights with what comes through what a loop's layers share."""
        trained = [k for k in self.cut.share(loop) if self.cut.outer[k] in self.cut.trained]

        def make(of_trained: Arrays) -> Arrays:
            return self.cut.shared(loop, _replaced(self.outer, trained, of_trained))[0]

        made, back = jax.vjp(make, [self.outer[k] for k in trained])
        (gradients,) = back([x.astype(one.dtype) for x, one in zip(of_shared, made, strict=True)])
        return self.added(sums, trained, gradients)

    # The loop of ticks.

    def gradient(self, sums: Sequence[Any]) -> tuple[Arrays, Arrays]:
        """What `totals` come to on this stage, and `sums`, which has one for each trained weight,
        with its gradients.
        """
        stage = lax.axis_index(self.axis)
        of_layers = [
            [*self.sums_of_shared(k), *(sums[i] for i in of)] for k, of in enumerate(self.trained)
        ]
        start = self.buffers(), [sums[k] for k in self.cut.outer], of_layers, self.no_totals()
        nothing, nothing_back = (
            [jnp.zeros(one.shape, one.dtype) for one in of]
            for of in (self.cut.wire, self.cut.wire_back)
        )

        def tick(state: Any, rows: Any) -> tuple[Any, None]:
            buffers, of_outer, of_stacks, totals = state
            row = {name: numbers[stage] for name, numbers in rows.items()}
            made, buffers = lax.cond(
                row["F"] == 1,
                partial(self.forward, row),
                lambda buffers: (nothing, buffers),
                buffers,
            )
            buffers, of_outer, totals = lax.cond(
                self.is_last(row),
                lambda buffers, of_outer, totals: self.head(row, made, buffers, of_outer, totals),
                lambda *same: same,
                buffers, of_outer, totals,
            )  # fmt: skip
            gradients, buffers, of_stacks = lax.cond(
                row["B"] == 1,
                partial(self.backward, row),
                lambda buffers, of_stacks: (nothing_back, buffers, of_stacks),
                buffers, of_stacks,
            )  # fmt: skip
            gradients, of_outer = lax.cond(
                (row["B"] == 1) & (row["B.part"] % self.parts == 0),
                lambda gradients, of_outer: self.enter(row, gradients, buffers, of_outer),
                lambda *same: same,
                gradients, of_outer,
            )  # fmt: skip
            if self.table.splits:
                of_stacks = lax.cond(
                    row["W"] == 1,
                    partial(self.of_weights, row, buffers),
                    lambda same: same,
                    of_stacks,
                )
            buffers = self.sent(self.sent(buffers, row, "F", made), row, "B", gradients)
            return (buffers, of_outer, of_stacks, totals), None

        (_, of_outer, of_stacks, totals), _ = lax.scan(tick, start, self.rows())
        for loop, of in enumerate(self.shared):
            if of[0]:
                of_outer = self.share(loop, of_outer, of_stacks[loop][: len(of[0])])
        of_stacks = [
            x
            for (moved, _), found in zip(self.shared, of_stacks, strict=True)
            for x in found[len(moved) :]
        ]
        return totals, _replaced(
            sums, [*self.cut.outer, *chain(*self.trained)], [*of_outer, *of_stacks]
        )

    def measure(self) -> Arrays:
        """What `totals` come to on this stage, where the program is of forward passes alone."""
        stage = lax.axis_index(self.axis)
        nothing = [jnp.zeros(one.shape, one.dtype) for one in self.cut.wire]
        last = len(self.cut.loops) - 1

        def tick(state: Any, rows: Any) -> tuple[Any, None]:
            buffers, totals = state
            row = {name: numbers[stage] for name, numbers in rows.items()}
            made = lax.cond(row["F"] == 1, lambda: self.forward(row, buffers)[0], lambda: nothing)

            def head(totals: Arrays) -> Arrays:
                travelled = self.cut.unpacked(last, made)
                found = self.cut.after(
                    self.outer, self.inputs(row["F.microbatch"]), travelled, self.totals
                )
                return [a + b for a, b in zip(totals, found, strict=True)]

            totals = lax.cond(self.is_last(row), head, lambda same: same, totals)
            return (self.sent(buffers, row, "F", made), totals), None

        (_, totals), _ = lax.scan(tick, (self.buffers(), self.no_totals()), self.rows())
        return totals

    def is_last(self, row: dict[str, Any]) -> Any:
        """Whether this stage's forward pass is through the last part."""
        return (row["F"] == 1) & (row["F.part"] == self.table.parts - 1)

    def rows(self) -> dict[str, jax.Array]:
        """What each stage does in each tick."""
        return {name: jnp.asarray(numbers) for name, numbers in self.program.rows.items()}

    def no_totals(self) -> Arrays:
        """What is added up, before any."""
        travelled = self.cut.loops[-1].travelling

        def after(*travelled: Any) -> Any:
            return self.cut.after(self.outer, self.inputs(0), list(travelled), self.totals)

        return [jnp.zeros(one.shape, one.dtype) for one in jax.eval_shape(after, *travelled)]

    def sent(self, buffers: Buffers, row: dict[str, Any], kind: str, made: Arrays) -> Buffers:
        """The buffers with what arrives on each of the ways that passes of a kind send."""
        buffer = {"F": "activations", "B": "gradients"}[kind]
        for far, pairs in self.program.channels[kind].items():
            arrived = [lax.ppermute(x, self.axis, pairs) for x in made] if far else made
            buffers = buffers | {buffer: _write(buffers[buffer], row[channel(kind, far)], arrived)}
        return buffers


def _read(buffer: Arrays, slot: Any) -> Arrays:
    return [lax.dynamic_index_in_dim(x, slot, keepdims=False) for x in buffer]


def _write(buffer: Arrays, slot: Any, values: Arrays) -> Arrays:
    return [
        lax.dynamic_update_index_in_dim(x, new.astype(x.dtype), slot, 0)
        for x, new in zip(buffer, values, strict=True)
    ]


def _empty(shapes: Sequence[Any], count: int, *more: int) -> Arrays:
    """Buffers of so many slots; no slot, no buffer."""
    return [jnp.zeros((count, *more, *one.shape), one.dtype) for one in shapes if count]


def _with(buffers: Buffers, name: str, loop: int, of_loop: Arrays) -> Buffers:
    """With those of one loop."""
    return buffers | {name: [*buffers[name][:loop], of_loop, *buffers[name][loop + 1 :]]}


def _get(buffer: Arrays, slot: Any, number: Any) -> Arrays:
    """What lies in a slot of one layer."""
    return [
        lax.dynamic_slice(x, (slot, number, *[0] * (x.ndim - 2)), (1, 1, *x.shape[2:]))[0, 0]
        for x in buffer
    ]


def _put(buffer: Arrays, slot: Any, number: Any, values: Arrays) -> Arrays:
    """With values in a slot for one layer."""
    return [
        lax.dynamic_update_slice(
            x, new.astype(x.dtype)[None, None], (slot, number, *[0] * (x.ndim - 2))
        )
        for x, new in zip(buffer, values, strict=True)
    ]


def _filled(stacks: Arrays, first: Any, values: Arrays) -> Arrays:
    return [
        lax.dynamic_update_slice_in_dim(x, new, first, 0)
        for x, new in zip(stacks, values, strict=True)
    ]


def _replaced(arrays: Sequence[Any], places: Sequence[int], values: Arrays) -> Arrays:
    found = list(arrays)
    for k, value in zip(places, values, strict=True):
        found[k] = value
    return found


def _parted(arrays: Arrays, smooth: Sequence[bool]) -> tuple[Arrays, Callable[[Arrays], Arrays]]:
    """What has derivatives, and how to put it back among the others."""
    places = [k for k, of in enumerate(smooth) if of]
    return [arrays[k] for k in places], partial(_replaced, arrays, places)
