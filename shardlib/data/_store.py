"""Documents as tokens on disk: made once, memory-mapped ever after.

A store is a folder. For each of its parts, `train` and `held_out`, there are the tokens of all
documents one after the other, each document ended by the end token, and where each document ends;
of conversations also `switches`, where tokens begin to be learned, and end.
Whatever changes the tokens is in the folder's name: the files with their sizes and times, the
tokenizer's content, the choices of the `Corpus`. So a store is never out of date; it is there, or
it is built.

Every byte of a store is under a digest. Of the tokens, `train.ids` and `held_out.ids`, each block
has its own, in `train.crc32` and `held_out.crc32`, compared when the block is first read. All other
files are small beside them: their digests are in `sha256sums`, as the program `sha256sum` writes
them, and are compared when the store is opened.
"""

import contextlib
import hashlib
import json
import os
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from shardlib._progress import log
from shardlib.data._blocks import BLOCK_BYTES, SUSPECT, CheckedArray
from shardlib.data._build import VERSION, build, describe_files
from shardlib.data._checks import expanded, path_text, shown
from shardlib.data._claim import claim
from shardlib.data._corpus import Corpus, Skipped, Source
from shardlib.data._files import find_files
from shardlib.data._seals import PARTS, is_plain_file, unsealed
from shardlib.data._tokenizer import read_tokenizer, tokenizer_file
from shardlib.data._tokens import Prepared, Tokens


def prepare(corpus: Corpus, cache: str | os.PathLike[str] | None = None) -> Prepared:
    r"""The tokens of a corpus, from the cache or made now, by its tokenizer.

    - `corpus`: which texts, and by which tokenizer, a `Corpus`.
    - `cache`: the folder that keeps the tokens, `~/.cache/shardlib` unless given. Other files, or
      other choices in the corpus, have a folder of their own in it.

    Of several processes that ask at once, on a shared file system too, one makes them and the
    others wait. Memory is bounded by the largest document, not by the corpus. A record that does
    not match its format is a `ValueError`, unless the corpus skips it.

    >>> import tempfile
    >>> folder = tempfile.TemporaryDirectory()
    >>> lines = Path(folder.name, "lines.jsonl")
    >>> size = lines.write_text('{"text": "To be"}\n{"text": "or not to be"}\n')
    >>> prepared = prepare(Corpus(str(lines), held_out=0), cache=folder.name)
    >>> prepared.train
    Tokens(19 of 2 documents, vocab=257)
    >>> prepared.tokenizer.decode(prepared.train.ids[:5])
    'To be'
    >>> folder.cleanup()
    """
    if not isinstance(corpus, Corpus):
        given = ""
        if isinstance(corpus, str):
            given = f", such as `Corpus({shown(corpus)})`"
        raise ValueError(f"`prepare` takes a `Corpus`{given}; got {type(corpus).__name__}.")
    # Their sizes and times are part of the key: a file that changes makes another store.
    sources = find_files(corpus)
    folder = cache_folder(cache) / _key(corpus, sources)
    damage = ""
    while True:
        opened = _open(folder, corpus)
        if isinstance(opened, Prepared):
            return opened
        if opened and opened != damage:
            damage = opened
            log("data", f"{folder} is damaged, {damage}; it is made anew")
        # Next to the store and not in it, since the store is renamed into place as a whole.
        lock = folder.with_suffix(".lock")
        with contextlib.suppress(FileNotFoundError):
            if not is_plain_file(lock):  # as a lock, it would be waited for without end
                raise ValueError(f"`{lock}` is no file, and no lock of ours: remove it.")
        with claim(lock, f"preparing {describe_files(sources)} in {folder}") as scratch:
            # Another may have finished between the look and the claim.
            if scratch is not None and not isinstance(_open(folder, corpus), Prepared):
                _make(corpus, sources, scratch, folder)


def _make(corpus: Corpus, sources: tuple[Source, ...], scratch: Path, folder: Path) -> None:
    """Make a store in the folder `scratch`, and give it the name `folder` when it is complete.

    A process that others took for dead loses its folder, and leaves the store to them.
    """
    try:
        build(corpus, sources, scratch)
        # The key has the content of the tokenizer's file, as it is now.
        if _key(corpus, sources) != folder.name:
            raise ValueError(
                f"`{corpus.tokenizer}` changed while it was used. Prepare again when it is "
                "finished."
            )
        _publish(scratch, folder, corpus)
    except FileNotFoundError:
        if scratch.exists():
            raise
        log("data", f"{folder} is being made by another, which took this process for dead")


def cache_folder(cache: str | os.PathLike[str] | None = None) -> Path:
    """The folder for what is made once and kept.

    It is `~/.cache/shardlib`, or under `$XDG_CACHE_HOME`, unless another is given.
    """
    if cache is None:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "shardlib"
    folder = expanded(
        path_text(
            "prepare(cache=...)", cache, "Name a folder, or give None for `~/.cache/shardlib`."
        )
    )
    folder = folder.absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"The folder {shown(str(folder))} for tokens cannot be made ({error.strerror}); name "
            "another: `prepare(corpus, cache=...)`."
        ) from error
    # It is better to find out now than after hours of reading.
    if not os.access(folder, os.W_OK):
        raise ValueError(
            f"The folder `{folder}` for tokens cannot be written to; name another: "
            "`prepare(corpus, cache=...)`."
        )
    return folder


