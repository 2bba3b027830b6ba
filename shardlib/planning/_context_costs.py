"""What the forms of attention over a split sequence cost, by formula.

Of a sequence of `S` tokens on `N` devices, with `h` numbers a token in queries and `k` in keys, a
device sends in one layer:

    form            forward                                backward
    gather, ring    2kS(N-1)/N                             the same, and the gradients
    ulysses         (2h+2k)(S/N)(N-1)/N                    the same
    usp, R x U      (2h+2k)(S/N)(U-1)/U + (2kS/U)(R-1)/R   the same, and the ring's gradients

`gather` sends the gradients of keys and values in their own dtype, and a ring in float32.
"""

import math
from dataclasses import dataclass

from shardlib._notebook import Shown
from shardlib._text import human_bytes, table
from shardlib.checks import _arguments as check

_WIDE = 4  # bytes of a number of float32


@dataclass(frozen=True)
class FormCosts:
    """What one form costs a device, of one sequence in one layer.

    - `form`: its name; for `usp` with the devices of a ring and of a group, `usp 4x2`.
    - `forward_bytes`, `backward_bytes`: what it sends.
    - `held_bytes`: the keys and values that it has at a time, with those that are on their way.
    - `load`: under a causal mask, what the device that computes most does over the mean.
    """

    form: str
    forward_bytes: int
    backward_bytes: int
    held_bytes: int
    load: float

    @property
    def sent_bytes(self) -> int:
        """What a device sends forward and backward."""
        return self.forward_bytes + self.backward_bytes


@dataclass(frozen=True)
class Costs(Shown):
    """The costs of all forms that the numbers of heads allow, the one that sends least first.

    It prints as a table.
    """

    forms: tuple[FormCosts, ...]

    def __getitem__(self, form: str) -> FormCosts:
        for costs in self.forms:
            if costs.form == form:
                return costs
        names = ", ".join(costs.form for costs in self.forms)
        raise KeyError(f"No form {form!r} here; there are {names}.")

    def __str__(self) -> str:
        rows = [("form", "sent forward", "sent backward", "keys held", "load")]
        for costs in self.forms:
            sent = human_bytes(costs.forward_bytes), human_bytes(costs.backward_bytes)
            rows.append((costs.form, *sent, human_bytes(costs.held_bytes), f"{costs.load:.2f}"))
        return table(rows, right=range(1, len(rows[0])))


def costs(
    *,
    tokens: int,
    devices: int,
    heads: int,
    key_heads: int,
    head_size: int,
    itemsize: int = 2,
) -> Costs:
    """What each form of attention costs, where a sequence is split over so many devices.

    Args:
        tokens: of the sequence.
        devices: over which it is split.
        heads: of queries.
        key_heads: of keys and values.
        head_size: how many numbers a head has.
        itemsize: the bytes of a number of queries, keys and values.

    >>> print(costs(tokens=2**20, devices=8, heads=32, key_heads=8, head_size=128))
    form     sent forward  sent backward  keys held  load
    ulysses       2.2 GiB        2.2 GiB  512.0 MiB  1.00
    usp 2x4       2.4 GiB        3.4 GiB    1.0 GiB  1.00
    usp 4x2       2.8 GiB        5.8 GiB    1.0 GiB  1.00
    gather        3.5 GiB        7.0 GiB    4.0 GiB  1.88
    ring          3.5 GiB       10.5 GiB    1.0 GiB  1.88
    zigzag        3.5 GiB       10.5 GiB    1.0 GiB  1.00
    """
    sizes = {
        "tokens": tokens,
        "devices": devices,
        "heads": heads,
        "key_heads": key_heads,
        "head_size": head_size,
        "itemsize": itemsize,
    }
    for name, size in sizes.items():
        check.whole("costs", name, size, least=1)
    if heads % key_heads:
        raise ValueError(
            f"`costs(heads={heads}, key_heads={key_heads})`: each key head serves as many heads."
        )
    if tokens % devices:
        more = math.ceil(tokens / devices) * devices
        raise ValueError(
            f"`costs(tokens={tokens}, devices={devices})`: {devices} does not divide {tokens}; "
            f"take {more} tokens."
        )
    layer = _Layer(tokens, devices, heads, key_heads, head_size, itemsize)
    forms = [layer.costs("gather", 1), layer.costs("ring", 1)]
    if tokens % (2 * devices) == 0:
        forms.append(layer.costs("zigzag", 1))
    for ulysses in range(2, devices + 1):
        if devices % ulysses == 0 and layer.splits_heads(ulysses):
            forms.append(layer.costs("ulysses" if ulysses == devices else "usp", ulysses))
    forms.sort(key=lambda form: form.sent_bytes)
    return Costs(tuple(forms))


@dataclass(frozen=True)
class _Layer:
    """The attention of one layer to one sequence."""

    tokens: int
    devices: int
    heads: int
    key_heads: int
    head_size: int
    itemsize: int

    def splits_heads(self, ulysses: int) -> bool:
        """Whether so many devices can have the same number of heads each, with their keys."""
        repeated = math.lcm(self.key_heads, ulysses)
        return self.heads % ulysses == 0 and self.heads % repeated == 0

    def costs(self, form: str, ulysses: int) -> FormCosts:
        """The costs of a form in which so many devices exchange heads."""
        ring = self.devices // ulysses
        # Key heads that are too few to be split are repeated.
        key_heads = math.lcm(self.key_heads, ulysses)
        own = self.tokens / self.devices
        both = 2 * self.heads + 2 * key_heads
        exchanged = both * self.head_size * own * (ulysses - 1) / ulysses
        # Keys and values of the whole sequence, of the heads that a device attends with.
        whole = 2 * key_heads / ulysses * self.head_size * self.tokens
        passed = whole * (ring - 1) / ring
        wide = self.itemsize if form == "gather" else _WIDE
        forward = self.itemsize * (exchanged + passed)
        held = whole
        if form != "gather" and ring > 1:
            held = whole / ring * min(ring, 2)
        name = f"usp {ring}x{ulysses}" if form == "usp" else form
        # The last device sees all keys, and the first hardly any, where there are not two parts of
        # the sequence for each device.
        in_order = form in ("gather", "ring") or self.tokens % (2 * self.devices) > 0
        load = 2 - 1 / ring if in_order else 1.0
        return FormCosts(
            name,
            round(forward),
            round(forward + wide * passed),
            round(self.itemsize * held),
            load,
        )
