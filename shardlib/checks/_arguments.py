"""Checks of arguments, the same in every room.

Each check gives the checked value back, or raises a `ValueError` that names the function, the
argument and the value, and says what the argument takes:

    steps = check.whole("Loop", "steps", steps, least=1)
    ValueError: `Loop(steps=0)` takes a whole number, at least 1.

So all checks begin with the same parameters. `function` and `argument` are the names for the
message, `value` is what is checked, `takes` are the message's words for what the argument takes,
and `optional` says whether None is taken as well. Checks of arrays are in `_arrays`: this file
imports only the standard library, as pipelines' tables do.
"""

import math
import operator
import os
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from pathlib import Path
from typing import Any, TypedDict, Unpack

from shardlib._text import listed

LARGEST = 2**63 - 1
"""The largest whole number that arrays, files and compilers count with."""

_LONGEST_SHOWN = 200  # letters of a value in a message
_LONGEST_NAME, _LONGEST_PATH = 255, 4096  # bytes, of Linux and its file systems


def shown(value: object) -> str:
    """A value as it is written in Python, on one line, cut in its middle where it is long.

    It never fails: a value that cannot be written is shown by its type.

    >>> shown([1, 2]), len(shown("x" * 10_000))
    ('[1, 2]', 221)
    """
    try:
        written = " ".join(repr(value).split())
    except Exception:  # a whole number of 5,000 digits, say, or a `__repr__` that raises
        written = f"<{type(value).__name__}>"
    if len(written) <= _LONGEST_SHOWN:
        return written
    # Both ends, for what is wrong is as often at the end.
    half = _LONGEST_SHOWN // 2
    return f"{written[:half]}... ({len(written):,} letters) {written[-half:]}"


def refusal(function: str, argument: str, value: object, takes: str) -> ValueError:
    """The error for an argument that a function does not take, to be raised.

    `takes` says what it takes instead, as the end of a sentence.
    """
    return ValueError(f"`{function}({argument}={shown(value)})` takes {takes}.")


class Bounds(TypedDict, total=False):
    """Bounds of a number, as keywords of a check: the keys of `_BOUNDS`. None is no bound."""

    least: float | None
    above: float | None
    most: float | None
    below: float | None


@dataclass(frozen=True)
class _Bound:
    """A kind of bound: its words in a message, and the comparison of a number with it."""

    words: str
    holds: Callable[[float, float], bool]


# In the order of messages.
_BOUNDS = {
    "least": _Bound("at least", operator.ge),
    "above": _Bound("above", operator.gt),
    "most": _Bound("at most", operator.le),
    "below": _Bound("below", operator.lt),
}


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
    """A whole number from `least` to `most`, as an `int`.

    NumPy's whole numbers are taken too, bools are not. Without bounds it is one that arrays, files
    and compilers can count with. The message names an upper bound only if the caller set it or
    the value is above it.

    >>> whole("Loop", "steps", 3, least=1)
    3
    >>> whole("Loop", "steps", 0, least=1)
    Traceback (most recent call last):
    ValueError: `Loop(steps=0)` takes a whole number, at least 1.
    """
    if optional and value is None:
        return None
    bounds: Bounds = {"least": least}
    if most < LARGEST:
        bounds["most"] = most
    if isinstance(value, Integral) and not isinstance(value, bool):
        size = int(value)
        # Below -LARGEST nothing can be counted either, whatever `least` says.
        if (least is None or size >= least) and -LARGEST <= size <= most:
            return size
        if size > most:
            bounds["most"] = most
    raise refusal(
        function, argument, value, takes + _bounds_text(bounds, True) + _or_none(optional)
    )


_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def size(function: str, argument: str, value: Any, takes: str) -> int:
    """A size in bytes, from a whole number of at least one or a text with a unit.

    >>> size("fitting", "memory", "1.5KiB", "a size")
    1536
    """
    if isinstance(value, str):
        match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMG]i?B)", value.strip())
        if match is None:
            raise refusal(function, argument, value, takes)
        # A fraction of a unit, as 1.1 GiB, need not be a whole number of bytes.
        value = round(float(match[1]) * _UNITS[match[2]])
    return whole(function, argument, value, takes, least=1)


