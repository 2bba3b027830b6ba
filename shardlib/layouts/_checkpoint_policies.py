"""What a block keeps for its backward pass, as a policy of `jax.checkpoint`.

JAX asks a policy of each operation in a block whether its results are kept. It compares policies by
identity to find what it traced before, so that a value has always the same one.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from jax.ad_checkpoint import Offloadable

from shardlib.layouts._host import HOST
from shardlib.layouts._remat_parts import Encoding
from shardlib.layouts._remat_policy import Remat, RematByBlock

# What is named so belongs to the activation whose name comes before, and is never compressed.
BESIDE = ":beside"
# The name of what attention makes of the values, and JAX's of attention by cuDNN. What backward
# needs of that has no name, within a derivative of JAX's own; the operation itself is asked for.
CONTEXT = "context"
CUDNN_ATTENTION = "dot_product_attention_fwd_wrapper"
# The operation that an activation of a name goes through, whose policy says how it is encoded.
COMPRESSIBLE = "compressible"
# The name of a condition that says whether something is computed or known without: what comes out
# is the same, so that no example depends on those that the condition was made of.
SAME_RESULT = "same_result"
# The name of what belongs to the examples along its first dim, and depends on no others, however it
# was made: where tokens are sorted by expert, that cannot be seen.
BY_EXAMPLE = "by_example"


@dataclass(frozen=True)
class LayersPolicy:
    """In place of a policy of `jax.checkpoint`, until it is known which layer a block is.

    A step exchanges it for that of the layer. Where JAX asks it, nothing has.
    """

    remat: RematByBlock

    def __call__(self, *_: Any, **__: Any) -> bool:
        raise ValueError(
            f"`{self.remat}` is for blocks that a `sl.train_step` calls, in loops or not. It has "
            "no meaning for a derivative outside of one, in a loop within a loop over layers, in a "
            "branch, or in a function with a derivative of its own."
        )


@functools.cache
def _policy(remat: Remat) -> Callable[..., Any] | None:
    """The policy of a value: always the same function, so that JAX finds what it traced before."""
    policies = jax.checkpoint_policies
    kept: list[Callable[..., Any]] = []
    if remat.every_name:
        # An activation that comes with others, as a context does with its log-sum-exp, needs them
        # as they are.
        beside = [name + BESIDE for name in remat.every_name]
        kept.append(policies.save_only_these_names(*remat.names, *beside))
    if CONTEXT in remat.names:
        kept.append(_saves_cudnn_attention)
    if remat.compressed:
        kept.append(_compressing(frozenset(remat.compressed)))
    if remat.products == "all":
        kept.append(policies.dots_saveable)
    if remat.products == "without_batch":
        kept.append(policies.dots_with_no_batch_dims_saveable)
    policy = functools.reduce(policies.save_from_both_policies, kept) if kept else None
    # Names that go to the host are asked for first: the others would keep them on the device.
    if remat.offloaded:
        return _Offloading(frozenset(remat.offloaded), policy)
    return policy


def _saves_cudnn_attention(primitive: Any, *_: Any, **__: Any) -> bool:
    """A policy that keeps all that attention by cuDNN makes."""
    return primitive.name == CUDNN_ATTENTION


@dataclass(frozen=True)
class _Offloading:
    """A policy of `jax.checkpoint` that keeps some names in the memory of the host.

    JAX's own policies of that kind cannot be united with others.
    """

    names: frozenset[str]
    others: Callable[..., Any] | None

    def __call__(self, primitive: Any, *arrays: Any, **params: Any) -> Any:
        """What becomes of the results of an operation."""
        if primitive.name == "name" and params["name"] in self.names:
            return Offloadable(src="device", dst=HOST)
        if self.others is None:
            return False
        return self.others(primitive, *arrays, **params)


def _compressing(pairs: frozenset[tuple[str, Encoding]]) -> Callable[..., Any]:
    """A policy that says how activations of some names are encoded; each encoding is asked for."""

    def policy(primitive: Any, *_: Any, **params: Any) -> bool:
        if primitive.name != COMPRESSIBLE:
            return False
        return (params["name"], params.get("encoding")) in pairs

    return policy


@dataclass(frozen=True)
class PolicyOfPart:
    """A policy of `jax.checkpoint` for a part of a block, by which a trace tells which part it is.

    Equal ones are of one part and keep the same.
    """

    part: str
    kept: Remat

    def __call__(self, primitive: Any, *arrays: Any, **params: Any) -> Any:
        """Whether the results of an operation in the part are kept."""
        policy = policy_of(self.kept)
        # Nothing but inputs is kept, which JAX never asks about.
        if policy is None:
            return False
        return policy(primitive, *arrays, **params)


def offloads(policy: Any) -> bool:
    """Whether a block with this policy keeps anything in the memory of the host.

    >>> offloads(policy_of(Remat.offload("block_in"))), offloads(policy_of(Remat()))
    (True, False)
    """
    return isinstance(policy, _Offloading)


def policy_of(kept: Remat | RematByBlock | None) -> Callable[..., Any] | None:
    """The policy of what a block keeps, in which None is everything.

    None as a policy is for blocks of which nothing but inputs is kept. Where a value drops parts,
    it is the policy of these parts.
    """
    if kept is None:
        return jax.checkpoint_policies.everything_saveable
    if isinstance(kept, RematByBlock):
        return LayersPolicy(kept)
    return _policy(kept)
