"""Arguments, checked: a wrong one is a `ValueError` that names it, whatever its kind or size."""

import operator
import os
from pathlib import Path
from typing import Any

import numpy as np

_SHOWN = 80  # characters of a value in a message
_PATH_BYTES = 4095  # what the systems that JAX runs on take


def shown(value: Any) -> str:
    """A value for a message, cut where it is long.

    >>> shown("a"), shown(10**5000)
    ("'a'", 'an int of 16610 bits')
    """
    # Python refuses to write out the largest.
    # A bool is an int too, of one bit.
    if isinstance(value, int) and value.bit_length() > 1000:
        return f"an int of {value.bit_length()} bits"
    is_cut = False
    # A text may have gigabytes, which are not to be spelt out for this.
    if isinstance(value, str | bytes) and len(value) > _SHOWN:
        value, is_cut = value[:_SHOWN], True
    try:
        text = repr(value)
    except Exception:
        text = f"a {type(value).__name__}"
    if is_cut or len(text) > _SHOWN:
        return f"{text[: _SHOWN - 1]}…"
    return text


def listed(names: Any, most: int = 8) -> str:
    """Some names, each in backquotes, and how many more there are.

    >>> listed(["a", "b", "c"], 2)
    '`a`, `b` and 1 more'
    """
    all_names = list(names)
    text = ", ".join(f"`{str(name)[:_SHOWN]}`" for name in all_names[:most])
    if len(all_names) > most:
        text += f" and {len(all_names) - most} more"
    return text


def whole_number(what: str, value: Any, least: int, most: int) -> int:
    """`value` as an int, if it is a whole number in this range.

    `what` is how the caller spells the argument, with dots for the value.

    >>> whole_number("Sequences(length=...)", np.int64(3), 1, 10)
    3
    >>> whole_number("Sequences(length=...)", True, 1, 10)
    Traceback (most recent call last):
    ValueError: `Sequences(length=True)` must be a whole number from 1 up to 10.
    """
    is_whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
    if not is_whole or not least <= value <= most:
        said = what.replace("...", shown(value))
        raise ValueError(f"`{said}` must be a whole number from {least} up to {most}.")
    return operator.index(value)


def whole_numbers(what: str, values: Any, least: int, most: int) -> np.ndarray:
    """Whole numbers in this range as an int64 array of one dim."""
    try:
        array = np.asarray(values)
    except Exception:
        array = np.empty((), object)
    # An empty list becomes an array of floats, which is not meant.
    if array.size == 0 and array.ndim == 1:
        return np.empty(0, np.int64)
    is_whole = array.ndim == 1 and array.dtype.kind in "iu"
    if not is_whole or array.min() < least or array.max() > most:
        raise ValueError(
            f"`{what}` are whole numbers from {least} up to {most}, in an array of one dim; got "
            f"{shown(values)}."
        )
    return array.astype(np.int64)


def text_or_none(what: str, value: Any) -> None:
    """Refuse what is neither None nor a text that is not empty and that UTF-8 can hold."""
    if value is None:
        return
    if not isinstance(value, str) or not value or not _is_unicode(value):
        raise ValueError(
            f"`{what.replace('...', shown(value))}` is a text that is not empty, or None."
        )


def path_text(what: str, value: Any, way_out: str) -> str:
    """A path, or a pattern of paths, as text.

    >>> path_text("Corpus(files=...)", " ", "Give a path.")
    Traceback (most recent call last):
    ValueError: `Corpus(files=' ')` is blank. Give a path.
    """
    try:
        text = os.fspath(value)
    except Exception:
        text = None
    if not isinstance(text, str):
        raise ValueError(f"`{what.replace('...', shown(value))}` is no path. {way_out}")
    said = what.replace("...", shown(text))
    if not text.strip():
        raise ValueError(f"`{said}` is blank. {way_out}")
    try:
        # File systems count bytes, and cannot hold every text.
        size = len(os.fsencode(text))
    except UnicodeError:
        raise ValueError(
            f"`{said}` holds half of a character, which no path can. {way_out}"
        ) from None
    if "\0" in text:
        raise ValueError(f"`{said}` holds a character of number 0, which no path can. {way_out}")
    if size > _PATH_BYTES:
        raise ValueError(f"`{said}` has {size} bytes; a path has at most {_PATH_BYTES}. {way_out}")
    return text


def expanded(text: str) -> Path:
    """The path that a text names, `~` and `~user` in full."""
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise ValueError(
            f"`{shown(text)}` begins with a user's home folder that is not known: {error}"
        ) from None


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
