"""What the parts of `benchmarks.strangers` share: how cases are counted, and how they run in
processes of their own.

Each part draws its cases by number from a seed, so that any case can be drawn again alone. Cases
that may abort their process or hang run in children, some after another in each: a child writes the
case into a file before it begins, and how it ended afterwards. When a child dies or falls silent,
the case it had begun is the one to blame, and another child goes on with the next.
"""

import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
KINDS = ("ran", "refused", "compiler", "raw_errors", "silent", "aborts", "hangs")
FAILURES = ("raw_errors", "silent", "aborts", "hangs")
# A user's mistake, a file or disk, gradients that are not finite, a run that another has taken
# over.
DOCUMENTED = (ValueError, OSError, FloatingPointError, RuntimeError)
_POLL_SECONDS, _SECONDS_TO_START = 0.05, 300.0
_SECONDS_BETWEEN_LINES = 15.0
_WIDTH = 600


@dataclass(frozen=True)
class Outcome:
    """How the cases of one part ended.

    - `drawn`: cases that were drawn from the seed.
    - `ran`: those that ran to their end, and whose results equal the reference where there is one.
    - `refused`: those that ended in a message for users: a `ValueError`, another documented
      exception, or a warning.
    - `compiler`: those whose results differ from the reference, and to which plain `jax.jit` gives
      the same other results where arrays are laid out likewise, without the library: the compiler
      is wrong.
    - `raw_errors`: those that ended in any other exception.
    - `silent`: those whose value, gradient or file differs from the reference, without exception or
      warning.
    - `aborts`: those that killed their process.
    - `hangs`: those that had not ended after the time that each is given.
    - `failures`: a line for each of the last five kinds: the kind, the case, and what was seen.

    >>> both = Outcome(drawn=2, ran=1, refused=1) + Outcome(drawn=1, silent=1,
    ...     failures=("silent: zero=3, 0.5 against 0.4",))
    >>> both.drawn, both.silent, both.good, both.failures
    (3, 1, False, ('silent: zero=3, 0.5 against 0.4',))
    """

    drawn: int = 0
    ran: int = 0
    refused: int = 0
    compiler: int = 0
    raw_errors: int = 0
    silent: int = 0
    aborts: int = 0
    hangs: int = 0
    failures: tuple[str, ...] = ()

    def __add__(self, other: "Outcome") -> "Outcome":
        return Outcome(
            **{one.name: getattr(self, one.name) + getattr(other, one.name) for one in fields(self)}
        )

    @property
    def good(self) -> bool:
        """Whether nothing went wrong."""
        return not any(getattr(self, kind) for kind in FAILURES)

    @classmethod
    def of(cls, kind: str, case: str, seen: str = "") -> "Outcome":
        """The outcome of one case.

        >>> Outcome.of("aborts", "zero=3", "Check failed").failures
        ('aborts: zero=3: Check failed',)
        """
        failures = (f"{kind}: {case}: {seen}"[:_WIDTH],) if kind in (*FAILURES, "compiler") else ()
        return cls(drawn=1, failures=failures, **{kind: 1})


class CompilerError(Exception):
    """Raised by an attempt whose results are not the reference's, and are those of plain
    `jax.jit`.
    """


class Tally:
    """The outcomes of one part as they come: added up, and told of on the standard error."""

    def __init__(self, part: str, count: int) -> None:
        self.part, self.count, self.total = part, count, Outcome()
        self._start = self._said = time.monotonic()

    def add(self, outcome: Outcome) -> None:
        """Count one more; every failure is told of at once, and the counts now and then."""
        self.total = self.total + outcome
        for failure in outcome.failures:
            self._say(failure)
        if time.monotonic() - self._said > _SECONDS_BETWEEN_LINES:
            self._said = time.monotonic()
            self._say(f"{self.total.drawn} drawn, {self.total.ran} ran, of {self.count}")

    def _say(self, text: str) -> None:
        sys.stderr.write(f"{time.monotonic() - self._start:5.0f} s  {self.part}: {text}\n")
        sys.stderr.flush()


def fast_compiles(devices: int) -> dict[str, str]:
    """An environment with so many simulated devices, for which machine code is made quickly, as in
    the tests.
    """
    flags = ["--xla_backend_optimization_level=0", "--xla_llvm_disable_expensive_passes=true"]
    if importlib.metadata.version("jaxlib").startswith("0.10."):  # unknown later
        flags.append("--xla_cpu_use_fusion_emitters=false")
    flags.append(f"--xla_force_host_platform_device_count={devices}")
    return {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": " ".join(flags),
        "TF_CPP_MIN_LOG_LEVEL": "1",
    }


