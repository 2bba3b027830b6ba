"""Values of `Strategy(remat=...)` as they are written in Python, and in few words."""

from typing import Any

from shardlib.layouts._remat_policy import Remat, RematLayers


def plain_remat(value: Any) -> Any:
    """The same value in its simplest form: nothing but inputs is `"full"`.

    >>> plain_remat(Remat()), plain_remat(Remat.layers((2, Remat()), rest="none"))
    ('full', RematLayers(runs=((2, 'full'),), rest='none'))
    """
    if value == Remat():
        return "full"
    if isinstance(value, RematLayers):
        runs = tuple((count, plain_remat(kept)) for count, kept in value.runs)
        return RematLayers(runs, plain_remat(value.rest))
    return value


def remat_code(value: Any) -> str:
    """A value as Python, which makes an equal one.

    >>> remat_code(Remat.layers((2, "full"), (6, Remat.save("context"))))
    'sl.Remat.layers((2, "full"), (6, sl.Remat.save("context")))'
    """
    if isinstance(value, RematLayers):
        runs = [f"({count}, {remat_code(kept)})" for count, kept in value.runs]
        if value.rest is not None:
            runs.append(f"rest={remat_code(value.rest)}")
        return f"sl.Remat.layers({', '.join(runs)})"
    if isinstance(value, str):
        return f'"{value}"'
    # People write `Remat.save`; what has further fields is written with all of them.
    if isinstance(value, Remat) and value == Remat.save(*value.names):
        names = ", ".join(f'"{name}"' for name in value.names)
        return f"sl.Remat.save({names})"
    return f"sl.{value!r}"


def remat_words(value: Any) -> str:
    """What is kept, for a picture.

    >>> remat_words(Remat.layers((2, "full"), (6, Remat.save("context"))))
    'inputs in 2, context in 6'
    """
    if isinstance(value, RematLayers):
        parts = [f"{remat_words(kept)} in {count}" for count, kept in value.runs]
        if value.rest is not None:
            parts.append(f"{remat_words(value.rest)} in the rest")
        return ", ".join(parts)
    if value in ("full", Remat()):
        return "inputs"
    if value == "none":
        return "everything"
    if isinstance(value, Remat) and value.names:
        return " + ".join(value.names)
    return str(value)
