"""The optimizer's state after the parameters of a new state were replaced.

Most optimizers begin with zeros. Some keep copies of the parameters, to average them or to measure
how far they have moved: `optax.contrib.schedule_free`, `dog`, `cocob`. Their state has to be made
from the new parameters.
"""

from typing import Any

import jax
from jax import lax

from shardlib._text import listed
from shardlib._tree import named_leaves
from shardlib.layouts._host import to_device
from shardlib.step._workers import repeated
from shardlib.tracing._jaxpr import behind, inlined, inputs_of, variables


def with_first_optimizer_state(state: Any) -> Any:
    """A state whose optimizer begins with its parameters, where it keeps any of them.

    What the optimizer has gathered in steps would be lost, so that it is refused after the first.
    """
    optimizer = state.layout.optimizer
    if optimizer is None or isinstance(state.step, jax.ShapeDtypeStruct):
        return state
    with state.layout.strategy.scope():  # as where it was made
        kept = _made_of_parameters(optimizer.init, state.params)
    if not kept:
        return state
    steps = int(state.step)
    if steps:
        raise ValueError(
            f"The state has been trained, to step {steps}, and its optimizer keeps parameters in "
            f"{listed(kept)}, which would stay those of before. Give parameters to a state that "
            "`sl.init` has just made; to evaluate or export them, one without an optimizer: "
            "`sl.init(make_model, None, strategy).with_weights(weights)`."
        )
    workers = state.workers
    with state.layout.strategy.scope():
        if workers is None or workers.has_server:
            return state.replaced(opt_state=_begun(state, state.opt_state, None))
        own = _begun(state, workers.opt_state, state.layout.workers)
    return state.replaced(workers=workers._replace(opt_state=own))


def _begun(state: Any, like: Any, workers: int | None) -> Any:
    """What the optimizer begins with, sharded as it is now; of so many workers, or of none."""

    def begin(params: Any) -> Any:
        made = state.layout.optimizer.init(jax.tree.map(to_device, params))
        if workers is not None:
            made = repeated(made, workers)
        # A weak type would become a strong one in the first step.
        return jax.tree.map(lambda new, old: lax.convert_element_type(new, old.dtype), made, like)

    shardings = jax.tree.map(lambda x: x.sharding, like)
    return jax.jit(begin, out_shardings=shardings)(state.params)


def _made_of_parameters(init: Any, params: Any) -> list[str]:
    """The paths of what an optimizer begins with that depend on the values of parameters."""
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
    made, state = jax.make_jaxpr(init, return_shape=True)(shapes)
    jaxpr = inlined(made, lambda _: True).jaxpr
    parameters = set(jaxpr.invars)

    def read(outputs: list[Any]) -> bool:
        needed = [*inputs_of(behind(jaxpr, outputs)), *variables(outputs)]
        return not parameters.isdisjoint(needed)

    if not read(list(jaxpr.outvars)):
        return []
    paths = [path for path, _ in named_leaves(state)]
    return [path for path, out in zip(paths, jaxpr.outvars, strict=True) if read([out])]
