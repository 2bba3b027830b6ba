"""What every part of `benchmarks.strangers` counts, in one record."""

from dataclasses import dataclass, fields


@dataclass(frozen=True)
class Outcome:
    """How the cases of one part ended.

    - `drawn`: cases that were drawn from the seed.
    - `ran`: those that ran to their end, and whose results equal the reference where there is one.
    - `refused`: those that ended in a message for users: a `ValueError`, another documented exception, or a warning.
    - `raw_errors`: those that ended in any other exception.
    - `silent`: those whose value, gradient or file differs from the reference, without exception or warning.
    - `aborts`: those that killed their process.
    - `hangs`: those that had not ended after the time that each is given.
    - `failures`: a line for each of the last four kinds: the kind, the case, and what was seen.

    >>> Outcome(drawn=2, ran=1, refused=1) + Outcome(drawn=1, silent=1, failures=("silent: zero=3, 0.5 against 0.4",))
    Outcome(drawn=3, ran=1, refused=1, raw_errors=0, silent=1, aborts=0, hangs=0, failures=('silent: zero=3, 0.5 against 0.4',))
    """

    drawn: int = 0
    ran: int = 0
    refused: int = 0
    raw_errors: int = 0
    silent: int = 0
    aborts: int = 0
    hangs: int = 0
    failures: tuple[str, ...] = ()

    def __add__(self, other: "Outcome") -> "Outcome":
        return Outcome(**{one.name: getattr(self, one.name) + getattr(other, one.name) for one in fields(self)})

    @property
    def good(self) -> bool:
        """Whether nothing went wrong."""
        return not (self.raw_errors or self.silent or self.aborts or self.hangs)
