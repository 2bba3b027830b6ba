"""Which layers of a model get factors, and how they come into their kernels again."""

import functools
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import jax
from flax import nnx

from shardlib._text import listed
from shardlib.checks import _arguments as check
from shardlib.lora._adapter import Adapter, Kernel
from shardlib.modeling._flax import names_of_variable

Model = TypeVar("Model", bound=nnx.Module)


def add(
    model: Model,
    rank: int,
    *,
    alpha: float | None = None,
    paths: tuple[str, ...] = (".*",),
    rngs: nnx.Rngs,
) -> Model:
    """Give layers of a Flax NNX model two thin factors each, which learn in place of their kernels.

    Layers that can have them are `nnx.Linear`, `nnx.LinearGeneral` (of which attention is made),
    classes derived from these with the same `__call__`, and modules of your own that have a
    `kernel` with outputs first, say how many dims it has of each, as `inputs` and `outputs`, and
    add `self.adapter(x)` to their product where `adapter` is not None. Paths of parameters stay as
    they are; the factors are `.../adapter/down` and `up`.

    Args:
        model: is changed, and returned.
        rank: of the factors.
        alpha: what is added is times `alpha / rank`; by default `alpha` is the rank.
        paths: patterns that match the whole path of layers, such as `.*/attention/(query|value)`.
            By default all layers that can have factors.
        rngs: draws the factors that do not begin with zeros.

    >>> model = add(nnx.Linear(6, 4, rngs=nnx.Rngs(0)), rank=2, rngs=nnx.Rngs(1))
    >>> model.adapter.down.shape, model.adapter.up.shape
    ((2, 6), (4, 2))
    """
    _check_model("lora.add", model)
    check.whole("lora.add", "rank", rank, "the rank of the factors", least=1)
    if alpha is None:
        alpha = rank
    check.number("lora.add", "alpha", alpha, "a number", above=0)
    check.patterns("lora.add", "paths", paths)
    check.kind("lora.add", "rngs", rngs, nnx.Rngs, "random streams, `nnx.Rngs(0)`")
    layers = _layers(model)
    if not layers:
        raise ValueError(
            f"`lora.add`: `{type(model).__name__}` has no layer that can have factors: no "
            "`nnx.Linear`, no `nnx.LinearGeneral`, and no module with a `kernel` and an `adapter`."
        )
    chosen = _chosen(paths, layers)
    owners = _owners(model)
    # All are checked first, so that an error leaves the model as it was.
    for path in chosen:
        layer = layers[path]
        kernel = _kernel(layer)
        smaller = min(kernel.in_features, kernel.out_features)
        if rank > smaller:
            raise ValueError(
                f"`lora.add(rank={rank})`: `{path or 'the model'}` has a kernel of rank {smaller} "
                "at most. Choose a smaller rank, or leave it out of `paths`."
            )
        if getattr(layer, "adapter", None) is not None:
            raise ValueError(
                f"`lora.add`: `{path}` has factors already. Put these into the kernels first: "
                "`lora.merged(model)`."
            )
        _check_not_tied(path, layer, owners)
    for path in chosen:
        layer = layers[path]
        adapter = Adapter(_kernel(layer), rank, alpha / rank, rngs)
        if _is_flax(type(layer)):
            layer.__class__ = _with_adapter(type(layer))
        # What was None is static to Flax unless it is told otherwise.
        layer.adapter = nnx.data(adapter)
    return model


def merged(model: Model) -> Model:
    """The model without factors, which are added to their kernels; the given one stays as it is.

    Of a state: `lora.merged(state.model)`, which `sl.weights.save` writes. Sums are taken in
    float32, then rounded to the dtype of the kernel.
    """
    _check_model("lora.merged", model)
    model = nnx.clone(model)
    layers = _layers(model)
    with_factors = [one for one in layers.values() if getattr(one, "adapter", None) is not None]
    if not with_factors:
        raise ValueError(
            f"`lora.merged`: `{type(model).__name__}` has no layer with factors, as `lora.add` "
            "gives them."
        )
    for layer in with_factors:
        kernel = layer.kernel[...]
        summed = layer.adapter.added_to(kernel)
        sharding = getattr(kernel, "sharding", None)
        if sharding is not None:
            summed = jax.device_put(summed, sharding)
        layer.kernel.set_value(summed)
        without = _without_adapter(type(layer))
        if without is None:
            layer.adapter = nnx.static(None)
        else:
            del layer.adapter
            layer.__class__ = without
    return model


def _check_model(function: str, model: Any) -> None:
    """Refuse what is no model of Flax NNX."""
    if isinstance(model, nnx.Module):
        return
    takes = "a Flax NNX model; models of Linen get factors from Qwix"
    raise check.refusal(function, "model", model, takes)


