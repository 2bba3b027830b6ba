"""The executor: one program, in which each stage does in each tick what the table says. Manual over the stages' axis.

In a tick a stage may go forward, backward and make gradients of weights, each under a `cond`: what the stages do differs,
the program does not. Between ticks, what was made is sent on: one permute for each way that the schedule sends.

Around the loop of ticks nothing differs from any other step: the weights outside the stages are whole on each, those of
the stages are there alone, and so are the sums of gradients that come out.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from shardlib.pipeline._cut import Cut
from shardlib.pipeline._layer import layer
from shardlib.pipeline._program import Program, channel

Arrays = list[Any]


def execute(
    cut: Cut,
    program: Program,
    axis: str,
    weights: Sequence[Any],
    sums: Sequence[Any],
    inputs: Callable[[Any], Arrays],
    totals: Sequence[int],
) -> tuple[Arrays, Arrays]:
    """Run the schedule: what `totals`, outputs of the loss, add up to on this stage, and the sums with its gradients.

    `weights` are all weights, of the stacked ones this stage's layers, part after part; `sums` has for each trained one
    what its gradients are added to. `inputs(microbatch)` are the loss's.
    """
    return _Executor(cut, program, axis, weights, inputs, totals).run(sums)


def measure(
    cut: Cut,
    program: Program,
    axis: str,
    weights: Sequence[Any],
    inputs: Callable[[Any], Arrays],
    totals: Sequence[int],
) -> Arrays:
    """Run a schedule of forward passes alone: what `totals` add up to on this stage."""
    return _Executor(cut, program, axis, weights, inputs, totals).measure()


class _Executor:
    def __init__(
        self,
        cut: Cut,
        program: Program,
        axis: str,
        weights: Sequence[Any],
        inputs: Callable[[Any], Arrays],
        totals: Sequence[int],
    ) -> None:
        self.cut, self.program, self.axis, self.inputs, self.totals = cut, program, axis, inputs, list(totals)
        self.table = program.table
        self.layer = layer(cut, self.table.splits)
        self.outer = [weights[k] for k in cut.outer]
        self.stack = [weights[k] for k in cut.stacked]
        self.trained = [k for k in cut.stacked if k in cut.trained]
        self.chunks = self.table.parts // self.table.stages
        self.per = cut.layers // self.table.parts
        self.travels = len(cut.travelling) - len(cut.told)
        self.smooth_told = [k for k, of in enumerate(cut.smooth[self.travels :]) if of]

    # What a stage has of it all.

    def zeros(self) -> Arrays:
        """Of what travels."""
        return [jnp.zeros(one.shape, one.dtype) for one in self.cut.travelling]

    def no_gradients(self) -> Arrays:
        """Of the gradients of what travels."""
        pairs = zip(self.cut.travelling, self.cut.smooth, strict=True)
        return [jnp.zeros(one.shape, one.dtype) for one, smooth in pairs if smooth]

    def buffers(self) -> dict[str, Arrays]:
        """All that waits, nothing yet; one slot more than is used."""
        slots = self.program.slots
        of = {
            "activations": self.cut.travelling,
            "kept": [jax.ShapeDtypeStruct((self.per, *one.shape), one.dtype) for one in self.layer.kept],
            "gradients": [one for one, smooth in zip(self.cut.travelling, self.cut.smooth, strict=True) if smooth],
            "left": [jax.ShapeDtypeStruct((self.per, *one.shape), one.dtype) for one in self.layer.left],
        }
        return {
            name: [jnp.zeros((slots[name] + 1, *one.shape), one.dtype) for one in shapes] for name, shapes in of.items()
        }

    def chunk(self, arrays: Arrays, number: Any) -> Arrays:
        """The layers of one part, of arrays with all layers of the stage."""
        if self.chunks == 1:
            return arrays
        return [lax.dynamic_slice_in_dim(x, number * self.per, self.per) for x in arrays]

    def own(self, row: dict[str, Any], kind: str) -> tuple[Arrays, Arrays, Arrays]:
        """The inputs of a pass's microbatch, what is made of them for all layers, and layer by layer for its part."""
        given = self.inputs(row[f"{kind}.microbatch"])
        same, plain = self.cut.fixed(self.outer, given)
        first = row[f"{kind}.part"] * self.per
        return given, same, [lax.dynamic_slice_in_dim(x, first, self.per) for x in plain]

    # Passes.

    def forward(self, row: dict[str, Any], buffers: dict[str, Arrays]) -> tuple[Arrays, dict[str, Arrays]]:
        """What travels on."""
        given, same, plain = self.own(row, "F")
        start, weights = self.travels, self.chunk(self.stack, row["F.chunk"])
        arrived = partial(_read, buffers["activations"], row["F.activations"])
        come = lax.cond(row["F.part"] == 0, lambda: self.cut.before(self.outer, given), arrived)

        def body(travelling: Arrays, scanned: Any) -> tuple[Arrays, tuple[Arrays, Arrays]]:
            mine, of_layer = scanned
            travelling, told, kept = self.layer.forward(travelling, mine, [*same, *of_layer])
            return travelling, (told, kept)

        travelling, (told, kept) = lax.scan(body, come[:start], (weights, plain), length=self.per)
        first = row["F.part"] * self.per
        told = [lax.dynamic_update_slice_in_dim(x, new, first, 0) for x, new in zip(come[start:], told, strict=True)]
        return [*travelling, *told], buffers | {"kept": _write(buffers["kept"], row["F.kept"], kept)}

    def head(
        self, row: dict[str, Any], travelled: Arrays, buffers: dict[str, Arrays], sums: Arrays, totals: Arrays
    ) -> tuple[dict[str, Arrays], Arrays, Arrays]:
        """What comes after the last part, and at once its gradient, lest what it keeps waits."""
        given = self.inputs(row["F.microbatch"])
        trained = [k for k in self.cut.leave if self.cut.outer[k] in self.cut.trained]
        floats = [x for x, smooth in zip(travelled, self.cut.smooth, strict=True) if smooth]

        def loss(floats: Arrays, of_trained: Arrays) -> tuple[Any, Arrays]:
            moved, outer = iter(floats), list(self.outer)
            for k, weight in zip(trained, of_trained, strict=True):
                outer[k] = weight
            now = [next(moved) if smooth else x for x, smooth in zip(travelled, self.cut.smooth, strict=True)]
            total, *rest = self.cut.after(outer, given, now, [0, *self.totals])
            return total, rest

        of_trained = [self.outer[k] for k in trained]
        (_, found), (back, gradients) = jax.value_and_grad(loss, (0, 1), has_aux=True)(floats, of_trained)
        buffers = buffers | {"gradients": _write(buffers["gradients"], row["F.gradients"], back)}
        return buffers, self.added(sums, trained, gradients), [a + b for a, b in zip(totals, found, strict=True)]

    def backward(
        self, row: dict[str, Any], buffers: dict[str, Arrays], sums: Arrays
    ) -> tuple[Arrays, dict[str, Arrays], Arrays]:
        """Gradients of what came; of weights, where passes are not split."""
        _, same, plain = self.own(row, "B")
        come = _read(buffers["gradients"], row["B.gradients"])
        kept = _read(buffers["kept"], row["B.kept"])
        weights, moving = self.chunk(self.stack, row["B.chunk"]), sum(self.cut.smooth[: self.travels])
        first = row["B.part"] * self.per
        of_told = [lax.dynamic_slice_in_dim(x, first, self.per) for x in come[moving:]]
        scanned = (jnp.arange(self.per), weights, plain, kept, of_told)

        def whole(carry: Any, scanned: Any) -> Any:
            (gradients, sums), (number, mine, of_layer, residuals, of_told) = carry, scanned
            given = [*gradients, *of_told]
            gradients, of_weights = self.layer.backward(residuals, mine, [*same, *of_layer], given)
            return (gradients, self.add_layer(sums, row["B.chunk"] * self.per + number, of_weights)), None

        def split(carry: Any, scanned: Any) -> Any:
            (gradients, sums), (_, mine, of_layer, residuals, of_told) = carry, scanned
            gradients, left = self.layer.inputs(residuals, mine, [*same, *of_layer], [*gradients, *of_told])
            return (gradients, sums), left

        body = split if self.table.splits else whole
        (gradients, sums), left = lax.scan(body, (come[:moving], sums), scanned, reverse=True)
        if self.table.splits:
            buffers = buffers | {"left": _write(buffers["left"], row["B.left"], left)}
        return [*gradients, *come[moving:]], buffers, sums

    def enter(self, row: dict[str, Any], gradients: Arrays, sums: Arrays) -> Arrays:
        """What comes before the first part, backward: done again, for it is little."""
        given = self.inputs(row["B.microbatch"])
        trained = [k for k in self.cut.enter if self.cut.outer[k] in self.cut.trained]

        def come(of_trained: Arrays) -> Arrays:
            outer = list(self.outer)
            for k, weight in zip(trained, of_trained, strict=True):
                outer[k] = weight
            made = self.cut.before(outer, given)
            return [x for x, smooth in zip(made, self.cut.smooth, strict=True) if smooth]

        _, back = jax.vjp(come, [self.outer[k] for k in trained])
        return self.added(sums, trained, back(gradients)[0])

    def of_weights(self, row: dict[str, Any], buffers: dict[str, Arrays], sums: Arrays) -> Arrays:
        """Gradients of weights, after those of what came."""
        _, same, plain = self.own(row, "W")
        kept, left = (_read(buffers[name], row[f"W.{name}"]) for name in ("kept", "left"))
        weights = self.chunk(self.stack, row["W.chunk"])

        def body(sums: Arrays, scanned: Any) -> tuple[Arrays, None]:
            number, mine, of_layer, residuals, left = scanned
            found = self.layer.weights(residuals, mine, [*same, *of_layer], left)
            return self.add_layer(sums, row["W.chunk"] * self.per + number, found), None

        return lax.scan(body, sums, (jnp.arange(self.per), weights, plain, kept, left))[0]

    # Sums of gradients: of the outer weights, then of the stacked ones.

    def added(self, sums: Arrays, which: Sequence[int], gradients: Arrays) -> Arrays:
        """With gradients of some outer weights."""
        found = list(sums)
        for k, gradient in zip(which, gradients, strict=True):
            found[k] = found[k] + gradient.astype(found[k].dtype)
        return found

    def add_layer(self, sums: Arrays, number: Any, gradients: Arrays) -> Arrays:
        """With those of one layer of the stage."""
        return [x.at[number].add(gradient.astype(x.dtype)) for x, gradient in zip(sums, gradients, strict=True)]

    def run(self, sums: Sequence[Any]) -> tuple[Arrays, Arrays]:
        """Go through all ticks."""
        stage = lax.axis_index(self.axis)
        start = (
            self.buffers(), [sums[k] for k in self.cut.outer], [sums[k] for k in self.trained], self.no_totals()
        )  # fmt: skip

        def tick(state: Any, rows: Any) -> tuple[Any, None]:
            buffers, of_outer, of_stack, totals = state
            row = {name: numbers[stage] for name, numbers in rows.items()}
            made, buffers = lax.cond(
                row["F"] == 1, partial(self.forward, row), lambda buffers: (self.zeros(), buffers), buffers
            )
            buffers, of_outer, totals = lax.cond(
                self.is_last(row),
                lambda buffers, of_outer, totals: self.head(row, made, buffers, of_outer, totals),
                lambda *same: same,
                buffers, of_outer, totals,
            )  # fmt: skip
            gradients, buffers, of_stack = lax.cond(
                row["B"] == 1,
                partial(self.backward, row),
                lambda buffers, of_stack: (self.no_gradients(), buffers, of_stack),
                buffers, of_stack,
            )  # fmt: skip
            of_outer = lax.cond(
                (row["B"] == 1) & (row["B.part"] == 0),
                lambda of_outer: self.enter(row, gradients, of_outer),
                lambda same: same,
                of_outer,
            )
            if self.table.splits:
                of_stack = lax.cond(
                    row["W"] == 1,
                    lambda of_stack: self.of_weights(row, buffers, of_stack),
                    lambda same: same,
                    of_stack,
                )
            buffers = self.sent(self.sent(buffers, row, "F", made), row, "B", gradients)
            return (buffers, of_outer, of_stack, totals), None

        (_, of_outer, of_stack, totals), _ = lax.scan(tick, start, self.rows())
        after = list(sums)
        for where, of in ((self.cut.outer, of_outer), (self.trained, of_stack)):
            for k, x in zip(where, of, strict=True):
                after[k] = x
        return totals, after

    def measure(self) -> Arrays:
        """Go through all ticks of a table of forward passes."""
        stage = lax.axis_index(self.axis)

        def tick(state: Any, rows: Any) -> tuple[Any, None]:
            buffers, totals = state
            row = {name: numbers[stage] for name, numbers in rows.items()}
            made = lax.cond(row["F"] == 1, lambda: self.forward(row, buffers)[0], self.zeros)

            def head(totals: Arrays) -> Arrays:
                found = self.cut.after(self.outer, self.inputs(row["F.microbatch"]), made, self.totals)
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
        after = lambda travelled: self.cut.after(self.outer, self.inputs(0), travelled, self.totals)  # noqa: E731
        return [jnp.zeros(one.shape, one.dtype) for one in jax.eval_shape(after, self.zeros())]

    def sent(self, buffers: dict[str, Arrays], row: dict[str, Any], kind: str, made: Arrays) -> dict[str, Arrays]:
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
        lax.dynamic_update_index_in_dim(x, new.astype(x.dtype), slot, 0) for x, new in zip(buffer, values, strict=True)
    ]
