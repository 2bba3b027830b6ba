"""What of a step stays in the memory of the host, and which arrays of its state that are.

Arrays in the host's memory are arguments and results of the step like all others, with another
memory kind in their shardings. JAX keeps it in their types, so that nothing computes with an array
of the host by accident: it has to be copied first, see `_streamed_update` and `_weights`.
Activations are copied by JAX where the policy of a block says so, see `_remat_policy`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias, get_args

import jax
import jax.numpy as jnp
from jax import lax

from shardlib.checks import _arguments as check
from shardlib.collectives._zero_split import Split
from shardlib.layouts._host import to_device
from shardlib.layouts._relate import Relation
from shardlib.layouts._remat_policy import Remat, RematBudget, RematByBlock, kept_by_blocks

# Arrays of so many bytes are copied at a time: enough for a copy to run at full speed.
BYTES_AT_A_TIME = 2**27

WORDS = ("optimizer", "parameters", "all")
Updater: TypeAlias = Literal["device", "host"]


@dataclass(frozen=True)
class Offload:
    """What of a step stays in the memory of the host while it is not used.

    - `optimizer`: the optimizer's state, except arrays that do not follow a parameter. A step
      copies some rows at a time to the device, updates them, and copies them back.
    - `parameters`: the stored parameters. A layer is copied to the device when it is used, and
      gathered there as in ZeRO's stage 3. The update copies some rows at a time.
    - `update`: what updates the parameters that have arrays on the host, `"device"` or `"host"`.
      With `"host"` the gradient goes to the host, the new parameter comes back, and the optimizer's
      state stays where it is. This needs an optimizer whose update of a shard reads no other shard,
      such as AdamW.
    - `activations`: the names of activations in marked blocks, as for `Remat.offload`. They are on
      the host between a block's forward and backward pass, in addition to what
      `Strategy(remat=...)` keeps.

    What is small, by the same bound as for ZeRO (`Zero(small=...)`), stays on the device, and so do
    gradients.

    >>> Offload(parameters=True)
    Offload(optimizer=True, parameters=True, update='device', activations=())
    """

    optimizer: bool = True
    parameters: bool = False
    update: Updater = "device"
    activations: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        optimizer = check.boolean("Offload", "optimizer", self.optimizer)
        parameters = check.boolean("Offload", "parameters", self.parameters)
        check.choice("Offload", "update", self.update, get_args(Updater))
        takes = 'names of activations, in a tuple: `("block_in",)`'
        activations = check.texts("Offload", "activations", self.activations, takes)
        if not optimizer and not parameters and not activations:
            raise ValueError(
                "`Offload(optimizer=False, parameters=False)` leaves everything on the device: "
                "leave `Strategy(offload=...)` out, or choose one."
            )
        if self.update == "host" and not optimizer:
            raise ValueError(
                '`Offload(optimizer=False, update="host")`: the host would have to fetch the '
                "optimizer's state from the device. Keep it on the host, `optimizer=True`."
            )
        activations = tuple(sorted(set(activations)))
        check.assign(self, optimizer=optimizer, parameters=parameters, activations=activations)

    @property
    def of_state(self) -> bool:
        """Whether anything of the state is in the memory of the host.

        >>> Offload().of_state, Offload(optimizer=False, activations=("block_in",)).of_state
        (True, False)
        """
        return self.optimizer or self.parameters


def resolve_offload(value: Any) -> Offload | None:
    """The `Offload` that `Strategy(offload=...)` stands for; None where nothing is offloaded.

    >>> resolve_offload("parameters")
    Offload(optimizer=False, parameters=True, update='device', activations=())
    """
    if value is None or isinstance(value, Offload):
        return value
    match value:
        case "optimizer":
            return Offload()
        case "parameters":
            return Offload(optimizer=False, parameters=True)
        case "all":
            return Offload(parameters=True)
    words = ", ".join(map(repr, WORDS))
    takes = f"{words}, or a `sl.Offload`, such as `sl.Offload(parameters=True)`"
    raise check.refusal("Strategy", "offload", value, takes)


def _keeps_otherwise(remat: Any) -> str | None:
    """What blocks keep by a value to which no names can be added, and what to do about it."""
    if remat == "none":
        return 'all activations on the device: recompute blocks, `remat="full"`'
    if remat == "stage":
        return 'none of blocks between the passes of a stage: recompute these, `remat="full"`'
    if isinstance(remat, RematByBlock):
        return "what each run says: say it there, `rest=sl.Remat.offload(...)`"
    if isinstance(remat, RematBudget):
        return "what fits: say there what may go, `sl.Remat.budget(..., offload=(...))`"
    return None


def with_offloaded(remat: Any, offload: Offload | None) -> Any:
    """What blocks keep, `Strategy(remat=...)`, with the activations of `Offload` on the host.

    What is kept on the device by such a name, as by "minimal", is kept on the host instead.
    """
    kept = kept_by_blocks(remat)
    if offload is None or not offload.activations:
        return kept
    keeps = _keeps_otherwise(remat)
    if keeps is not None:
        raise ValueError(
            f"`Strategy(remat={check.shown(remat)}, offload={offload})`: this value of `remat` "
            f"keeps {keeps}, or leave `activations` out."
        )
    assert isinstance(kept, Remat)
    # What goes to the host is no longer kept on the device: no activation can be in both places.
    names = tuple(name for name in kept.names if name not in offload.activations)
    return replace(kept, names=names) | Remat.offload(*offload.activations)


def parameters_on_host(
    offload: Offload | None, splits: Mapping[str, Split], small: int
) -> frozenset[str]:
    """The paths of the parameters that are stored in the host's memory.

    `splits` is how each parameter is stored, and `small` the elements up to which one stays.
    """
    if offload is None or not offload.parameters:
        return frozenset()
    return frozenset(path for path, split in splits.items() if split.layer > small)


def state_on_host(
    offload: Offload | None,
    splits: Mapping[str, Split],
    small: int,
    relations: Mapping[str, Relation],
) -> frozenset[str]:
    """The paths of the optimizer's arrays that are stored in the host's memory.

    Those are the arrays that have every dim of a parameter that is not small.
    """
    if offload is None or not offload.optimizer:
        return frozenset()
    paths = set()
    for path, relation in relations.items():
        # Arrays of rows or columns only, as of Adafactor, are small beside these.
        if relation.kind == "same" and splits[str(relation.parameter)].layer > small:
            paths.add(path)
    return frozenset(paths)


def copied_in_parts(array: Any, dtype: Any, dim: int) -> jax.Array:
    """The same array in the device's memory and in another dtype, copied in parts of a dim.

    So the device has only a part of it in the dtype in which the host has it. And XLA takes two
    copies of a whole array, if a loop writes to that later, for the array itself, and fails.
    """
    total = array.shape[dim]
    # Parts are equal, since a loop's body has arrays of one size.
    count = fewest_parts(total, array.size * array.dtype.itemsize)
    size = total // count

    def part(number: Any, copied: jax.Array) -> jax.Array:
        start = number * size
        rows = to_device(lax.dynamic_slice_in_dim(array, start, size, dim))
        return lax.dynamic_update_slice_in_dim(copied, rows.astype(dtype), start, dim)

    return lax.fori_loop(0, count, part, jnp.zeros(array.shape, dtype))


def fewest_parts(total: int, size: int) -> int:
    """Into how many equal parts to divide rows of `size` bytes in all: several, if there are.

    >>> fewest_parts(40, 1000), fewest_parts(40, 2**30), fewest_parts(1, 2**30)
    (2, 8, 1)
    """
    # Two at least, for a copy of a whole array at once is what parts are there to avoid.
    wanted = max(2, -(-size // BYTES_AT_A_TIME))
    return next((parts for parts in range(wanted, total) if total % parts == 0), total)
