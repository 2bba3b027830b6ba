"""Values of `Strategy(remat=...)` as they are written in Python, and in few words."""

from typing import Any

from shardlib.layouts._remat_policy import Remat, RematLayers, RematPaths


def plain_remat(value: Any) -> Any:
    """The same value in its simplest form: nothing but inputs is `"full"`.

    >>> plain_remat(Remat()), plain_remat(Remat.layers((2, Remat()), rest="none"))
    ('full', RematLayers(runs=((2, 'full'),), rest='none'))
    """
    if value == Remat():
        return "full"
    if isinstance(value, RematLayers):
        return RematLayers(_plain_pairs(value.runs), plain_remat(value.rest))
    if isinstance(value, RematPaths):
        return RematPaths(_plain_pairs(value.patterns), plain_remat(value.rest))
    return value


def _plain_pairs(pairs: Any) -> Any:
    return tuple((key, plain_remat(kept)) for key, kept in pairs)


def remat_code(value: Any) -> str:
    """A value as Python, which makes an equal one.

    >>> remat_code(Remat.layers((2, "full"), (6, Remat.save("context"))))
    'sl.Remat.layers((2, "full"), (6, sl.Remat.save("context")))'
    """
    if isinstance(value, RematLayers):
        return _code_by_block("layers", value.runs, value.rest)
    if isinstance(value, RematPaths):
        return _code_by_block("paths", value.patterns, value.rest)
    if isinstance(value, str):
        return _quoted(value)
    if isinstance(value, Remat):
        return _code_of_names(value)
    return f"sl.{value!r}"


def _code_by_block(function: str, pairs: Any, rest: Any) -> str:
    """What blocks keep by their place or their parameters, as Python."""
    arguments = []
    for key, kept in pairs:
        key = _quoted(key) if isinstance(key, str) else key
        arguments.append(f"({key}, {remat_code(kept)})")
    if rest is not None:
        arguments.append(f"rest={remat_code(rest)}")
    return f"sl.Remat.{function}({', '.join(arguments)})"


def _code_of_names(value: Remat) -> str:
    """A value as the union of what people write; as all of its fields if it has more than names."""
    parts = []
    if value.names or value == Remat():
        parts.append(f"sl.Remat.save({_listed(value.names)})")
    if value.offloaded:
        parts.append(f"sl.Remat.offload({_listed(value.offloaded)})")
    for encoding in dict.fromkeys(encoding for _, encoding in value.compressed):
        names = [name for name, how in value.compressed if how == encoding]
        parts.append(f"sl.Remat.compress({_listed([encoding, *names])})")
    by_names = Remat(value.names, offloaded=value.offloaded, compressed=value.compressed)
    if value != by_names:
        return f"sl.{value!r}"
    return " | ".join(parts)


def _listed(texts: Any) -> str:
    return ", ".join(map(_quoted, texts))


def _quoted(text: str) -> str:
    """Text in double quotes, as most code has it; in whatever Python takes if it needs escapes."""
    if '"' in text or "\\" in text:
        return repr(text)
    return f'"{text}"'


def remat_words(value: Any) -> str:
    """What is kept, for a picture.

    >>> remat_words(Remat.layers((2, "full"), (6, Remat.save("context"))))
    'inputs in 2, context in 6'
    """
    if isinstance(value, RematLayers):
        return _words_by_block(value.runs, value.rest)
    if isinstance(value, RematPaths):
        return _words_by_block(value.patterns, value.rest)
    if value in ("full", Remat()):
        return "inputs"
    if value == "none":
        return "everything"
    if isinstance(value, Remat) and value.every_name:
        words = list(value.names)
        words += [f"{name} on the host" for name in value.offloaded]
        words += [f"{name} as {encoding}" for name, encoding in value.compressed]
        return " + ".join(words)
    return str(value)


def _words_by_block(pairs: Any, rest: Any) -> str:
    """What blocks keep by their place or their parameters, for a picture."""
    parts = [f"{remat_words(kept)} in {key}" for key, kept in pairs]
    if rest is not None:
        parts.append(f"{remat_words(rest)} in the rest")
    return ", ".join(parts)
