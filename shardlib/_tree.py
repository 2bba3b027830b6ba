"""Trees by path: the one spelling of where a leaf lives, used in every message, table and
pattern.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.tree_util import DictKey, FlattenedIndexKey, GetAttrKey, SequenceKey


def path_name(path: tuple[Any, ...]) -> str:
    """Spell a JAX key path as `blocks/attn/kernel`.

    >>> path_name((DictKey("blocks"), SequenceKey(0), GetAttrKey("kernel")))
    'blocks/0/kernel'
    """
    return "/".join(_key_name(key) for key in path)


def named_leaves(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> list[tuple[str, Any]]:
    """Every leaf with the name of its path, in the order of `jax.tree.leaves`."""
    return [
        (path_name(path), leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_leaf)
    ]


def map_named(
    f: Callable[..., Any], tree: Any, *rest: Any, is_leaf: Callable[[Any], bool] | None = None
) -> Any:
    """`jax.tree.map` whose function is also given the name of each leaf's path, first."""
    return jax.tree_util.tree_map_with_path(
        lambda path, *leaves: f(path_name(path), *leaves), tree, *rest, is_leaf=is_leaf
    )


def _key_name(key: Any) -> str:
    match key:
        case DictKey(key=name) | GetAttrKey(name=name) | FlattenedIndexKey(key=name):
            return str(name)
        case SequenceKey(idx=index):
            return str(index)
    return str(key)
