"""Trees by path: the one spelling of where a leaf is in a tree.

It is used in every message, table and pattern, so that what a user reads in one place can be
written in another.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.tree_util import DictKey, FlattenedIndexKey, GetAttrKey, SequenceKey


def path_name(path: tuple[Any, ...]) -> str:
    """Spell a JAX key path as `blocks/attn/kernel`.

    Keys of dicts, fields and positions in sequences are all written alike, between slashes.

    >>> path_name((DictKey("blocks"), SequenceKey(0), GetAttrKey("kernel")))
    'blocks/0/kernel'
    """
    return "/".join(_key_name(key) for key in path)


def named_leaves(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> list[tuple[str, Any]]:
    """Every leaf with the name of its path, in the order of `jax.tree.leaves`.

    A subtree for which `is_leaf` is true counts as one leaf.
    """
    return [
        (path_name(path), leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_leaf)
    ]


def map_named(
    f: Callable[..., Any], tree: Any, *rest: Any, is_leaf: Callable[[Any], bool] | None = None
) -> Any:
    """`jax.tree.map` with a function that is also given the name of each leaf's path.

    The name comes first, then the leaf of `tree` and those of the trees in `rest`.
    """
    return jax.tree_util.tree_map_with_path(
        lambda path, *leaves: f(path_name(path), *leaves), tree, *rest, is_leaf=is_leaf
    )


def _key_name(key: Any) -> str:
    """One key of a path as text, without the brackets or dots of JAX's own spelling."""
    match key:
        case DictKey(key=name) | GetAttrKey(name=name) | FlattenedIndexKey(key=name):
            return str(name)
        case SequenceKey(idx=index):
            return str(index)
    # Users may register nodes with keys of classes of their own.
    return str(key)