def number(
    function: str,
    argument: str,
    value: Any,
    takes: str = "a number",
    *,
    infinite: bool = False,
    optional: bool = False,
    **bounds: Unpack[Bounds],
) -> Any:
    """A real number within bounds, as Python's own; not nan, and finite unless `infinite`.

    `least` and `most` are bounds that the number may be equal to, `above` and `below` are not.

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
        finite_enough = math.isfinite(size) or (infinite and not math.isnan(size))
        if finite_enough and _within(size, bounds):
            return value if isinstance(value, int | float) else size
    words = _bounds_text(bounds, infinite)
    raise refusal(function, argument, value, takes + words + _or_none(optional))


def _within(size: float, bounds: Mapping[str, Any]) -> bool:
    """Whether a number is within all of the bounds.

    >>> _within(0.5, {"least": 0, "below": 0.5}), _within(0.5, {"least": 0, "most": 0.5})
    (False, True)
    """
    for name, bound in bounds.items():
        if bound is not None and not _BOUNDS[name].holds(size, bound):
            return False
    return True


def boolean(function: str, argument: str, value: Any) -> bool:
    """True or False, also NumPy's, as a `bool`; neither 1 nor "yes".

    >>> boolean("Zero", "strict", True)
    True
    """
    # NumPy's type is known by its name, which NumPy 2 changed: this file does not import NumPy.
    if isinstance(value, bool) or type(value).__name__ in ("bool", "bool_"):
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
    """A tuple of texts; neither a list of them nor one text, whose letters would be taken.

    >>> texts("Zero", "axes", ("data",))
    ('data',)
    """
    if optional and value is None:
        return None
    if isinstance(value, tuple) and all(isinstance(item, str) for item in value):
        return value
    raise refusal(function, argument, value, takes + _or_none(optional))


def choice(function: str, argument: str, value: Any, choices: Collection[Any]) -> Any:
    """One of a few values, of the same type too: 1 is no True.

    >>> choice("Strategy", "nonfinite", "skip", ("count", "skip"))
    'skip'
    """
    # Types are compared first: NumPy's arrays compare item by item.
    for allowed in choices:
        if type(value) is type(allowed) and value == allowed:
            return value
    raise refusal(function, argument, value, "one of " + ", ".join(map(repr, choices)))


def pattern(function: str, argument: str, value: Any, *, optional: bool = False) -> Any:
    r"""A regular expression, as text, that compiles.

    It is given back as text; what is wrong with one that does not compile is in the error.

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
    # The last two are for patterns that nest too deep, or repeat too often.
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
    for item in value:
        pattern(function, argument, item)
    return value


def path(
    function: str, argument: str, value: Any, takes: str = "a path, as text or a `pathlib.Path`"
) -> Path:
    """A path that a file system could have, as a `Path`, with `~` and `~user` in full.

    It is not empty, has no zero bytes, and is no longer than Linux takes. Nothing is looked up:
    there need be no such file.

    >>> path("JsonLines", "path", "runs/metrics.jsonl").name
    'metrics.jsonl'
    """
    try:
        written = os.fspath(value)
    except TypeError:
        written = None
    # Some objects are paths of bytes, which are refused too.
    if not isinstance(written, str):
        raise refusal(function, argument, value, takes)
    try:
        encoded = os.fsencode(written)
    except UnicodeEncodeError as error:
        letters = f"{takes}, of letters that a file's name may have"
        raise refusal(function, argument, value, letters) from error
    if not written or "\0" in written:
        proper = f"{takes}, which is not empty and has no zero bytes"
        raise refusal(function, argument, value, proper)
    # File systems count bytes, not letters.
    longest = max(map(len, encoded.split(b"/")))
    if longest > _LONGEST_NAME or len(encoded) > _LONGEST_PATH:
        limits = f"at most {_LONGEST_PATH:,} bytes, and {_LONGEST_NAME} between slashes"
        shorter = f"{takes}, of {limits}; this has {len(encoded):,}, and {longest:,}"
        raise refusal(function, argument, value, shorter)
    try:
        return Path(written).expanduser()
    except RuntimeError as error:
        known = f"{takes}, which does not begin with a user's home folder that is not known"
        raise refusal(function, argument, value, known) from error


