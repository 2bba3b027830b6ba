"""What marked blocks keep for the backward pass, as a value.

    Remat()                          the inputs of a block; all else is computed again   "full"
    Remat.save("context", "mlp_up")  these activations too, by their names
    Remat(products="all")            the results of all matrix products too              "dots"
    Remat(products="without_batch")  but for products with batch dims, such as scores    "dots_..."
    a | b                            what either keeps

It is part of the scope that a function is traced under, so that it can be compared and hashed.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

import jax

from shardlib.checks import _arguments as check

Products: TypeAlias = Literal["none", "without_batch", "all"]
# Words for values. "none" keeps everything, and "stage" is a pipeline's own affair.
WORDS = ("none", "full", "stage", "dots", "dots_without_batch")


@dataclass(frozen=True)
class Remat:
    """What blocks marked with `sl.remat` keep for their backward pass besides their inputs.

    Everything else in them is computed again. Values are united with `|`.

    - `names`: activations, by the names that the model gave them with `sl.checkpoint_name`.
    - `products`: results of matrix products: "all", those "without_batch" dims, or "none". Products
      that have batch dims are attention's scores and their like, which grow with the square of a
      sequence.

    >>> Remat.save("context") | Remat(products="without_batch")
    Remat(names=('context',), products='without_batch')
    """

    names: tuple[str, ...] = ()
    products: Products = "none"

    def __post_init__(self) -> None:
        names = check.texts("Remat", "names", self.names, "names of activations, in a tuple")
        check.choice("Remat", "products", self.products, get_args(Products))
        # In order, so that equal values are equal whatever the order they were written in.
        check.assign(self, names=tuple(sorted(set(names))))

    @classmethod
    def save(cls, *names: str) -> "Remat":
        """Keep the activations of these names."""
        return cls(names=names)

    def __or__(self, other: "Remat") -> "Remat":
        """What keeps all that either keeps."""
        if not isinstance(other, Remat):
            return NotImplemented
        order = get_args(Products)
        place = max(order.index(self.products), order.index(other.products))
        return Remat((*self.names, *other.names), order[place])

    @property
    def policy(self) -> Callable[..., Any] | None:
        """The same as a policy of `jax.checkpoint`; None where nothing but inputs is kept."""
        return _policy(self)


@functools.cache
def _policy(remat: Remat) -> Callable[..., Any] | None:
    """The policy of a value: always the same function, so that JAX finds what it traced before."""
    policies = jax.checkpoint_policies
    kept = []
    if remat.names:
        kept.append(policies.save_only_these_names(*remat.names))
    if remat.products == "all":
        kept.append(policies.dots_saveable)
    if remat.products == "without_batch":
        kept.append(policies.dots_with_no_batch_dims_saveable)
    return functools.reduce(policies.save_from_both_policies, kept) if kept else None


def checked_remat(function: str, argument: str, value: Any) -> "str | Remat":
    """A word or a value for what blocks keep, or an error that lists the words."""
    if isinstance(value, Remat) or (isinstance(value, str) and value in WORDS):
        return value
    words = ", ".join(map(repr, WORDS))
    takes = f'one of {words}, or a `Remat`, such as `sl.Remat.save("context")`'
    raise check.refusal(function, argument, value, takes)


def kept_by_blocks(value: "str | Remat") -> Remat | None:
    """What marked blocks keep; None where they keep everything.

    >>> kept_by_blocks("full"), kept_by_blocks("none")
    (Remat(names=(), products='none'), None)
    """
    if isinstance(value, Remat):
        return value
    # With "stage" a stage's whole pass is computed again, and its blocks keep little within it.
    words = {
        "full": Remat(),
        "stage": Remat(),
        "dots": Remat(products="all"),
        "dots_without_batch": Remat(products="without_batch"),
    }
    return words.get(value)
