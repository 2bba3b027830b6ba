"""Losses written for plain `jit` or `pmap`: constraints that name the data axes, and a bound axis
called `batch`.

Models of Flax, T5X and MaxText say `with_sharding_constraint(x, P("data", "model"))`, themselves or
by `nn.with_logical_constraint`, and `BatchNorm(axis_name="batch")`. In the step, which is manual
over the data axes, JAX refuses the first and does not know the name of the second. So the loss is
traced before it is evaluated, as it would be in a plain `jit`, and what was traced is brought into
the step: constraints lose the axes that are manual, along which each device has its own examples
already, and `batch` becomes the data axes.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal
from jax.sharding import AbstractMesh, NamedSharding

from shardlib.layouts._annotate import all_automatic
from shardlib.layouts._flax_rules import in_force, pairs_in_force
from shardlib.layouts._rules import BATCH
from shardlib.layouts._specs import keep_axes, parts_over
from shardlib.step._strategy import Strategy
from shardlib.tracing._jaxpr import evaluate

# Parameters of equations that are functions themselves: rules of derivatives, traced when needed.
_RULES = ("jvp_jaxpr_fun", "fwd_jaxpr_thunk")
# Collectives that take any number of axes, also none.
_SUMS = ("psum", "psum_invariant", "pmax", "pmin")


@dataclass(frozen=True)
class _Traced:
    """A traced function that has been brought into the step, and the shapes of its results."""

    jaxpr: ClosedJaxpr
    out: Any


def adapted(function: Callable[..., Any], strategy: Strategy) -> Callable[..., Any]:
    """A function of trees of arrays that may name the data axes and `batch`, for use in the step.

    The function is traced once for all calls with arguments of the same shapes and dtypes under the
    same mesh. Its Python code must depend on nothing else.
    """
    return _Adapted(function, strategy)


@dataclass(frozen=True, eq=False)
class _Adapted:
    """What `adapted` returns: a function with the traces that were made of it.

    The step looks at the trace of a loss before it differentiates it. Tracing a model takes a
    notable part of the time in which a step compiles, so it is done once for the same arguments.
    """

    function: Callable[..., Any]
    strategy: Strategy
    traces: dict[Any, _Traced] = field(default_factory=dict)

    def __call__(self, *args: Any) -> Any:
        """The result of the function, from a trace that is evaluated in the step."""
        mesh = jax.sharding.get_abstract_mesh()
        leaves, treedef = jax.tree.flatten(args)
        types = tuple(jax.typeof(leaf) for leaf in leaves)
        # The same arguments mean another trace under another mesh, or with other manual axes.
        key = (mesh, treedef, types)
        if key not in self.traces:
            self.traces[key] = self._trace(mesh, args)
        traced = self.traces[key]
        return evaluate(traced.jaxpr, traced.out, args)

    def _trace(self, mesh: AbstractMesh, args: Any) -> _Traced:
        """Trace the function, and bring the trace onto the step's `mesh`.

        A function whose constraints JAX refuses there is traced again with no axis manual.
        """
        automatic = self.strategy.device_mesh.abstract_mesh
        bound = self._bound_axes(automatic)
        try:
            trace = jax.make_jaxpr(self._call_lazily, axis_env=bound, return_shape=True)
            jaxpr, out = trace(*args)
            everywhere = False
        except NameError as error:
            # A misspelt variable in the loss is a `NameError` too, and the user's to see.
            if "unbound axis name" not in str(error):
                raise
            raise ValueError(_unbound(str(error), mesh.manual_axes)) from error
        except ValueError as error:
            # Where nothing is manual, JAX's refusal is right, and another trace would not differ.
            if not mesh.manual_axes or not _is_about_meshes(error):
                raise
            jaxpr, out = _as_if_automatic(self._call_lazily, bound, automatic, args, error)
            everywhere = True
        rewriting = _Rewriting(mesh, automatic, self.strategy.data_axes, everywhere)
        return _Traced(rewriting.closed(jaxpr), out)

    def _call_lazily(self, *args: Any) -> Any:
        """Call the function, in which Flax does not lay out variables as they are made.

        A loss may make modules of values that it has, as `nnx.bridge.ToLinen` does.
        """
        with in_force(pairs_in_force(), eager=False):
            return self.function(*args)

    def _bound_axes(self, automatic: AbstractMesh) -> list[tuple[str, int]]:
        """The names and sizes of axes that the trace binds besides those of the mesh."""
        # An axis of the mesh that is called `batch` itself needs no stand-in.
        if BATCH in automatic.shape:
            return []
        return [(BATCH, parts_over(automatic.shape, self.strategy.data_axes))]


def _is_about_meshes(error: ValueError) -> bool:
    """Whether JAX refuses a constraint, or something that follows from one.

    A constraint may be refused for the axes that it names, or be accepted and bring along another
    mesh than that of the step, which a later operation refuses. JAX has one class for both, so
    only the text of the error tells.
    """
    return "with_sharding_constraint" in str(error) or "context mesh" in str(error)


def _as_if_automatic(
    function: Callable[..., Any], bound: Any, automatic: AbstractMesh, args: Any, error: ValueError
) -> Any:
    """Trace a function as if no axis were manual, and return its jaxpr and the shapes of results.

    Args:
        function: The function to trace.
        bound: The names and sizes of axes that are bound in the trace besides the mesh's.
        automatic: The mesh, with all of its axes automatic.
        args: The arguments, of which only shapes and dtypes are used.
        error: Why the trace on the manual mesh failed, which a refusal quotes.
    """
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(jax.numpy.shape(x), jax.typeof(x).dtype), args
    )
    with all_automatic(automatic):
        try:
            return jax.make_jaxpr(function, axis_env=bound, return_shape=True)(*shapes)
        except ValueError as again:
            if not _is_about_meshes(again):
                raise
            raise ValueError(_refusal(str(error))) from again


def _unbound(why: str, manual: tuple[str, ...]) -> str:
    """The error for a loss that names an axis which the step does not bind.

    `manual` are the axes that it does bind, and `why` is what JAX says.
    """
    axes = ", ".join(map(repr, (*manual, BATCH)))
    return (
        f"The loss asks for an axis that the step does not bind; it binds {axes}. A layer's "
        "`axis_name` is one of these, or all the axes of the data, `axis_name=strategy.data_axes`. "
        f"JAX says: {why}"
    )


def _refusal(why: str) -> str:
    """The error for a constraint that cannot be brought into the step, with JAX's reason `why`."""
    return (
        "A sharding constraint in the loss cannot be brought into the step, which is manual over "
        "the axes of the data. Name the dims of the array instead, `sl.shard(x, names)`; or leave "
        "those axes out of the constraint; or leave them to the partitioner, "
        f"`Strategy(manual=())`. JAX says: {why}"
    )


