"""Fields of frozen dataclasses by dotted names: listed, changed from a command line, explained."""

import ast
import dataclasses
import difflib
import inspect
import math
import re
from collections.abc import Iterator, Sequence
from typing import Any, Literal, get_args, get_origin, get_type_hints

import shardlib as sl
from examples import values

# Fields whose value is one, of whatever type.
_WHOLE_FIELDS = ("pipeline", "remat", "router")
_WORDS = {"true": True, "false": False, "none": None}


def fields(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every field of a dataclass, and of those in it, by its dotted name."""
    for field in dataclasses.fields(value):
        inner = getattr(value, field.name)
        is_whole = isinstance(inner, values.WHOLE) or field.name in _WHOLE_FIELDS
        if dataclasses.is_dataclass(inner) and not is_whole:
            yield from fields(inner, f"{prefix}{field.name}.")
        else:
            yield prefix + field.name, inner


def override(value: Any, arguments: Sequence[str]) -> Any:
    """A value of frozen dataclasses with fields changed by their dotted names: `--loop.steps 100`,
    or `--loop.steps=100`.

    >>> from examples.run import AdamW
    >>> override(AdamW(), ["--warmup", "20", "--learning_rate=1e-3"])
    AdamW(learning_rate=0.001, warmup=20, final=0.1, b1=0.9, b2=0.95, weight_decay=0.1, freeze=None)
    >>> override(AdamW(), ["--warmpu", "20"])
    Traceback (most recent call last):
    ValueError: There is no field `warmpu`; did you mean `warmup`?
    """
    texts: dict[str, str] = {}
    chosen: dict[str, Any] = {}
    for name, text in _changes(arguments):
        kinds = _kinds(type(value), name)
        if not kinds:
            texts[name] = text
            continue
        # Of another class, whose fields may be changed in the same line.
        kind, now = _kind(name, text, kinds), getattr(value, name)
        chosen[name] = now if type(now) is kind else kind()
    known = [name for name, _ in fields(value) if name.partition(".")[0] not in chosen]
    for group, of_kind in chosen.items():
        known += [f"{group}.{name}" for name, _ in fields(of_kind)]
    for name in texts:
        if name not in known:
            raise ValueError(f"There is no field `{name}`{_meant(name, known)}")
    return _changed(value, texts, chosen)


def _changes(arguments: Sequence[str]) -> Iterator[tuple[str, str]]:
    """The names of a command line, and their values as text."""
    rest = list(arguments)
    while rest:
        name, equals, text = rest.pop(0).partition("=")
        if not name.startswith("--"):
            raise ValueError(f"Fields are given as `--FIELD VALUE`; got `{name}`.")
        if not equals:
            if not rest:
                raise ValueError(f"`{name}` has no value.")
            text = rest.pop(0)
        yield name[2:].replace("-", "_"), text


def _kinds(owner: type, name: str) -> dict[str, type]:
    """The classes of which a group of fields is one, by their names in small letters, where there
    is a choice.
    """
    choices = get_args(get_type_hints(owner).get(name))
    if not choices or not all(map(dataclasses.is_dataclass, choices)):
        return {}
    return {kind.__name__.lower(): kind for kind in choices}


def _kind(name: str, text: str, kinds: dict[str, type]) -> type:
    """The class that a text names."""
    if text.lower() not in kinds:
        raise ValueError(
            f"`{name}` is {' or '.join(f'`{kind}`' for kind in kinds)}, with its own fields; got "
            f"`{text}`."
        )
    return kinds[text.lower()]


def _meant(name: str, known: Sequence[str]) -> str:
    """The end of a message on a field that does not exist: those that were probably meant."""
    group, _, last = name.rpartition(".")
    of_group = [one for one in known if one.startswith(f"{name}.")]
    if of_group:
        return f": it is a group of fields, {listed(of_group)}."
    beside = [one for one in known if group and one.startswith(f"{group}.")]
    ends: dict[str, list[str]] = {}
    for one in beside or known:
        ends.setdefault(one.rpartition(".")[2], []).append(one)
    near = ends.get(last, [])
    if not near:
        # Among many fields of other groups only a name that is very near is one.
        cutoff = 0.6 if beside else 0.75
        for end in difflib.get_close_matches(last, list(ends), 1, cutoff):
            near = ends[end]
    if near:
        return f"; did you mean {' or '.join(f'`{one}`' for one in near)}?"
    return f": `{group}` has {listed(beside)}." if beside else "."


def listed(names: Sequence[str]) -> str:
    """Names for a message."""
    return ", ".join(f"`{name}`" for name in names)


def short(value: Any) -> str:
    """A value for a message, in one line and not too long."""
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:100]}... ({len(text):,} letters)"


def _changed(value: Any, changes: dict[str, str], chosen: dict[str, Any] | None = None) -> Any:
    """All fields of one dataclass at once, since each may be wrong without the other.

    `chosen` has the groups of fields that are of another class than in `value`.
    """
    hints = get_type_hints(type(value))
    own: dict[str, str] = {}
    below: dict[str, dict[str, str]] = {}
    for name, text in changes.items():
        field, dot, rest = name.partition(".")
        if dot:
            below.setdefault(field, {})[rest] = text
        else:
            own[field] = text
    new = dict(chosen or {})
    for name, texts in below.items():
        new[name] = _changed(new.get(name, getattr(value, name)), texts)
    for name, text in own.items():
        new[name] = _parsed(name, text, getattr(value, name), hints[name])
    return dataclasses.replace(value, **new)


def _parsed(name: str, text: str, now: Any, hint: Any) -> Any:
    """The value of a field that a text stands for.

    Args:
        name: of the field.
        text: that was given.
        now: the value of the field.
        hint: the type that the field is declared with.
    """
    is_none = text.lower() == "none"
    if isinstance(now, sl.AxisRules):
        return values.rules(text)
    if name == "pipeline" and not is_none:
        return values.schedule(text)
    if name == "exchange":
        return values.exchange(text)
    if name == "remat":
        return values.remat(text)
    if name in ("separator", "prompt"):  # a newline is typed as \n
        return None if is_none else _unescaped(name, text)
    if hint is str or text in _choices(hint):
        return text
    if values.is_made(name, text):
        return values.evaluated(name, text)
    return _checked(name, text, _literal(text), now, hint)


def _choices(hint: Any) -> list[Any]:
    """What a field may be by name, where its type lists that."""
    found: list[Any] = []
    for kind in (hint, *get_args(hint)):
        if get_origin(kind) is Literal:
            found += get_args(kind)
    return found


def _literal(text: str) -> Any:
    """A text as a number, a tuple or a word, or as the text that it is."""
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return text


def _checked(name: str, text: str, value: Any, now: Any, hint: Any) -> Any:
    """A value as the type of its field has it; refused if that is another type."""
    may_be: set[Any] = set()
    for kind in get_args(hint) or (hint,):
        may_be.add(type(None) if kind is None else get_origin(kind) or kind)
    numbers = {int, float}
    if value is None and type(None) not in may_be and hint is not Any:
        raise ValueError(f"`{name}` cannot be none; it is {now!r} now.")
    if bool in may_be and not isinstance(value, bool):
        raise ValueError(f"`{name}` is true or false; got {short(text)}.")
    if bool not in may_be and isinstance(value, bool):
        raise ValueError(f"`{name}` is neither true nor false; it is {now!r} now.")
    is_number = bool(may_be & numbers) and not may_be - numbers - {type(None)}
    if is_number and not isinstance(value, int | float | None):
        raise ValueError(f"`{name}` is a number, {now} now; got {short(text)}.")
    if may_be == {int} and isinstance(value, float):
        raise ValueError(f"`{name}` is a whole number, {now} now; got {short(text)}.")
    if isinstance(now, float) and type(value) is int and int not in may_be:
        return float(value) if abs(value) < 2**1000 else math.inf
    return value


_ESCAPED = {"n": "\n", "t": "\t", "\\": "\\", "'": "'", '"': '"'}


def _unescaped(name: str, text: str) -> str:
    """A text in which a backslash and `n`, `t`, a quote or a backslash stand for a character."""

    def character(found: re.Match[str]) -> str:
        if found[1] not in _ESCAPED:
            raise ValueError(
                f"`{name}` has a backslash that begins nothing, {short(text)}: \\n is a new line, "
                "\\t a tab, and two backslashes are one of the text."
            )
        return _ESCAPED[found[1]]

    return re.sub(r"\\(.?)", character, text, flags=re.DOTALL)


def show_help(value: Any) -> None:
    """Print every field with its value, and what the docstrings say of it."""
    lines = [str(inspect.getdoc(type(value))).partition("\n")[0]]
    for name, now in fields(value):
        owner = value
        for part in name.split(".")[:-1]:
            owner = getattr(owner, part)
        lines.append(f"  --{name} {now!r}")
        said = _said(type(owner)).get(name.rpartition(".")[2])
        if said:
            lines.append(f"        {said}")
    print("\n".join(lines))


def _said(kind: type) -> dict[str, str]:
    """What the lists in the docstrings of a class and of its bases say of each field."""
    said: dict[str, str] = {}
    for each in reversed(kind.__mro__):
        items = re.findall(
            r"^- ((?:`\w+`(?:, )?)+): (.*(?:\n  .*)*)", inspect.getdoc(each) or "", re.MULTILINE
        )
        for names, text in items:
            for name in re.findall(r"`(\w+)`", names):
                said[name] = " ".join(text.split())
    return said
