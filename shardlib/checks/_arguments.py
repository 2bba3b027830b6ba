"""Checks of arguments, the same in every room.

Each check gives the checked value back, or raises a `ValueError` that names the function, the
argument and the value, and says what the argument takes: "`Loop(steps=0)` takes a whole number, at
least 1." Those of arrays are in `_arrays`: this file imports the standard library alone, as
pipelines' tables do.
"""

import math
import os
import re
from collections.abc import Collection
from numbers import Integral, Real
from pathlib import Path
from typing import Any

LARGEST = 2**63 - 1
"""The largest whole number that arrays, files and compilers count with."""

_LONGEST_SHOWN = 200  # letters of a value in a message
_LONGEST_NAME, _LONGEST_PATH = 255, 4096  # bytes, of Linux and its file systems


def shown(value: object) -> str:
    """A value as it is written in Python, on one line, cut where it is long. It never fails.

    >>> shown([1, 2]), len(shown("x" * 10_000))
    ('[1, 2]', 221)
    """
    try:
        written = " ".join(repr(value).split())
    except Exception:  # a whole number of 5,000 digits, say, or a `__repr__` that raises
        written = f"<{type(value).__name__}>"
    if len(written) <= _LONGEST_SHOWN:
        return written
    half = _LONGEST_SHOWN // 2
    return f"{written[:half]}... ({len(written):,} letters) {written[-half:]}"


def refusal(function: str, argument: str, value: object, takes: str) -> ValueError:
    """The error for an argument that a function does not take, to be raised."""
    return ValueError(f"`{function}({argument}={shown(value)})` takes {takes}.")


def whole(
    function: str,
    argument: str,
    value: Any,
    takes: str = "a whole number",
    *,
    least: int | None = None,
    most: int = LARGEST,
    optional: bool = False,
) -> Any:
    """A whole number within bounds, as an `int`; NumPy's are taken too. With `optional` None is
    taken as well.

    >>> whole("Loop", "steps", 3, least=1)
    3
    >>> whole("Loop", "steps", 0, least=1)
    Traceback (most recent call last):
    ValueError: `Loop(steps=0)` takes a whole number, at least 1.
    """
    if optional and value is None:
        return None
    beyond = False
    if isinstance(value, Integral) and not isinstance(value, bool):
        size = int(value)
        beyond = size > most
        if (least is None or size >= least) and -LARGEST <= size <= most:
            return size
    bounds = _bounds(least=least, most=most if beyond or most < LARGEST else None)
    raise refusal(function, argument, value, takes + bounds + _or_none(optional))


def number(
    function: str,
    argument: str,
    value: Any,
    takes: str = "a number",
    *,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    below: float | None = None,
    infinite: bool = False,
    optional: bool = False,
) -> Any:
    """A real number within bounds, as Python's own; not nan, and finite unless `infinite`.

    >>> number("Adam", "b1", 0.9, least=0, below=1)
    0.9
    >>> number("Adam", "b1", 1.5, least=0, below=1)
    Traceback (most recent call last):
    ValueError: `Adam(b1=1.5)` takes a number, at least 0 and below 1.
    """
    if optional and value is None:
        return None
    if isinstance(value, Real) and not isinstance(value, bool):
        size = _float(value)
        within = (
            (infinite or math.isfinite(size))
            and (least is None or size >= least)
            and (above is None or size > above)
            and (most is None or size <= most)
            and (below is None or size < below)
        )
        if within and not math.isnan(size):
            return value if isinstance(value, int | float) else size
    finite = not (infinite or most is not None or below is not None)
    raise refusal(
        function,
        argument,
        value,
        takes + _bounds(least, above, most, below, finite) + _or_none(optional),
    )


def boolean(function: str, argument: str, value: Any) -> bool:
    """True or False; neither 1 nor "yes".

    >>> boolean("Zero", "strict", True)
    True
    """
    if isinstance(value, bool) or type(value).__name__ in ("bool", "bool_"):  # NumPy's
        return bool(value)
    raise refusal(function, argument, value, "True or False")


def text(
    function: str, argument: str, value: Any, takes: str = "text", *, optional: bool = False
) -> Any:
    """Text, which may be empty.

    >>> text("fit", "unit", "tokens")
    'tokens'
    """
    if isinstance(value, str) or (optional and value is None):
        return value
    raise refusal(function, argument, value, takes + _or_none(optional))


def texts(
    function: str,
    argument: str,
    value: Any,
    takes: str = "a tuple of text",
    *,
    optional: bool = False,
) -> Any:
    """A tuple of texts.

    >>> texts("Zero", "axes", ("data",))
    ('data',)
    """
    if optional and value is None:
        return None
    if isinstance(value, tuple) and all(isinstance(one, str) for one in value):
        return value
    raise refusal(function, argument, value, takes + _or_none(optional))


