"""Packages that only some data needs, imported where they are needed."""

import importlib
from typing import Any


def package(name: str, needed_for: str) -> Any:
    """The module called `name`, or an error that says how to install it.

    >>> package("json", "JSON").__name__
    'json'
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(
            f"{needed_for} needs the package `{name.split('.')[0]}`, which cannot be imported "
            f'({error}): `pip install "shardlib[data]"`.'
        ) from error