@dataclass(frozen=True)
class _Rule:
    """A rule of differentiation, which JAX traces when it needs it.

    It is traced on the mesh on which its function was traced, and the result is then brought into
    the step as the function was. It has the two attributes that JAX uses of such a rule.
    """

    rule: Any
    rewriting: "_Rewriting"

    @property
    def debug_info(self) -> Any:
        return self.rule.debug_info

    def call_wrapped(self, *zeros: Any) -> Any:
        with jax.sharding.use_abstract_mesh(self.rewriting.automatic):
            jaxpr, *others = self.rule.call_wrapped(*zeros)
        return self.rewriting.jaxpr(jaxpr), *others


@dataclass(frozen=True)
class _Rewriting:
    """Rewrites a traced function for `mesh`, on which some axes are manual.

    `batch` stands for `axes`. If `everywhere`, the whole function was traced on the `automatic`
    mesh. Otherwise only the operations after a constraint were, because the constraint introduced
    that mesh.
    """

    mesh: AbstractMesh
    automatic: AbstractMesh
    axes: tuple[str, ...]
    everywhere: bool
    contexts: dict[Any, Any] = field(default_factory=dict)

    def closed(self, traced: ClosedJaxpr) -> ClosedJaxpr:
        """A traced function with its constants, brought onto the mesh."""
        return ClosedJaxpr(self.jaxpr(traced.jaxpr), traced.consts)

    def jaxpr(self, jaxpr: Jaxpr) -> Jaxpr:
        """A traced function, brought onto the mesh: the same equations in the same order.

        A variable whose type names the mesh is exchanged for a new one, everywhere that it occurs.
        """
        known: dict[Any, Any] = {}

        def atom(value: Any) -> Any:
            if isinstance(value, Literal):
                return value
            if value not in known:
                known[value] = self._variable(value)
            return known[value]

        def atoms(values: Any) -> list[Any]:
            return [atom(value) for value in values]

        constants, inputs = atoms(jaxpr.constvars), atoms(jaxpr.invars)
        # Equations come in order, so that a variable is exchanged before it is read.
        equations = [self._equation(equation, atoms) for equation in jaxpr.eqns]
        return jaxpr.replace(
            constvars=constants,
            invars=inputs,
            outvars=atoms(jaxpr.outvars),
            eqns=equations,
            effects=self._effects(jaxpr.effects),
        )

    def _variable(self, variable: Any) -> Any:
        """The variable itself, or a new one if the sharding in its type names the traced mesh."""
        sharding = getattr(variable.aval, "sharding", None)
        moved = self._value(sharding)
        # Most variables name no mesh. They stay the same objects, which costs nothing.
        if moved is sharding:
            return variable
        return type(variable)(variable.aval.update(sharding=moved))

    def _equation(self, equation: Any, atoms: Callable[[Any], list[Any]]) -> Any:
        """An equation with its parameters, variables, effects and context brought onto the mesh.

        `atoms` exchanges variables. An equation that names the axis `batch` gets the data axes.
        """
        name, params = equation.primitive.name, dict(equation.params)
        for key, value in params.items():
            if key in _RULES and self.everywhere:
                params[key] = _Rule(value, self)
            else:
                params[key] = self._value(value)
        if name == "shard_map" and self.everywhere:
            raise ValueError(_refusal("a `shard_map` beside it runs on each device's own shard."))
        # Only equations that name `batch` change: those over axes of the mesh, which are bound in
        # the step too, mean there what they meant in the trace.
        named = _axes_of(params)
        if name == "axis_index" and params["axis_name"] == BATCH:
            params["axis_name"] = self._one_axis(name)
        elif BATCH in named:
            params.update(self._renamed(name, params, named))
        return equation.replace(
            invars=atoms(equation.invars),
            outvars=atoms(equation.outvars),
            params=params,
            effects=self._effects(equation.effects),
            ctx=self._context(equation.ctx) if self.everywhere else equation.ctx,
        )

    def _value(self, value: Any) -> Any:
        """A parameter of an equation, with the functions, meshes and shardings in it exchanged.

        A sharding keeps only the axes that are automatic in the step: along the manual ones each
        device has its own examples already. Other values are returned as they are.
        """
        if isinstance(value, ClosedJaxpr):
            return self.closed(value)
        if isinstance(value, Jaxpr):
            return self.jaxpr(value)
        if isinstance(value, AbstractMesh):
            return self.mesh if value == self.automatic else value
        if isinstance(value, NamedSharding) and value.mesh.abstract_mesh == self.automatic:
            return NamedSharding(self.mesh, keep_axes(value.spec, self.mesh.auto_axes))
        # Parameters such as the branches of a `cond` are tuples of functions.
        if type(value) is tuple:
            return tuple(self._value(item) for item in value)
        if type(value) is list:
            return [self._value(item) for item in value]
        return value

    def _context(self, context: Any) -> Any:
        """The context that an equation was traced under, with the mesh of the step.

        JAX has no way to exchange the mesh in a context, so another equation, any one, is traced
        under both, and its context taken.
        """
        if context not in self.contexts:
            # `sin` stands for any operation: only the context of its equation is wanted.
            with context.manager, jax.sharding.use_abstract_mesh(self.mesh):
                self.contexts[context] = jax.make_jaxpr(jax.numpy.sin)(0.0).jaxpr.eqns[0].ctx
        return self.contexts[context]

    def _effects(self, effects: Any) -> Any:
        """The effects of a function or an equation, those on `batch` exchanged.

        Each collective over a named axis has an effect with the name of that axis.
        """
        changed = []
        for effect in effects:
            if getattr(effect, "name", None) == BATCH:
                changed.extend(type(effect)(axis) for axis in self.axes)
            else:
                changed.append(effect)
        return frozenset(changed)

    def _renamed(self, name: str, params: dict[str, Any], named: tuple[Any, ...]) -> dict[str, Any]:
        """The parameters of a collective that name its axes, with the data axes for `batch`.

        Groups of devices are numbered along one axis, and most collectives need at least one: both
        are refused where the data axes cannot serve.
        """
        # The data axes take the place of `batch`, in the order of the mesh: collectives that
        # concatenate depend on it.
        position = named.index(BATCH)
        axes = (*named[:position], *self.axes, *named[position + 1 :])
        # Groups number the devices along one axis, and mean nothing along several.
        grouped = params.get("axis_index_groups") is not None
        if (grouped and len(self.axes) != 1) or (name not in _SUMS and not axes):
            self._one_axis(name)
        return {key: axes for key in ("axes", "axis_name") if key in params}

    def _one_axis(self, name: str) -> str:
        """The only data axis, for an operation `name` that takes exactly one; or an error."""
        if len(self.axes) != 1:
            listed = ", ".join(map(repr, self.axes)) or "none"
            raise ValueError(
                f"The loss asks for `{name}` over the axis `{BATCH}`, which stands for the axes "
                f"over which the step is manual: {listed}. Name one of the mesh, or take the mean "
                "over all of them: `sl.batch_mean(x)`."
            )
        return self.axes[0]


def _axes_of(params: dict[str, Any]) -> tuple[Any, ...]:
    """The axes that an equation names in its parameters; collectives have two keys for them."""
    named = params.get("axes", params.get("axis_name", ()))
    return tuple(named) if isinstance(named, tuple | list) else (named,)