def choice(function: str, argument: str, value: Any, choices: Collection[Any]) -> Any:
    """One of a few values.

    >>> choice("Strategy", "nonfinite", "skip", ("count", "skip"))
    'skip'
    """
    for one in choices:
        if type(value) is type(one) and value == one:
            return value
    raise refusal(function, argument, value, "one of " + ", ".join(map(repr, choices)))


def pattern(function: str, argument: str, value: Any, *, optional: bool = False) -> Any:
    r"""A regular expression, as text.

    >>> pattern("Zero", "layers", r"layers/\d+")
    'layers/\\d+'
    """
    if optional and value is None:
        return None
    if not isinstance(value, str):
        raise refusal(
            function, argument, value, "a regular expression, as text" + _or_none(optional)
        )
    try:
        re.compile(value)
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(
            f"`{function}({argument}={shown(value)})`: `{shown(value)}` is no regular expression: "
            f"{error}."
        ) from error
    return value


def patterns(function: str, argument: str, value: Any) -> tuple[str, ...]:
    """A tuple of regular expressions, each to match the whole of a path.

    >>> patterns("Precision", "keep", (".*norm.*",))
    ('.*norm.*',)
    """
    texts(function, argument, value, f'a tuple of patterns, as text: `{argument}=(".*norm.*",)`')
    for one in value:
        pattern(function, argument, one)
    return value


def path(
    function: str, argument: str, value: Any, takes: str = "a path, as text or a `pathlib.Path`"
) -> Path:
    """A path that a file system could have: not empty, and no longer than these are.

    >>> path("JsonLines", "path", "runs/metrics.jsonl").name
    'metrics.jsonl'
    """
    try:
        written = os.fspath(value)
    except TypeError:
        written = None
    if not isinstance(written, str):
        raise refusal(function, argument, value, takes)
    try:
        encoded = os.fsencode(written)
    except UnicodeEncodeError as error:
        raise refusal(
            function, argument, value, f"{takes}, of letters that a file's name may have"
        ) from error
    if not written or "\0" in written:
        raise refusal(
            function, argument, value, f"{takes}, which is not empty and has no zero bytes"
        )
    longest = max(map(len, encoded.split(b"/")))
    if longest > _LONGEST_NAME or len(encoded) > _LONGEST_PATH:
        raise refusal(
            function,
            argument,
            value,
            f"{takes}, of at most {_LONGEST_PATH:,} bytes, and {_LONGEST_NAME} between slashes; "
            f"this has {len(encoded):,}, and {longest:,}",
        )
    return Path(written)


def kind(
    function: str, argument: str, value: Any, kinds: Any, takes: str, *, optional: bool = False
) -> Any:
    """A value of some class, or of a union of classes.

    >>> kind("fit", "loop", 3, int, "a number")
    3
    """
    if isinstance(value, kinds) or (optional and value is None):
        return value
    raise refusal(function, argument, value, takes + _or_none(optional))


def function(
    of: str, argument: str, value: Any, takes: str = "a function", *, optional: bool = False
) -> Any:
    """What can be called and is no class.

    >>> function("train_step", "loss_fn", len) is len
    True
    """
    if (callable(value) and not isinstance(value, type)) or (optional and value is None):
        return value
    raise refusal(of, argument, value, takes + _or_none(optional))


def called(of: str, argument: str, function: Any, *given: Any) -> Any:
    """What a function of the user gives; or, if it does not take so many arguments, an error that
    says whose it is.

    >>> called("init", "make_model", dict)
    {}
    """
    try:
        return function(*given)
    except TypeError as error:
        # From within the function.
        if error.__traceback__ is None or error.__traceback__.tb_next is not None:
            raise
        many = f"{len(given)} arguments" if given else "no arguments"
        raise ValueError(
            f"`{of}({argument}=...)` is called with {many}, and does not take them: {error}."
        ) from error


def assign(instance: Any, **checked: Any) -> None:
    """Set fields of a frozen dataclass to their checked values, in its `__post_init__`."""
    for name, value in checked.items():
        object.__setattr__(instance, name, value)


def _float(value: Any) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def _bounds(
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    below: float | None = None,
    finite: bool = False,
) -> str:
    said = ["finite"] * finite
    said += [
        f"{word} {bound:,}"
        for word, bound in (
            ("at least", least),
            ("above", above),
            ("at most", most),
            ("below", below),
        )
        if bound is not None
    ]
    return f", {' and '.join(said)}" if said else ""


def _or_none(optional: bool) -> str:
    return ", or None" if optional else ""