def _layers(model: nnx.Module) -> dict[str, Any]:
    """The layers that can have factors, by their paths."""
    found = {}
    for path, module in nnx.iter_modules(model):
        is_own = all(hasattr(module, name) for name in _OF_OWN_LAYERS)
        is_flax = _is_flax(type(module)) or _without_adapter(type(module)) is not None
        # A kernel that is computed, by a property, can take nothing.
        is_flax = is_flax and "kernel" in vars(module)
        if is_own or is_flax:
            found["/".join(map(str, path))] = module
    return found


def _chosen(patterns: tuple[str, ...], layers: dict[str, Any]) -> list[str]:
    """The paths that a pattern matches; each must match one."""
    chosen = []
    for pattern in patterns:
        matched = [path for path in layers if re.fullmatch(pattern, path)]
        if not matched:
            raise ValueError(
                f"`lora.add(paths=...)`: `{pattern}` matches no layer that can have factors. "
                f"There are {listed(list(layers))}."
            )
        chosen += [path for path in matched if path not in chosen]
    return chosen


def _check_not_tied(path: str, layer: Any, owners: Mapping[int, Sequence[str]]) -> None:
    """Refuse a layer whose kernel is elsewhere too: what is added to it is one layer's."""
    own = f"{path}/kernel".lstrip("/")
    others = [other for other in owners[id(layer.kernel)] if other != own]
    if others:
        raise ValueError(
            f"`lora.add`: the kernel of `{path or 'the model'}` is `{others[0]}` too, and its "
            "factors would be added for one of them alone. Give each a kernel of its own, or leave "
            "the layer out of `paths`."
        )


def _owners(model: nnx.Module) -> dict[int, list[str]]:
    """The paths of each variable of a model, by its `id`; one that is shared has several."""
    owners: dict[int, list[str]] = defaultdict(list)

    def find(value: Any, path: str) -> None:
        if isinstance(value, nnx.Variable):
            owners[id(value)].append(path)
        elif isinstance(value, Mapping):
            for key, inner in value.items():
                find(inner, f"{path}/{key}")
        elif isinstance(value, list | tuple):
            for number, inner in enumerate(value):
                find(inner, f"{path}/{number}")

    for path, module in nnx.iter_modules(model):
        for name, value in vars(module).items():
            if not isinstance(value, nnx.Module):
                find(value, "/".join([*map(str, path), name]))
    return owners


def _kernel(layer: Any) -> Kernel:
    """The dims of a layer's kernel."""
    kernel = layer.kernel
    shape, dtype = kernel.shape, kernel.dtype
    names = names_of_variable(kernel)
    if isinstance(layer, nnx.Linear):
        return Kernel(shape, dtype, names, 1, 1, inputs_first=True)
    if isinstance(layer, nnx.LinearGeneral):
        _check_general(layer)
        inputs, outputs = len(layer.in_features), len(layer.out_features)
        return Kernel(shape, dtype, names, inputs, outputs, inputs_first=True)
    return Kernel(shape, dtype, names, layer.inputs, layer.outputs, inputs_first=False)


def _check_general(layer: nnx.LinearGeneral) -> None:
    """Refuse a layer whose inputs are not the last dims of what it is given."""
    last = tuple(range(-len(layer.in_features), 0))
    if layer.batch_axis or tuple(sorted(layer.axis)) != last:
        raise ValueError(
            f"`lora.add`: an `nnx.LinearGeneral(axis={layer.axis}, "
            f"batch_axis={dict(layer.batch_axis)})` can have no factors: its inputs are not the "
            "last dims of what it is given, in their order. Leave it out of `paths`."
        )


_FLAX_LAYERS = (nnx.Linear, nnx.LinearGeneral)
_OF_OWN_LAYERS = ("kernel", "inputs", "outputs", "adapter")


def _is_flax(kind: type) -> bool:
    """Whether a class is a layer of Flax, or one of yours that multiplies as that does."""
    if not issubclass(kind, _FLAX_LAYERS):
        return False
    return kind.__call__ in (nnx.Linear.__call__, nnx.LinearGeneral.__call__)


@functools.cache
def _with_adapter(kind: type) -> type:
    """The class of a layer of Flax that has factors beside its kernel."""

    class WithAdapter(kind):
        """A layer of Flax with factors beside its kernel."""

        without_adapter = kind

        def __call__(self, inputs: jax.Array, *arguments: Any, **options: Any) -> jax.Array:
            product = super().__call__(inputs, *arguments, **options)
            return product + self.adapter(inputs.astype(product.dtype))

    WithAdapter.__name__ = WithAdapter.__qualname__ = f"{kind.__name__}WithAdapter"
    return WithAdapter


def _without_adapter(kind: type) -> type | None:
    """The class of Flax that one with factors was made of; None if it is no such."""
    return getattr(kind, "without_adapter", None)