def kind(
    function: str, argument: str, value: Any, kinds: Any, takes: str, *, optional: bool = False
) -> Any:
    """A value of some class, or of a union of classes, as `isinstance` takes them.

    >>> kind("fit", "loop", 3, int, "a number")
    3
    """
    if isinstance(value, kinds) or (optional and value is None):
        return value
    raise refusal(function, argument, value, takes + _or_none(optional))


def function(
    caller: str, argument: str, value: Any, takes: str = "a function", *, optional: bool = False
) -> Any:
    """What can be called and is no class.

    A class is most often a slip, of one who forgot to make an object of it. `caller` is the name of
    the function that takes the argument.

    >>> function("train_step", "loss_fn", len) is len
    True
    """
    if (callable(value) and not isinstance(value, type)) or (optional and value is None):
        return value
    raise refusal(caller, argument, value, takes + _or_none(optional))


def keywords(function: str, options: Mapping[str, Any], known: type) -> None:
    """Refuse keywords that a function does not take, as Python does for those that it spells out.

    `known` is the `TypedDict` that describes the function's `**options`: only type checkers look
    at it, so that a misspelt keyword would be ignored when the function is called.

    >>> from typing import TypedDict
    >>> class Options(TypedDict, total=False):
    ...     group: int
    >>> keywords("moe", {"groop": 2}, Options)
    Traceback (most recent call last):
    TypeError: moe() got an unexpected keyword argument 'groop'; it takes `group`
    """
    taken = known.__annotations__
    for name in options:
        if name not in taken:
            raise TypeError(
                f"{function}() got an unexpected keyword argument {name!r}; it takes "
                f"{listed(taken)}"
            )


def called(caller: str, argument: str, function: Any, *arguments: Any) -> Any:
    """What a function of the user returns for some arguments.

    If it does not take so many, the error names the function and the argument that it was passed
    as. An error from within it is the user's, and is raised as it is.

    >>> called("init", "make_model", dict)
    {}
    """
    try:
        return function(*arguments)
    except TypeError as error:
        # A traceback that goes on after the call comes from within the function.
        if error.__traceback__ is None or error.__traceback__.tb_next is not None:
            raise
        many = f"{len(arguments)} arguments" if arguments else "no arguments"
        raise ValueError(
            f"`{caller}({argument}=...)` is called with {many}, and does not take them: {error}."
        ) from error


def assign(instance: Any, **checked: Any) -> None:
    """Set fields of a frozen dataclass to their checked values, in its `__post_init__`.

    A frozen dataclass refuses plain assignments there too.
    """
    for name, value in checked.items():
        object.__setattr__(instance, name, value)


def _float(value: Any) -> float:
    """A number as a float: infinite where it is a whole number too large for one."""
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def _bounds_text(bounds: Mapping[str, Any], infinite: bool) -> str:
    """Bounds in words, to be put behind what an argument takes: ", at least 0 and below 1".

    It also says that the number must be finite, unless an `infinite` one is taken too or an upper
    bound says so already. It is empty if there is nothing to say.
    """
    words: list[str] = []
    bounded_above = bounds.get("most") is not None or bounds.get("below") is not None
    if not infinite and not bounded_above:
        words.append("finite")
    for name, kind_of_bound in _BOUNDS.items():
        bound = bounds.get(name)
        if bound is not None:
            words.append(f"{kind_of_bound.words} {bound:,}")
    if not words:
        return ""
    return f", {' and '.join(words)}"


def _or_none(optional: bool) -> str:
    """The words for an argument that may be None, to be put behind what it takes."""
    return ", or None" if optional else ""
