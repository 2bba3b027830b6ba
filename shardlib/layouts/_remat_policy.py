"""What marked blocks keep for the backward pass, as a value.

    Remat()                          the inputs of a block; all else is computed again   "full"
    Remat.save("context", "mlp_up")  these activations too, by their names
    Remat(products="all")            the results of all matrix products too              "dots"
    Remat(products="without_batch")  but for products with batch dims, such as scores    "dots_..."
    a | b                            what either keeps
    Remat.sublinear()                the inputs of few blocks of a loop, and of others in turn
    Remat.every(4)                   the same, with those of every fourth one
    Remat.slots(3)                   as many inputs as that, with as little computed as can be

It is part of the scope that a function is traced under, so that it can be compared and hashed.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

import jax

from shardlib.checks import _arguments as check
from shardlib.layouts._chain_schedules import Binomial, Chain, Every

Products: TypeAlias = Literal["none", "without_batch", "all"]
# Words for values. "none" keeps everything, and "stage" is a pipeline's own affair.
WORDS = ("none", "full", "stage", "dots", "dots_without_batch", "sublinear")


@dataclass(frozen=True)
class Remat:
    """What blocks marked with `sl.remat` keep for their backward pass besides their inputs.

    Everything else in them is computed again. Values are united with `|`.

    - `names`: activations, by the names that the model gave them with `sl.checkpoint_name`.
    - `products`: results of matrix products: "all", those "without_batch" dims, or "none". Products
      that have batch dims are attention's scores and their like, which grow with the square of a
      sequence.
    - `chain`: of blocks in a loop, which of their inputs are kept, and in which order the others
      are made again. `Remat.every`, `Remat.sublinear` and `Remat.slots` make it; None keeps the
      inputs of all blocks. Nothing else of a block is kept with one.

    >>> Remat.save("context") | Remat(products="without_batch")
    Remat(names=('context',), products='without_batch', chain=None)
    """

    names: tuple[str, ...] = ()
    products: Products = "none"
    chain: Chain | None = None

    def __post_init__(self) -> None:
        names = check.texts("Remat", "names", self.names, "names of activations, in a tuple")
        check.choice("Remat", "products", self.products, get_args(Products))
        takes = "a chain: `sl.Remat.every(4)`, `sl.Remat.sublinear()` or `sl.Remat.slots(4)`"
        check.kind("Remat", "chain", self.chain, Chain | None, takes)
        if self.chain is not None and (names or self.products != "none"):
            raise self._apart()
        # In order, so that equal values are equal whatever the order they were written in.
        check.assign(self, names=tuple(sorted(set(names))))

    @classmethod
    def save(cls, *names: str) -> "Remat":
        """Keep the activations of these names."""
        return cls(names=names)

    @classmethod
    def every(cls, layers: int) -> "Remat":
        """Keep the input of every so many-th block of a loop.

        While the blocks between two of these are differentiated, their own inputs are kept too. So
        most blocks are computed twice again: once to get there, once to be differentiated.

        >>> Remat.every(4).chain.table(16).kept
        (0, 4, 8, 12)
        """
        takes = "a number of blocks, such as 4; `sl.Remat.sublinear()` finds one"
        layers = check.whole("Remat.every", "layers", layers, takes, least=1)
        return cls(chain=Every(layers))

    @classmethod
    def sublinear(cls) -> "Remat":
        """Keep the input of every so many-th block, the square root of how many a loop has.

        Of `n` blocks the inputs of about twice the square root of `n` are there at a time.
        """
        return cls(chain=Every(None))

    @classmethod
    def slots(cls, count: int) -> "Remat":
        """Keep the inputs of so many blocks of a loop at a time, and compute the least again.

        One more input is that of the block at hand. The schedule is Griewank's `revolve`.

        >>> Remat.slots(3).chain.table(16).evaluations
        18
        """
        takes = "a number of inputs that are kept at a time, such as 4"
        return cls(chain=Binomial(check.whole("Remat.slots", "count", count, takes, least=1)))

    def _apart(self) -> ValueError:
        """The error for what is kept beside a chain."""
        return ValueError(
            "`Remat`: of a chain, as by `sl.Remat.slots(4)`, only inputs of blocks are kept, and "
            "no other chain's: `names` and `products` are kept of every block. Take one of the two."
        )

    def __or__(self, other: "Remat") -> "Remat":
        """What keeps all that either keeps; two chains are no chain, and refused."""
        if not isinstance(other, Remat):
            return NotImplemented
        if self == other:
            return self
        if self.chain is not None or other.chain is not None:
            raise self._apart()
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
    (Remat(names=(), products='none', chain=None), None)
    """
    if isinstance(value, Remat):
        return value
    # With "stage" a stage's whole pass is computed again, and its blocks keep little within it.
    words = {
        "full": Remat(),
        "stage": Remat(),
        "dots": Remat(products="all"),
        "dots_without_batch": Remat(products="without_batch"),
        "sublinear": Remat.sublinear(),
    }
    return words.get(value)
