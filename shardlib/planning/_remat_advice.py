"""What blocks should keep, by the best choices that there are for them.

    the step does not fit     what computes the least again of what does, as compiled
    much memory is left       what spares the most again, and takes at most half of what is left

The former is compiled before it is said: what a program takes at its fullest moment is known only
then. The latter is said by the sizes of arrays, with half of the room for what they do not know.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from shardlib._text import human_bytes
from shardlib.layouts._remat_policy import Remat, kept_by_blocks
from shardlib.layouts._remat_text import plain_remat, remat_code
from shardlib.planning._activations import Activation, loops_of_step, products_scale
from shardlib.planning._compiled_step import CompiledStep, compile_step
from shardlib.planning._frontier import say_on_first_process
from shardlib.step._remat_budget import Layers, fit_remat
from shardlib.step._step import Step, with_remat
from shardlib.tracing._block_activations import INPUT
from shardlib.tracing._block_costs import Costs

# So many programs are compiled for advice at most.
_PROGRAMS = 3
# Where less than this share of the memory is free, nothing is said of it; nor of choices that spare
# less than this share of the products.
_MUCH, _WORTHWHILE = 0.05, 0.01


class Planned(NamedTuple):
    """A step of ours that was planned, with what its blocks keep."""

    step: Any
    state: Any
    batch: Any
    made: CompiledStep
    activations: Sequence[Activation]
    cache: Any

    @property
    def usable(self) -> float:
        """What a step may take of a device."""
        return self.made.machine.chip.usable_bytes

    @property
    def total(self) -> int:
        """What this one takes."""
        return self.made.memory.total_bytes

    def compiled_bytes(self, remat: Any) -> int:
        """What the step takes if its blocks keep something else, as compiled.

        A line on standard error says so, because a program may take minutes to compile.
        """
        step = with_remat(self.step, remat)
        made = compile_step(step, self.state, self.batch, self.made.machine, self.cache)
        size = made.memory.total_bytes
        say_on_first_process(
            f"for advice: {human_bytes(size)} with {remat_code(plain_remat(remat))}"
        )
        return size


def remat_advice(planned: Planned) -> list[tuple[float, str]]:
    """What to change of `Strategy(remat=...)`, with the bytes that it is about; maybe nothing.

    Nothing is advised for steps that are not ours, for pipelines, whose schedule decides how much
    is alive, and where nobody knows what memory there is.
    """
    step = planned.step
    if not isinstance(step, Step) or step.strategy.pipeline is not None:
        return []
    if planned.usable == float("inf"):
        return []
    if planned.made.fits:
        return _of_room(planned)
    return _of_excess(planned)


def _of_room(planned: Planned) -> list[tuple[float, str]]:
    """What to keep where much memory is left and something is computed again.

    Half of the room is filled at most: what compilers pad and copy is in no array of the trace.
    """
    kept = kept_by_blocks(planned.step.strategy.remat)
    flops = planned.made.flops
    if not isinstance(kept, Remat) and kept is not None and not planned.activations:
        return []
    # What drops parts, keeps the inputs of few blocks, or has some on the host, is chosen for
    # another reason.
    if kept is None or kept.dropped or kept.offloaded or kept.chain is not None or flops is None:
        return []
    room = planned.usable - planned.total
    if room < _MUCH * planned.usable or not flops.recomputed or not planned.activations:
        return []
    # Inputs of blocks are kept by every choice, which counts what is kept besides.
    held = sum(one.held_bytes for one in planned.activations if one.name != INPUT)
    layers = Layers.of(loops_of_step(planned.step, planned.state, planned.batch))
    remat, estimate, again = layers.best(held + room / 2)
    spared = flops.recomputed - again * products_scale(planned.step.strategy)
    share = spared / flops.total
    if share < _WORTHWHILE or estimate <= held:
        return []
    # People may want the room for more examples, so that the bytes are said too.
    more = estimate - held
    text = (
        f"Keep more: `Strategy(remat={remat_code(plain_remat(remat))})` spares {share:.1%} of the "
        f"step's products, and needs {human_bytes(more)} more of the {human_bytes(room)} that are "
        "free, by the sizes of its arrays; `--frontier` or `sl.planning.frontier` has all choices."
    )
    return [(more, text)]


def _of_excess(planned: Planned) -> list[tuple[float, str]]:
    """What to keep where the step does not fit.

    Where blocks that keep nothing but inputs take too much, no choice of names fits, and other ways
    are looked for.
    """
    saved = float(planned.made.memory.most["activations"])
    strategy = planned.step.strategy
    if not planned.activations:
        if strategy.remat != "none" or not saved:
            return []
        return [
            (
                saved,
                f"Recompute activations, {human_bytes(saved)}: mark the blocks of the model with "
                '`sl.remat`, of which this loss calls none, and take `Strategy(remat="full")`.',
            )
        ]
    full = planned.total
    if kept_by_blocks(strategy.remat) != Remat():
        full = planned.compiled_bytes(Remat())
    if full > planned.usable:
        return _beyond_full(planned, full, saved)
    loops = loops_of_step(planned.step, planned.state, planned.batch)
    # The program that is known already need not be compiled again.
    known = {Remat(): full}

    def peak_of(remat: Any) -> int:
        if remat not in known:
            known[remat] = planned.compiled_bytes(remat)
        return known[remat]

    best = fit_remat(int(planned.usable), loops, peak_of, _PROGRAMS).best
    return [(saved, _fitting(planned, best.remat, best.peak, best.flops))]


def _fitting(planned: Planned, remat: Any, size: int, flops: int) -> str:
    """Advice to take a value that fits."""
    again = flops * products_scale(planned.step.strategy)
    made = planned.made.flops
    # Products are counted of all steps that get here: those of ours without a pipeline.
    assert made is not None
    share = again / max(1, made.total - made.recomputed)
    return (
        f"Keep less: with `Strategy(remat={remat_code(plain_remat(remat))})` it takes "
        f"{human_bytes(size)}, which fits, and computes {share:.1%} of its products again."
    )


def _beyond_full(planned: Planned, full: int, saved: float) -> list[tuple[float, str]]:
    """What is left where the inputs of all blocks alone are too much.

    Where inputs are more than what is missing, a step may fit that has them on the host, or keeps
    few of them. It is advised only if it is compiled and fits.
    """
    inputs = sum(one.held_bytes for one in planned.activations if one.name == INPUT)
    if inputs > full - planned.usable and kept_by_blocks(planned.step.strategy.remat) == Remat():
        return [(saved, _with_fewer_inputs(planned))]
    text = ""
    if planned.step.strategy.remat != "full":
        text = (
            f'With `Strategy(remat="full")` it takes {human_bytes(full)}, still '
            f"{human_bytes(full - planned.usable)} too much: combine it with the following."
        )
    return [(saved, text)]


def _with_fewer_inputs(planned: Planned) -> str:
    """Advice for a step whose blocks have no room for their inputs; empty if there is none.

    Copies to the host run beside the computation, so that they come first.
    """
    loops = loops_of_step(planned.step, planned.state, planned.batch)
    names: set[str] = set()
    for loop in loops:
        for block in loop.blocks:
            names.update(Costs.of(block).input_names)
    if names:
        remat = Remat.offload(*names)
        size = planned.compiled_bytes(remat)
        if size <= planned.usable:
            return (
                "Keep the inputs of blocks on the host: with "
                f"`Strategy(remat={remat_code(remat)})` it takes {human_bytes(size)}, which fits."
            )
    size = planned.compiled_bytes("sublinear")
    if size > planned.usable:
        return ""
    return (
        'Keep the inputs of few blocks: with `Strategy(remat="sublinear")` it takes '
        f"{human_bytes(size)}, which fits, and computes most blocks once more."
    )