def in_children(
    module: str, seed: int, first: int, last: int, environment: dict[str, str], patience: float
) -> Iterator[Outcome]:
    """Run cases `first` to `last`, the latter left out, by `python -m MODULE`; an outcome for each
    as it ends.

    A case that has not ended after `patience` seconds is a hang, and its process is killed.
    """
    following = first
    while following < last:
        with tempfile.TemporaryDirectory() as folder:
            for number, outcome in _one_child(
                module, seed, following, last, environment, patience, Path(folder)
            ):
                following = number + 1
                yield outcome


def _one_child(
    module: str,
    seed: int,
    first: int,
    last: int,
    environment: dict[str, str],
    patience: float,
    folder: Path,
) -> Iterator[tuple[int, Outcome]]:
    """What one child came to: the number of each case, and its outcome."""
    log, errors = folder / "log", folder / "errors"
    log.touch()
    command = [sys.executable, "-m", module, str(seed), str(first), str(last), str(log)]
    with errors.open("w") as file, log.open() as lines:
        child = subprocess.Popen(command, env=environment, cwd=ROOT, stdout=file, stderr=file)
        begun: dict[str, Any] | None = None
        since, pending = time.monotonic(), ""
        try:
            while True:
                ended = child.poll() is not None  # asked before reading: what it wrote last is read
                pending += lines.read()
                *whole, pending = pending.split("\n")
                for line in whole:
                    record, since = json.loads(line), time.monotonic()
                    if "kind" in record:
                        begun = None
                        yield (
                            record["number"],
                            Outcome.of(record["kind"], record["case"], record["seen"]),
                        )
                    else:
                        begun = record
                limit = patience if begun else max(patience, _SECONDS_TO_START)
                late = not ended and time.monotonic() - since > limit
                if ended or late:
                    break
                time.sleep(_POLL_SECONDS)
        finally:
            child.kill()
            child.wait()
    if begun is not None:
        said = (
            f"no end after {patience:.0f} s"
            if late
            else f"exit code {child.returncode}, {_last_words(errors)}"
        )
        yield begun["number"], Outcome.of("hangs" if late else "aborts", begun["case"], said)
    elif child.returncode:
        raise SystemExit(
            f"{' '.join(command)} ended between two cases:\n{errors.read_text()[-4000:]}"
        )


def _last_words(errors: Path) -> str:
    """The line in which a process that aborted says why."""
    lines = errors.read_text(errors="replace").splitlines()
    fatal = [
        line for line in lines if line.startswith("F") or "Check fail" in line or "Fatal" in line
    ]
    return (fatal or lines or [""])[0]


def serve(draw: Callable[[int, int], Any], attempt: Callable[[Any], str]) -> None:
    """Be the child: attempt the cases that the command line says, and write how each ended.

    `draw(seed, number)` makes a case, and `attempt(case)` gives what is different from the
    reference, or an empty text.
    """
    seed, first, last = (int(text) for text in sys.argv[1:4])
    with Path(sys.argv[4]).open("a") as log:
        for number in range(first, last):
            case = draw(seed, number)
            described = f"case {number} of seed {seed}: {case}"
            _note(log, {"number": number, "case": described})
            kind, seen = judged(lambda case=case: attempt(case))
            _note(log, {"number": number, "case": described, "kind": kind, "seen": seen})


def judged(attempt: Callable[[], str]) -> tuple[str, str]:
    """How an attempt ended, and what was seen: `attempt` gives what is different from the
    reference, or an empty text.
    """
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            different = attempt()
        except CompilerError as error:
            return "compiler", str(error)
        except Exception as error:
            if is_refusal(error):
                return "refused", str(error)
            where = traceback.extract_tb(error.__traceback__)[-1]
            text = str(error).partition("\n")[0]
            return (
                "raw_errors",
                f"{type(error).__name__}: {text} ({Path(where.filename).name}:{where.lineno})",
            )
    for one in said:
        # Those of libraries about themselves are of other kinds.
        if different and issubclass(one.category, UserWarning):
            return "refused", f"{different}, with the warning: {one.message}"
    return ("silent", different) if different else ("ran", "")


def is_refusal(error: BaseException) -> bool:
    """Whether an exception is a message for users: of a documented kind, and raised by the library
    and not by what it calls.
    """
    where = traceback.extract_tb(error.__traceback__)[-1]
    ours = Path(where.filename).is_relative_to(ROOT / "shardlib") and (where.line or "").startswith(
        "raise "
    )
    return ours and isinstance(error, DOCUMENTED)


def _note(log: Any, record: dict[str, Any]) -> None:
    log.write(json.dumps(record) + "\n")
    log.flush()