def _key(corpus: Corpus, sources: tuple[Source, ...]) -> str:
    """A name for the tokens. Where the files are named from another folder, it is the same."""
    tokenizer = tokenizer_file(corpus.tokenizer)
    content = read_tokenizer(tokenizer)
    choices = asdict(corpus)
    # The files are in the key by what was found, and not by how they were named.
    del choices["files"], choices["format"]
    # So that stores have the names that they had before there were these fields.
    for name in ("chat", "begin"):
        if choices[name] is None:
            del choices[name]
    # 0 and 0.0 are the same share, and different texts in JSON.
    choices["held_out"] = float(corpus.held_out)
    if tokenizer:
        choices["tokenizer"] = hashlib.sha256(content).hexdigest()
    files = []
    for source in sources:
        files.append((str(source.path), source.format, source.size, source.modified_ns))
    return hashlib.sha256(json.dumps([VERSION, choices, files]).encode()).hexdigest()[:16]


def _open(folder: Path, corpus: Corpus) -> Prepared | str:
    """The store in a folder; or what is wrong with it, an empty text where there is nothing."""
    if not os.path.lexists(folder):
        return ""
    if not folder.is_dir():
        return "it is no folder"
    try:
        return unsealed(folder, corpus) or _read(folder, corpus)
    except FileNotFoundError as error:
        return f"`{Path(error.filename).name}` is missing"
    except (KeyError, TypeError, AttributeError, ValueError):
        # It is whole by its digest, and was not written by this library.
        return "`meta.json` is of another kind"
    except OSError as error:  # a file that cannot be read may be as it should be
        raise ValueError(
            f"`{error.filename or folder}` cannot be read: {error.strerror}."
        ) from error


def _read(folder: Path, corpus: Corpus) -> Prepared | str:
    """A store whose digests are right."""
    description = json.loads((folder / "meta.json").read_text())
    if description["block_bytes"] != BLOCK_BYTES:
        return f"its blocks have {description['block_bytes']} bytes"
    parts = []
    for name in PARTS:
        # That a file was cut is told before its blocks are.
        path, size = folder / f"{name}.ids", description["sizes"][f"{name}.ids"]
        size_now = path.stat().st_size
        if size_now != size:
            return f"`{path.name}` has {size_now} of {size} bytes"
        parts.append(_part(folder, name, description, has_switches=bool(corpus.chat)))
    train, held_out = parts
    damage = _suspected_damage(folder, train, held_out)
    if damage:
        return damage
    return Prepared(
        corpus,
        folder,
        train,
        held_out,
        description["files"],
        description["empty"],
        tuple(Skipped(**skipped) for skipped in description["skipped"]),
        tuple(description["left_out"]),
        **description["learned"],
        unknown=description["unknown"],
        tokenizer_sha256=description["tokenizer_sha256"],
    )


def _part(folder: Path, name: str, description: dict[str, Any], has_switches: bool) -> Tokens:
    """One part of a store, memory-mapped; its blocks are checked when they are read."""
    digests = np.fromfile(folder / f"{name}.crc32", "<u4")
    ids = CheckedArray(folder / f"{name}.ids", description["dtype"], digests)
    ends = _mapped(folder / f"{name}.ends", "<i8")
    switches = _mapped(folder / f"{name}.switches", "<i8") if has_switches else None
    return Tokens(
        ids,
        ends,
        description["vocab"],
        description["end"],
        switches=switches,
        begin=description.get("begin"),
        **description[name],
    )


def _suspected_damage(folder: Path, *parts: Tokens) -> str:
    """The first damaged block of a store in which one was suspected, or an empty text.

    A block that was found damaged may have been so only in one machine's memory. If all are right,
    the suspicion is forgotten.
    """
    if not os.path.lexists(folder / SUSPECT):
        return ""
    for part in parts:
        assert isinstance(part.ids, CheckedArray)
        damage = part.ids.find_damage()
        if damage:
            return damage
    with contextlib.suppress(OSError):
        (folder / SUSPECT).unlink(missing_ok=True)
    return ""


def _mapped(path: Path, dtype: str) -> np.ndarray:
    if not path.stat().st_size:
        return np.empty(0, dtype)  # a file without bytes cannot be mapped
    # Mapped read-only: processes of one machine share the memory.
    return np.memmap(path, dtype, mode="r")


def _publish(scratch: Path, folder: Path, corpus: Corpus) -> None:
    """Give a folder that is complete the name of the store.

    It is left as it is where another took this process for dead, and was faster.
    """
    # A damaged store is moved out of the way by a rename, which readers do not notice.
    aside = scratch.with_suffix(".damaged")
    if not isinstance(_open(folder, corpus), Prepared):
        with contextlib.suppress(FileNotFoundError):
            folder.rename(aside)
    try:
        scratch.rename(folder)
    except OSError:
        if not isinstance(_open(folder, corpus), Prepared):
            raise
    finally:
        _remove(aside)


def _remove(path: Path) -> None:
    """Remove a file, a folder, or a link, but not what a link leads to."""
    if path.is_symlink() or path.is_file():
        path.unlink(missing_ok=True)
    else:
        shutil.rmtree(path, ignore_errors=True)
