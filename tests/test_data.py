"""Data: every format and every way it can be wrong, stores that are made once, examples that are
always the same.
"""

import concurrent.futures
import contextlib
import dataclasses
import errno
import gzip
import itertools
import json
import os
import pickle
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("grain")
pytest.importorskip("tokenizers")
pytest.importorskip("pyarrow")

import pyarrow as pa
import pyarrow.parquet as pq

from examples import train_lm
from examples.find_run import from_command_line
from shardlib.data import (
    Corpus,
    Prepared,
    Reader,
    Sequences,
    Skipped,
    Tokens,
    cache_folder,
    load_tokenizer,
    prepare,
)
from shardlib.data import _blocks as blocks_room
from shardlib.data import _build as build_room
from shardlib.data import _claim as claim_room
from shardlib.data import _documents as documents_room
from shardlib.data import _store as store_room
from shardlib.data import _tokens as tokens_room
from shardlib.data._corpus import Reading
from shardlib.data._documents import read_documents
from shardlib.data._files import find_files
from shardlib.data._tokenizer import learn_tokenizer

ROOT = Path(__file__).parent.parent
TEXTS = ["To be, or not to be", "Whether 'tis nobler", "ünïcödé ✓\r\nand a line", "x" * 700]


def read(files, **choices):
    corpus = Corpus(files, **choices)
    reading = Reading()
    documents = read_documents(find_files(corpus), corpus, reading)
    return [document.text for document in documents], reading


def write_records(path, records):
    module = pytest.importorskip("array_record.python.array_record_module")
    writer = module.ArrayRecordWriter(str(path), "group_size:1")
    for record in records:
        writer.write(record)
    writer.close()


def jsonl(texts, key="text"):
    return "".join(json.dumps({"id": k, key: text}) + "\n" for k, text in enumerate(texts)).encode()


def tokens_of(*lengths, vocab=1000):
    """Documents of these lengths, end token included; ids count up so that every place is told from
    its neighbours.
    """
    ends = np.cumsum(lengths)
    ids = (np.arange(ends[-1]) % (vocab - 1) + 1).astype(np.uint16)
    ids[ends - 1] = 0
    return Tokens(
        ids, ends, vocab=vocab, end=0, bytes=int(ends[-1]) - len(lengths), fingerprint=str(lengths)
    )


# Formats


def test_corpus_reads_text_files_as_documents(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbf" + TEXTS[0].encode())
    (tmp_path / "b" / "c.md").write_bytes(TEXTS[2].encode())
    (tmp_path / "b" / "empty.txt").touch()
    (tmp_path / "picture.png").write_bytes(b"\x89PNG")
    (tmp_path / ".hidden.txt").write_text("no")
    expected = [TEXTS[0], TEXTS[2]]
    documents, reading = read(str(tmp_path))
    assert documents == expected and reading.empty == 1
    assert read(str(tmp_path / "**" / "*.[tm][xd]*"))[0] == expected
    assert read((tmp_path / "b" / "c.md", tmp_path / "a.txt"))[0] == expected[::-1]
    (tmp_path / "again.txt").symlink_to(tmp_path / "a.txt")
    assert read((tmp_path / "b" / ".." / "a.txt", tmp_path / "*.txt"))[0] == expected[:1], (
        "once, by whatever name"
    )
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(TEXTS[1].encode()))
    assert read(tmp_path / "a.txt.gz")[0] == [TEXTS[1]]


def test_corpus_splits_a_text_file_at_separators(tmp_path, monkeypatch):
    path = tmp_path / "stories.txt"
    path.write_text(
        "\n" + "\n<|endoftext|>\n".join(["one\nline", "", *TEXTS[:2]]) + "\n<|endoftext|>\n"
    )
    for block in (1, 7, 1 << 20):  # a separator may lie across two blocks
        monkeypatch.setattr("shardlib.data._documents._BLOCK", block)
        documents, reading = read(path, separator="<|endoftext|>")
        assert documents == ["one\nline", *TEXTS[:2]] and reading.empty == 1
    marked = tmp_path / "marked.txt"
    marked.write_bytes(b"\xef\xbb\xbfone--two")
    assert read(marked, separator="--")[0] == ["one", "two"], (
        "without the mark that some editors begin a file with"
    )
    path.write_bytes(b"fine\n--\n\nalso\nb\xffd\n--\nend")
    with pytest.raises(ValueError, match=r"stories.txt`, line 5: not UTF-8 \(byte 0xff"):
        read(path, separator="--")
    assert read(path, separator="--", bad="skip")[0] == ["fine", "end"]
    windows = tmp_path / "windows.txt"
    windows.write_bytes(b"one\r\n\r\ntwo\r\n")
    with pytest.raises(ValueError, match=r"is in none of the files.*Windows"):
        prepare(Corpus(str(windows), separator="\n\n"), tmp_path / "cache")


def test_links_to_folders_are_followed_once(tmp_path):
    tree, other = tmp_path / "tree", tmp_path / "other"
    tree.mkdir(), other.mkdir()
    (tree / "a.txt").write_text("a")
    (other / "b.txt").write_text("b")
    (tree / "linked").symlink_to(other)
    (other / "back").symlink_to(tree)
    prepared = prepare(Corpus(str(tree), held_out=0), tmp_path / "cache")
    assert prepared.files == 2


def test_bad_records_with_what_utf8_cannot_hold_are_skipped(tmp_path):
    path = tmp_path / "s.jsonl"
    path.write_text('{"text": "fine"}\n{"\\ud83d": "x"}\n')
    prepared = prepare(Corpus(str(path), bad="skip", held_out=0), tmp_path / "cache")
    assert prepared.skipped[0].count == 1 and "\\ud83d" in prepared.skipped[0].first


def test_places_of_documents_may_have_no_sign():
    tokens = Tokens(np.arange(5), np.array([3, 5], np.uint64), vocab=10, end=0, bytes=3)
    assert tokens.ends.dtype == np.int64


@pytest.mark.parametrize("suffix", [".jsonl", ".ndjson", ".jsonl.gz", ".jsonl.zst"])
def test_corpus_reads_json_lines(tmp_path, suffix):
    content = (
        b"\xef\xbb\xbf"
        + jsonl(TEXTS).replace(b"\n", b"\r\n", 1)
        + b"\n  \n"
        + jsonl(["", "last"]).rstrip()
    )
    if suffix.endswith(".gz"):
        content = gzip.compress(content)
    if suffix.endswith(".zst"):
        content = pa.compress(content, "zstd", asbytes=True)
    path = tmp_path / f"lines{suffix}"
    path.write_bytes(content)
    documents, reading = read(path)
    assert documents == [*TEXTS, "last"] and reading.empty == 1
    assert reading.bytes == path.stat().st_size


@pytest.mark.parametrize("kind", ["string", "large_string", "binary", "dictionary"])
def test_corpus_reads_parquet(tmp_path, kind):
    of_type = (
        pa.dictionary(pa.int32(), pa.string()) if kind == "dictionary" else getattr(pa, kind)()
    )
    texts = [text.encode() if kind == "binary" else text for text in TEXTS * 200]
    column = pa.array(texts, of_type.value_type if kind == "dictionary" else of_type)
    column = column.dictionary_encode() if kind == "dictionary" else column
    pq.write_table(
        pa.table({"body": column, "n": list(range(800))}),
        tmp_path / "t.parquet",
        row_group_size=300,
    )
    assert read(tmp_path / "t.parquet", field="body")[0] == TEXTS * 200


def test_corpus_reads_array_records(tmp_path):
    write_records(tmp_path / "a.array_record", [text.encode() for text in TEXTS * 100])
    assert read(tmp_path / "a.array_record")[0] == TEXTS * 100
    write_records(tmp_path / "b.arrayrecord", jsonl(TEXTS, "body").splitlines())
    assert read(tmp_path / "b.arrayrecord", field="body")[0] == TEXTS


def test_corpus_named_python_reads_the_standard_library():
    corpus = Corpus("python")
    sources = find_files(corpus)
    names = {source.path.name for source in sources}
    assert {"argparse.py", "dataclasses.py"} <= names and "test_argparse.py" not in names
    assert 5 << 20 < sum(source.size for source in sources) < 50 << 20
    assert len(list(read_documents(sources, corpus, Reading()))) > 400


# What can be wrong


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        (dict(files=()), r"files=\(\)\)` names no files. Give a path, a folder or a pattern"),
        (dict(files=3), r"files=3\)` names no files. Give a path, a folder or a pattern"),
        (dict(files="a", format="parket"), "did you mean 'parquet'"),
        (dict(files="a", bad="ignore"), "choose 'stop' or 'skip'"),
        (dict(files="a", field=""), r"field=''\)` is a text that is not empty, or None"),
        (dict(files="a", tokenizer=None), 'is no path. A tokenizer is `"bytes"` or the path'),
        (dict(files="a", tokenizer="bpe:"), "behind `bpe:` stands how many tokens to learn"),
        (dict(files="a", tokenizer="bpe:1k"), "behind `bpe:` stands how many tokens to learn"),
        (dict(files="a", tokenizer="bpe:256"), "a number from 257 up"),
        (dict(files="a", held_out=1), "at least 0, below 1"),
        (dict(files="a", held_out=float("nan")), "at least 0, below 1"),
    ],
)
def test_corpus_refuses_wrong_options(choices, message):
    with pytest.raises(ValueError, match=message):
        Corpus(**choices)


def test_corpus_names_missing_files(tmp_path):
    (tmp_path / "corpus.jsonl").write_bytes(jsonl(TEXTS))
    with pytest.raises(
        ValueError, match=r"no file or folder `.*corpus.json` .*; did you mean 'corpus.jsonl'"
    ):
        read(tmp_path / "corpus.json")
    with pytest.raises(ValueError, match=r"Nothing matches the pattern `.*\*.parquet`"):
        read(tmp_path / "*.parquet")
    (tmp_path / "gone.txt").symlink_to(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"gone.txt` cannot be read: No such file"):
        read(tmp_path / "gone.txt")
    (tmp_path / "x" / "y").mkdir(parents=True)
    with pytest.raises(ValueError, match="it is empty"):
        read(tmp_path / "x")
    (tmp_path / "x" / "a.bin").touch()
    with pytest.raises(ValueError, match="there are `.bin`"):
        read(tmp_path / "x")
    with pytest.raises(ValueError, match="a.bin` does not tell by its suffix"):
        read(tmp_path / "x" / "a.bin")


def test_corpus_refuses_options_that_no_file_uses(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(jsonl(TEXTS))
    (tmp_path / "a.txt").write_text(TEXTS[0])
    with pytest.raises(
        ValueError, match=r"`separator='--'` stands between .* are jsonl. Leave it out"
    ):
        read(tmp_path / "a.jsonl", separator="--")
    with pytest.raises(ValueError, match=r"`field='body'`: text files have no fields"):
        read(tmp_path / "a.txt", field="body")


BAD_LINES = {
    b"{": r"line 2: not JSON \(Expecting property name",
    b"[1]": "line 2: a list, where a JSON object was expected",
    b'{"txt": "a", "id": 1}': "line 2: no key `text`; there is `txt`, `id`",
    b'{"text": 3}': "line 2: `text` is a number, where text was expected",
    b'{"text": null}': "line 2: `text` is null, where text was expected",
    b'{"text": "\xff"}': r"line 2: not UTF-8 \(byte 0xff",
    b'{"text": "\\ud800"}': r"line 2: `\\ud800` is half of a character",
    b"[" * 100_000: r"line 2: not JSON \(",
    b'{"text": "cut o': r"line 2: not JSON \(Unterminated",
}


@pytest.mark.parametrize("line", BAD_LINES, ids=lambda line: line[:20])
def test_corpus_names_or_skips_bad_json_lines(tmp_path, line):
    path = tmp_path / "lines.jsonl"
    path.write_bytes(jsonl(["first"]) + line + b"\n" + jsonl(["third"]) + line)
    with pytest.raises(
        ValueError, match=f"lines.jsonl`, {BAD_LINES[line]}.*Fix it, or skip bad records"
    ):
        read(path)
    documents, reading = read(path, bad="skip")
    assert documents == ["first", "third"]
    (skipped,) = reading.skipped.values()
    assert (skipped.file, skipped.count) == (str(path), 2) and skipped.first.startswith("line 2: ")


def test_corpus_refuses_text_that_is_not_utf8(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"one\ntwo\xc3")
    with pytest.raises(ValueError, match=r"a.txt`, line 2: not UTF-8 \(byte 0xc3: unexpected end"):
        read(tmp_path / "a.txt")


def test_corpus_names_or_skips_bad_parquet(tmp_path):
    path = tmp_path / "t.parquet"
    raw = pa.array([b"fine", b"\xff", None, b"too"], pa.binary())
    column = pa.StringArray.from_buffers(4, raw.buffers()[1], raw.buffers()[2], raw.buffers()[0])
    pq.write_table(pa.table({"text": column, "n": [1, 2, 3, 4]}), path)
    with pytest.raises(ValueError, match=r"t.parquet`, row 1: not UTF-8"):
        read(path)
    documents, reading = read(path, bad="skip")
    assert documents == ["fine", "too"] and reading.skipped[path].count == 2
    with pytest.raises(ValueError, match=r"has no column `body`; it has `text`, `n`"):
        read(path, field="body")
    with pytest.raises(
        ValueError, match=r"column `n` of .*t.parquet` holds int64, where text was expected"
    ):
        read(path, field="n")
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ValueError, match=r"t.parquet` cannot be read as Parquet"):
        read(path)
    path.write_bytes(b"")
    with pytest.raises(ValueError, match=r"t.parquet` cannot be read as Parquet"):
        read(path)
    pq.write_table(pa.table({"text": pa.array([], pa.string())}), path)
    with pytest.raises(ValueError, match=r"t.parquet` is empty: it has no row"):
        read(path)


def test_corpus_names_or_skips_bad_array_records(tmp_path):
    path = tmp_path / "a.array_record"
    write_records(path, [b"fine", b"\xff", b"too"])
    with pytest.raises(ValueError, match=r"a.array_record`, record 1: not UTF-8"):
        read(path)
    assert read(path, bad="skip")[0] == ["fine", "too"]
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"a.array_record` cannot be read as ArrayRecord"):
        read(path)
    write_records(path, [os.urandom(100).hex().encode() for _ in range(2000)])
    damaged = bytearray(path.read_bytes())
    damaged[70_000] ^= 255
    path.write_bytes(damaged)
    with pytest.raises(ValueError, match=r"a.array_record`, record \d+: Corrupted"):
        read(path)
    documents, reading = read(path, bad="skip")
    assert (
        len(documents) + reading.skipped[path].count == 2000
        and 0 < reading.skipped[path].count < 100
    )


def test_corpus_refuses_truncated_compressed_files(tmp_path):
    content = jsonl([os.urandom(100).hex() for _ in range(500)])
    for suffix, packed in (
        (".gz", gzip.compress(content)),
        (".zst", pa.compress(content, "zstd", asbytes=True)),
    ):
        path = tmp_path / f"a.jsonl{suffix}"
        path.write_bytes(packed[: len(packed) // 2])
        with pytest.raises(ValueError, match=r"a.jsonl.*(cannot be read|not JSON)"):
            read(path)
        path.write_bytes(b"not compressed at all")
        with pytest.raises(ValueError, match=r"a.jsonl.* cannot be read"):
            read(path)


def test_corpus_names_empty_files(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b"\n")
    with pytest.raises(ValueError, match=r"a.jsonl` is empty: it has no line"):
        read(tmp_path / "a.jsonl")
    (tmp_path / "a.txt").touch()
    with pytest.raises(
        ValueError, match=r"a.txt` hold no document: 1 are empty and 0 were skipped"
    ):
        prepare(Corpus(tmp_path / "a.txt"), tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_corpus_names_a_missing_package(tmp_path, monkeypatch):
    (tmp_path / "a.parquet").touch()
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(
        ImportError, match=r'Parquet needs the package `pyarrow`.*pip install "shardlib\[data\]"'
    ):
        read(tmp_path / "a.parquet")


# Tokenizers


@pytest.fixture(scope="session")
def bpe(tmp_path_factory):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<s>", "<|endoftext|>"], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    tokenizer.train_from_iterator(TEXTS * 10, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    tokenizer.enable_truncation(5)
    path = tmp_path_factory.mktemp("bpe") / "tokenizer.json"
    tokenizer.save(str(path))
    return path


def test_tokenizer_from_hugging_face_round_trips_text(bpe, monkeypatch):
    tokenizer = load_tokenizer(str(bpe))
    assert (tokenizer.vocab, tokenizer.end) == (300, 1)
    assert tokenizer.vocab == load_tokenizer(str(bpe.parent)).vocab
    texts = [*TEXTS, "a document of <|endoftext|> and <s>"]
    encoded = tokenizer.encode_batch(texts)
    assert [tokenizer.decode(ids) for ids in encoded] == texts
    assert not any(np.isin(ids, (0, 1)).any() for ids in encoded)
    assert tokenizer.decode([*encoded[0], tokenizer.end, 10**6, -1]) == texts[0]
    monkeypatch.setattr("shardlib.data._tokenizer._PIECE", 6)
    monkeypatch.setattr("shardlib.data._tokenizer._TOGETHER", 20)
    assert [tokenizer.decode(ids) for ids in tokenizer.encode_batch(texts)] == texts
    assert load_tokenizer(str(bpe), "<s>").end == 0


def test_tokenizer_of_bytes_round_trips_text():
    tokenizer = load_tokenizer()
    encoded = tokenizer.encode_batch(TEXTS)
    assert [tokenizer.decode(ids) for ids in encoded] == TEXTS
    assert [bytes(ids.tolist()) for ids in encoded] == [text.encode() for text in TEXTS]


def test_tokenizer_loading_refuses_missing_or_unusable_files(tmp_path, bpe):
    with pytest.raises(ValueError, match="There is no tokenizer at `gpt2`"):
        load_tokenizer("gpt2")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="is not what the `tokenizers` package writes"):
        load_tokenizer(str(tmp_path))
    with pytest.raises(ValueError, match="`end='</s>'` is no token of .*: `<s>`, `<|endoftext|>`"):
        load_tokenizer(str(bpe), "</s>")
    told = json.loads(bpe.read_text().replace("<|endoftext|>", "[EOD]"))
    (tmp_path / "tokenizer.json").write_text(json.dumps(told))
    with pytest.raises(
        ValueError, match="does not tell which token ends a document: say `end=...`"
    ):
        load_tokenizer(str(tmp_path))
    with pytest.raises(ValueError, match="with bytes, 256 ends a document"):
        load_tokenizer("bytes", "</s>")
    with pytest.raises(
        ValueError,
        match=r"is learned from a corpus: `prepare\(Corpus\(..., tokenizer='bpe:300'\)\)",
    ):
        load_tokenizer("bpe:300")


CODE = "def be(self):\n    if not self:\n        return ['</s>', {k}]\n\n"


def test_tokenizer_is_learned_from_a_corpus_and_kept_with_its_tokens(tmp_path, monkeypatch):
    path = tmp_path / "code.jsonl"
    path.write_bytes(jsonl([CODE.format(k=k) * 3 for k in range(300)]))
    corpus = Corpus(path, tokenizer="bpe:330", held_out=0.2)
    prepared = prepare(corpus, tmp_path / "cache")
    tokenizer, train = prepared.tokenizer, prepared.train
    assert tokenizer.vocab == train.vocab == 330 and tokenizer.end == train.end == 0
    texts = documents_of(train, tokenizer)
    assert sum(len(text) for text in texts) == train.bytes > 3 * len(train)
    (ids,) = tokenizer.encode_batch(["self:\n        return"])
    assert [tokenizer.decode([id]) for id in ids] == ["self", ":\n        ", "return"]
    assert f"tokenizer learned from {train.documents} documents (" in str(prepared)
    # Its file makes the same tokens of any corpus.
    file = prepared.folder / "tokenizer.json"
    assert (
        prepare(dataclasses.replace(corpus, tokenizer=file), tmp_path).train.fingerprint
        == train.fingerprint
    )
    assert prepare(corpus, tmp_path / "again").train.fingerprint == train.fingerprint
    assert prepare(dataclasses.replace(corpus, end="<end>"), tmp_path).tokenizer.decode([0]) == ""
    # Nothing is learned from what is held out.
    path.write_bytes(jsonl(texts))
    assert (prepare(corpus, tmp_path).folder / "tokenizer.json").read_bytes() == file.read_bytes()
    # Of a corpus that is larger than what is learned from, it is a sample.
    monkeypatch.setattr(build_room, "_LEARN_BYTES", 10_000)
    os.utime(path, ns=(1, 1))
    sampled = prepare(corpus, tmp_path)
    assert 9_000 < sampled.learned_bytes <= 10_000 and sampled.learned_documents < train.documents
    assert [text.decode() in texts for text in build_room._sample(corpus, find_files(corpus))] == [
        True
    ] * (sampled.learned_documents)


def test_tokenizer_that_was_learned_and_lost_is_learned_again(tmp_path, capsys):
    (tmp_path / "a.txt").write_text(CODE * 20)
    corpus = Corpus(tmp_path / "a.txt", tokenizer="bpe:1000", held_out=0)
    prepared = prepare(corpus, tmp_path)
    assert 257 < prepared.train.vocab < 1000  # the text has no more
    (prepared.folder / "tokenizer.json").unlink()
    assert prepare(corpus, tmp_path).train.fingerprint == prepared.train.fingerprint
    assert "damaged, `tokenizer.json` is missing" in capsys.readouterr().err


# Stores


@pytest.fixture
def lines(tmp_path):
    path = tmp_path / "lines.jsonl"
    path.write_bytes(jsonl([f"{k} {TEXTS[k % 4]}" for k in range(3000)] + ["twice", "twice"]))
    return path


@pytest.fixture
def builds(monkeypatch):
    """How often a store was built."""
    counted, build = [], store_room.build
    monkeypatch.setattr(store_room, "build", lambda *args: (counted.append(1), build(*args)))
    return counted


def documents_of(tokens, tokenizer):
    starts = [0, *tokens.ends[:-1]]
    assert (tokens.ids[tokens.ends - 1] == tokens.end).all() if len(tokens) else True
    return [
        tokenizer.decode(tokens.ids[a : b - 1]) for a, b in zip(starts, tokens.ends, strict=True)
    ]


@pytest.mark.parametrize("name", ["bytes", "bpe"])
def test_token_cache_holds_every_document_once(tmp_path, lines, bpe, name):
    corpus = Corpus(lines, tokenizer="bytes" if name == "bytes" else bpe, held_out=0.1)
    prepared = prepare(corpus, tmp_path / "cache")
    texts = [json.loads(line)["text"] for line in lines.read_text().splitlines()]
    train, held_out = (
        documents_of(part, prepared.tokenizer) for part in (prepared.train, prepared.held_out)
    )
    assert sorted(train + held_out) == sorted(texts) and not set(train) & set(held_out)
    assert train == [text for text in texts if text in set(train)]  # in their order
    assert 0.07 < len(held_out) / len(texts) < 0.13
    assert prepared.train.bytes == sum(len(text.encode()) for text in train)
    assert (
        prepared.train.ids.dtype == np.uint16 and prepared.train.vocab == prepared.tokenizer.vocab
    )
    assert (
        isinstance(prepared.train.ids._all, np.memmap)
        and len(prepared.train.ids) == prepared.train.ends[-1]
    )
    # What is held out does not depend on what else is there, nor on the tokenizer.
    lines.write_bytes(jsonl(texts[1000:2000]))
    fewer = prepare(dataclasses.replace(corpus, tokenizer="bytes"), tmp_path / "cache")
    kept = documents_of(fewer.held_out, fewer.tokenizer)
    assert kept == [text for text in held_out if text in set(texts[1000:2000])]


def test_token_cache_description_lists_counts_and_skipped_records(tmp_path, capsys):
    (tmp_path / "a.jsonl").write_bytes(jsonl(["abc", "", "defgh"]) + b"{\n")
    prepared = prepare(Corpus(tmp_path / "a.jsonl", bad="skip", held_out=0), tmp_path / "cache")
    lines = str(prepared).splitlines()
    assert lines[0].startswith("1 file, 257 tokens in the vocabulary, in ")
    assert lines[2:5] == [
        "          documents  tokens  text  bytes a token",
        "train             2      10   8 B           0.80",
        "held out          0       0   0 B              -",
    ]
    assert lines[6] == "1 empty document left out"
    assert lines[7].endswith(
        "a.jsonl: 1 skipped, the first at line 4: not JSON (Expecting "
        "property name enclosed in double quotes: line 1 column 2 (char "
        "1))"
    )
    assert "1 skipped, the first at line 4" in capsys.readouterr().err
    assert str(prepare(prepared.corpus, tmp_path / "cache")) == str(prepared)


def test_token_cache_description_lists_files_left_out(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "b.json").write_text("{}")
    (tmp_path / "_SUCCESS").touch()
    prepared = prepare(Corpus(tmp_path, held_out=0), tmp_path / ".cache")
    assert prepared.left_out == (".json", "_SUCCESS") and prepared.files == 1
    assert str(prepared).endswith("files left out that end in .json, _SUCCESS")


def test_token_cache_build_shows_its_progress(tmp_path, lines, monkeypatch, capsys):
    monkeypatch.setattr("shardlib._progress._QUIET_SECONDS", 0)
    prepare(Corpus(lines), tmp_path / "cache")
    assert capsys.readouterr().err.startswith("shardlib.data: reading lines.jsonl (")
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    prepare(Corpus(lines, held_out=0), tmp_path / "cache")
    drawn = capsys.readouterr().err
    assert "░" in drawn and "% of" in drawn and drawn.endswith("\r\x1b[K")


def test_token_cache_is_built_once_per_corpus_and_options(
    tmp_path, lines, builds, bpe, monkeypatch
):
    cache, corpus = tmp_path / "cache", Corpus(lines)
    first, second = prepare(corpus, cache), prepare(corpus, cache)
    assert (
        len(builds) == 1
        and first.train.fingerprint == second.train.fingerprint != first.held_out.fingerprint
    )
    assert [path.name for path in cache.iterdir()] == [first.folder.name]
    monkeypatch.chdir(tmp_path)
    assert prepare(Corpus("lines.jsonl"), "cache").folder == first.folder and len(builds) == 1
    changes = [
        dict(held_out=0.5),
        dict(field="id", bad="skip"),
        dict(tokenizer=bpe),
        dict(tokenizer=bpe, end="<s>"),
    ]
    for count, change in enumerate(changes, 2):
        if "field" in change:
            with pytest.raises(ValueError, match="3002 were skipped"):
                prepare(dataclasses.replace(corpus, **change), cache)
        else:
            assert prepare(dataclasses.replace(corpus, **change), cache).folder != first.folder
        assert len(builds) == count
    os.utime(lines, ns=(1, 1))
    assert prepare(corpus, cache).train.fingerprint == first.train.fingerprint and len(builds) == 6


@pytest.mark.parametrize(
    ("name", "size"),
    [("train.ids", 1000), ("held_out.ends", 8), ("meta.json", 30), ("train.ends", None)],
)
def test_token_cache_with_truncated_or_missing_files_is_rebuilt(
    tmp_path, lines, builds, capsys, name, size
):
    corpus = Corpus(lines)
    whole = prepare(corpus, tmp_path)
    if size is None:
        (whole.folder / name).unlink()
    else:
        os.truncate(whole.folder / name, size)
    again = prepare(corpus, tmp_path)
    assert again.train.fingerprint == whole.train.fingerprint and len(builds) == 2
    assert f"damaged, `{name}`" in capsys.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} == {"lines.jsonl", whole.folder.name}


def test_token_cache_build_on_a_full_disk_leaves_nothing(tmp_path, lines, monkeypatch):
    def full(file, array):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(build_room, "_write", full)
    with pytest.raises(
        OSError, match=r"The disk of .*cache` is full; nothing is left.*2 bytes each"
    ):
        prepare(Corpus(lines), tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_token_cache_folder_that_cannot_be_created_is_refused(tmp_path, lines):
    with pytest.raises(ValueError, match="cannot be made .*name another"):
        prepare(Corpus(lines), lines / "cache")
    with pytest.raises(ValueError, match="`prepare` takes a `Corpus`"):
        prepare("lines.jsonl")


def test_token_cache_build_refuses_a_file_that_changes_meanwhile(tmp_path, lines, monkeypatch):
    write = build_room._write
    monkeypatch.setattr(
        build_room, "_write", lambda *args: (write(*args), os.utime(lines, ns=(1, 1)))
    )
    with pytest.raises(ValueError, match="lines.jsonl` changed while it was read"):
        prepare(Corpus(lines), tmp_path / "cache")


def test_token_cache_with_all_documents_held_out_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text("of one document all is held out")
    with pytest.raises(
        ValueError, match="leaves nothing to train on: of 1 documents all are held out"
    ):
        prepare(Corpus(tmp_path / "a.txt", held_out=0.999999999), tmp_path)


SLOW_BUILD = """
import os, sys, time
from shardlib.data import Corpus, prepare
from shardlib import _lock
from shardlib.data import _store
_lock.BEAT_SECONDS = 0.1
build = _store.build
def slow(*args):
    build(*args)
    open(sys.argv[3], "a").write("built ")
    while os.path.getsize(sys.argv[3] + ".begun") < int(sys.argv[4]):
        time.sleep(0.05)
    time.sleep(5)  # in which the others come to wait
_store.build = slow
open(sys.argv[3] + ".begun", "a").write(".")
print(prepare(Corpus(sys.argv[1]), sys.argv[2]).train.fingerprint)
"""


def start(lines, cache, count, others):
    """A process that builds, or waits for who does; it has not built before as many have begun."""
    # The thread that beats must not be told from a main thread that works.
    return subprocess.Popen(
        [
            sys.executable,
            "-W",
            "error",
            "-c",
            SLOW_BUILD,
            str(lines),
            str(cache),
            str(count),
            str(others),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )


def until(condition):
    for _ in range(600):
        if condition():
            return
        time.sleep(0.05)
    raise AssertionError("waited for long")


@pytest.mark.long
def test_token_cache_is_built_by_only_one_of_several_processes(tmp_path, lines):
    cache, count = tmp_path / "cache", tmp_path / "count"
    processes = [start(lines, cache, count, 3) for _ in range(3)]
    results = [process.communicate(timeout=60) for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0], results
    assert len({out for out, _ in results}) == 1
    assert count.read_text() == "built "
    assert sum("waiting for process" in err for _, err in results) == 2
    assert len(list(cache.iterdir())) == 1


@pytest.mark.long
def test_token_cache_is_taken_over_from_a_killed_builder(tmp_path, lines, capsys):
    cache, count = tmp_path / "cache", tmp_path / "count"
    process = start(lines, cache, count, 2)
    until(count.exists)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert len(list(cache.iterdir())) == 2  # its lock, and what it had built
    prepared = prepare(Corpus(lines), cache)
    assert "is dead; taking over" in capsys.readouterr().err
    assert [path.name for path in cache.iterdir()] == [prepared.folder.name]


def test_token_cache_is_taken_over_from_a_silent_builder_elsewhere(
    tmp_path, lines, capsys, monkeypatch
):
    monkeypatch.setattr(claim_room, "_DEAD_SECONDS", 0.5)
    corpus = Corpus(lines)
    folder = tmp_path / "cache" / store_room._key(corpus, find_files(corpus))
    folder.parent.mkdir()
    for content in ('{"host": "elsewhere", "process": 1, "nonce": "aa"}', ""):
        folder.with_suffix(".lock").write_text(content)
        folder.with_suffix(".aa.partial").mkdir(exist_ok=True)
        os.utime(folder.with_suffix(".lock"), (2**32, 2**32))  # by a clock that is wrong
        prepared = prepare(corpus, tmp_path / "cache")
        assert "taking over" in capsys.readouterr().err
        folder.with_suffix(".aa.partial").is_dir() and folder.with_suffix(".aa.partial").rmdir()
        assert [path.name for path in folder.parent.iterdir()] == [prepared.folder.name]
        for path in (*folder.iterdir(), folder):
            path.rmdir() if path.is_dir() else path.unlink()


def test_a_lock_in_the_token_cache_that_cannot_be_removed_is_named(tmp_path, lines, monkeypatch):
    """As in a shared folder, where only owners may remove what is theirs."""
    monkeypatch.setattr(claim_room, "_DEAD_SECONDS", 0.2)
    corpus = Corpus(lines)
    folder = tmp_path / "cache" / store_room._key(corpus, find_files(corpus))
    folder.parent.mkdir()
    lock = folder.with_suffix(".lock")
    lock.write_text('{"host": "elsewhere", "process": 7, "nonce": "aa"}')

    def refused(path, target):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(Path, "rename", refused)
    with pytest.raises(ValueError, match=f"(?s)has left its lock {lock}.*may remove it; or use"):
        prepare(corpus, tmp_path / "cache")
    assert lock.exists()


def test_token_cache_of_a_slow_builder_that_was_overtaken_is_shared(
    tmp_path, lines, builds, monkeypatch
):
    """It was taken for dead: the other's store stands, and both are given it."""
    corpus, build, nested = Corpus(lines), store_room.build, []

    def overtaken(corpus, sources, scratch):
        build(corpus, sources, scratch)
        if not nested:
            nested.append(True)
            scratch.with_suffix("").with_suffix(".lock").unlink()
            nested.append(prepare(corpus, tmp_path / "cache"))

    monkeypatch.setattr(store_room, "build", overtaken)
    prepared = prepare(corpus, tmp_path / "cache")
    assert (
        prepared.folder == nested[1].folder
        and prepared.train.fingerprint == nested[1].train.fingerprint
    )
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [prepared.folder.name]


# Examples


def slow_segments(tokens, start, stop):
    document = [
        k
        for k, (a, b) in enumerate(zip([0, *tokens.ends[:-1]], tokens.ends, strict=True))
        for _ in range(b - a)
    ]
    of_window = document[start:stop]
    return [d - of_window[0] for d in of_window]


lengths_of_documents = st.lists(st.integers(2, 40), min_size=1, max_size=30)


@settings(max_examples=60, deadline=None)
@given(lengths_of_documents, st.integers(1, 50))
def test_sequences_cut_consecutive_windows_from_the_documents(lengths, length):
    tokens = tokens_of(*lengths)
    if len(tokens) <= length:
        with pytest.raises(ValueError, match=r"needs \d+ tokens for one example, and there are"):
            Sequences(tokens, length, batch=1)
        return
    sequences = Sequences(tokens, length, batch=1, seed=None)
    examples = sequences.examples(range(len(sequences)))
    used = len(sequences) * length
    assert len(tokens) - 1 - used < length
    assert examples["tokens"][:, :-1].ravel().tolist() == tokens.ids[:used].tolist()
    assert examples["tokens"][:, -1].tolist() == tokens.ids[length : used + 1 : length].tolist()
    for k, (segments, mask) in enumerate(
        zip(examples["segments"].tolist(), examples["mask"].tolist(), strict=True)
    ):
        assert segments == slow_segments(tokens, k * length, (k + 1) * length + 1)
        assert mask == [float(a == b) for a, b in itertools.pairwise(segments)]


@settings(max_examples=60, deadline=None)
@given(lengths_of_documents, st.integers(1, 50))
def test_sequences_pack_whole_documents_in_order(lengths, length):
    """Against the obvious: take documents in order, begin a new example where the next does not
    fit.
    """
    tokens = tokens_of(*lengths)
    expected, room = [], 0
    for document, (a, b) in enumerate(zip([0, *tokens.ends[:-1]], tokens.ends, strict=True)):
        for start in range(a, max(b - 1, a + 1), length):
            part = [(int(id), document) for id in tokens.ids[start : min(start + length + 1, b)]]
            if len(part) > room:
                expected.append([])
                room = length + 1
            expected[-1] += part
            room -= len(part)
    sequences = Sequences(tokens, length, batch=1, seed=None, documents="whole")
    examples = sequences.examples(range(len(sequences)))
    assert len(sequences) == len(expected)
    for k, example in enumerate(expected):
        padding = length + 1 - len(example)
        segments = [d - example[0][1] for _, d in example] + [-1] * padding
        assert examples["tokens"][k].tolist() == [id for id, _ in example] + [tokens.end] * padding
        assert examples["segments"][k].tolist() == segments
        assert examples["mask"][k].tolist() == [
            float(a == b >= 0) for a, b in itertools.pairwise(segments)
        ]
    # Every token but the first of each document is a target once.
    assert examples["mask"].sum() == len(tokens) - len(lengths)


def test_sequences_shuffle_every_epoch_differently():
    tokens = tokens_of(*[7] * 40)
    orders = {}
    for seed in (0, 1):
        sequences = Sequences(tokens, 5, batch=4, seed=seed)
        count = len(sequences)
        for epoch in range(3):
            order = sequences._indices(np.arange(count) + epoch * count).tolist()
            assert sorted(order) == list(range(count))
            orders[seed, epoch] = tuple(order)
    assert len(set(orders.values())) == 6
    in_order = Sequences(tokens, 5, batch=4, seed=None)
    assert in_order._indices(np.arange(2 * count)).tolist() == [*range(count), *range(count)]


def test_sequences_order_never_changes_between_versions():
    """A run that goes on with another version of grain, or of this, must find its place."""
    assert (
        Sequences(tokens_of(*[7] * 10), 5, batch=1, seed=3)._indices(np.arange(20)).tolist()
        == FOREVER
    )


FOREVER = [5, 9, 8, 10, 12, 7, 0, 4, 11, 3, 6, 2, 1, 4, 11, 9, 1, 3, 7, 10]


def same(a, b):
    return a.keys() == b.keys() and all((a[name] == b[name]).all() for name in a)


def batch_of(readers, steps):
    batches = [[next(reader) for _ in range(steps)] for reader in readers]
    return [
        {k: np.concatenate([b[step][k] for b in batches]) for k in batches[0][0]}
        for step in range(steps)
    ]


@pytest.mark.parametrize("documents", ["cut", "whole"])
def test_sequences_shares_of_processes_make_up_the_batch(documents):
    sequences = Sequences(tokens_of(*range(3, 60)), 16, batch=8, seed=5, documents=documents)
    steps = 2 * len(sequences) // 8 + 1  # past two epochs
    reader = sequences.local()
    whole = [next(reader) for _ in range(steps)]
    reader.close()
    for k, batch in enumerate(whole):
        assert same(batch, sequences.examples(np.arange(8 * k, 8 * k + 8)))
        assert [(name, one.shape, one.dtype) for name, one in batch.items()] == [
            ("tokens", (8, 17), np.int32),
            ("segments", (8, 17), np.int32),
            ("mask", (8, 16), np.float32),
        ]
    for shares in (2, 4, 8):
        readers = [
            sequences.local(slice(8 // shares * k, 8 // shares * (k + 1))) for k in range(shares)
        ]
        assert all(map(same, batch_of(readers, steps), whole))
        for reader in readers:
            reader.close()
    scattered = sequences.local(np.array([5, 2]), threads=0, ahead=0)
    assert all((next(scattered)["tokens"] == batch["tokens"][[5, 2]]).all() for batch in whole)


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 8), st.integers(0, 9), st.integers(1, 8), st.data())
def test_sequences_resume_from_a_saved_state_at_any_batch_size(batch, steps, other_batch, data):
    tokens = tokens_of(*range(3, 40))
    first = Sequences(tokens, 16, batch=batch, seed=1)
    rows = data.draw(st.lists(st.integers(0, batch - 1), max_size=4).map(np.array).filter(len))
    reader = first.local(rows)
    for _ in range(steps):
        next(reader)
    state = json.loads(json.dumps(reader.get_state()))
    rest = [next(reader) for _ in range(5)]
    assert state["examples"] == steps * batch
    reader.set_state(state)
    assert all(map(same, rest, [next(reader) for _ in range(5)]))
    reader.close()
    assert reader.get_state()["examples"] == (steps + 5) * batch
    reader.close()
    other = Sequences(tokens, 16, batch=other_batch, seed=1).local(threads=1, ahead=2)
    other.set_state(state)
    for step in range(5):
        positions = steps * batch + step * other_batch + np.arange(other_batch)
        assert same(next(other), first.examples(positions))
    other.close()


def test_sequences_refuse_a_saved_state_of_other_data():
    sequences = Sequences(tokens_of(*[9] * 20), 8, batch=2)
    state = sequences.local().get_state()
    for other in (dataclasses.replace(sequences, seed=1), dataclasses.replace(sequences, length=4),
                  dataclasses.replace(sequences, tokens=tokens_of(*[9] * 21)),
                  dataclasses.replace(sequences, documents="whole")):  # fmt: skip
        reader = other.local()
        with pytest.raises(
            ValueError,
            match=r"a place in other data: `\w+` was .* and is .*set_state\(\{\"examples\": 0\}\)",
        ):
            reader.set_state(state)
        reader.set_state({"examples": 4})
        assert same(next(reader), other.examples([4, 5]))
        reader.close()
    for bad in ({}, {"examples": -1}, {"examples": "3"}, {"examples": True}):
        with pytest.raises(ValueError, match="tells how many `examples`"):
            sequences.local().set_state(bad)


@pytest.mark.parametrize("documents", ["cut", "whole"])
@pytest.mark.parametrize("seed", [None, 2])
def test_sequences_once_yields_every_example_exactly_once(documents, seed):
    sequences = Sequences(tokens_of(*range(3, 30)), 16, batch=8, seed=seed, documents=documents)
    batches = list(sequences.once())
    assert len(batches) == sequences.steps and len(sequences) % 8
    assert {batch["tokens"].shape for batch in batches} == {(8, 17)}
    joined = {name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]}
    count = len(sequences)
    assert same(
        {name: one[:count] for name, one in joined.items()}, sequences.examples(range(count))
    )
    assert not joined["mask"][count:].any() and (joined["segments"][count:] == -1).all()
    halves = [list(sequences.once(slice(start, None, 2))) for start in (0, 1)]
    assert all(
        (half["tokens"] == batch["tokens"][k::2]).all()
        for k in (0, 1)
        for half, batch in zip(halves[k], batches, strict=True)
    )
    few = dataclasses.replace(sequences, batch=1000)
    (batch,) = few.once()
    assert batch["mask"].sum() == joined["mask"].sum()


def test_sequences_refuse_wrong_arguments(tmp_path):
    tokens = tokens_of(*[10] * 10)
    for change, message in [
        (dict(length=0), r"length=0\)` must be a whole number from 1 up"),
        (dict(batch=2.0), r"batch=2.0\)` must be a whole number"),
        (dict(seed="a"), "is a whole number, or None"),
        (dict(documents="half"), "choose 'cut' or 'whole'"),
        (dict(tokens="a"), "`Sequences` are of `Tokens`"),
        (
            dict(length=100),
            "needs 101 tokens for one example, and there are 100 of 10 documents. A "
            "length up to 99",
        ),
        (
            dict(tokens=Tokens(np.empty(0, "<u2"), np.empty(0, "<i8"), 257, 256, 0)),
            "0 of 0 documents.*held out is told",
        ),
    ]:
        with pytest.raises(ValueError, match=message):
            Sequences(**{"tokens": tokens, "length": 9, "batch": 2, **change})
    few = Sequences(tokens, 30, batch=9)
    with pytest.raises(
        ValueError,
        match="more than the 3 examples of length 30 .* a batch up to 3, a length up to 11, or",
    ):
        few.local()
    for rows in ([9], [-1], [0.5], 3, [True]):
        with pytest.raises(ValueError, match="numbers from 0 to 8, of the 9 rows"):
            few.once(rows).__next__()
    with pytest.raises(ValueError, match="`local.threads=-1.` must be"):
        Sequences(tokens, 9, batch=2).local(threads=-1)


def test_sequences_raise_errors_from_reading_ahead(tmp_path, monkeypatch):
    reader = Sequences(tokens_of(*[10] * 10), 9, batch=2).local()

    def broken(*_):
        raise OSError("the disk is gone")

    monkeypatch.setattr(Sequences, "_read", broken)
    with pytest.raises(OSError, match="the disk is gone"):
        next(reader)
    reader.close()


def test_bits_per_byte_follow_from_the_loss_and_the_text_size():
    assert Tokens(np.zeros(10, np.uint16), np.array([10]), 257, 256, bytes=5).bits_per_byte(
        np.log(2)
    ) == pytest.approx(2)


@pytest.mark.long
def test_data_package_loads_grain_and_pyarrow_only_when_needed():
    code = (
        "import sys; import shardlib.data._sequences; print('grain' in sys.modules, 'pyarrow' in "
        "sys.modules)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert result.stdout.strip() == "False False"


# Digests


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks so small that a small store has many."""
    for room in (blocks_room, build_room, store_room):
        monkeypatch.setattr(room, "BLOCK_BYTES", 512)


@pytest.fixture
def learned(tmp_path, small_blocks):
    """A store with every kind of file: tokens, ends and digests of both parts, what is told of
    them, a tokenizer.
    """
    path = tmp_path / "lines.jsonl"
    path.write_bytes(jsonl([f"{k} {TEXTS[k % 3]}" for k in range(150)]))
    return prepare(Corpus(path, tokenizer="bpe:300", held_out=0.3), tmp_path / "cache")


STORE = [
    "held_out.crc32",
    "held_out.ends",
    "held_out.ids",
    "meta.json",
    "sha256sums",
    "tokenizer.json",
    "train.crc32",
]
STORE += ["train.ends", "train.ids"]


def all_of(prepared):
    parts = (prepared.train, prepared.held_out)
    return [np.asarray(array).tolist() for part in parts for array in (part.ids, part.ends)]


def flip(path, bit):
    raw = bytearray(path.read_bytes())
    raw[bit // 8] ^= 1 << bit % 8
    path.write_bytes(raw)


@pytest.mark.parametrize("name", STORE)
def test_token_cache_notices_every_bit_flip(learned, name):
    assert sorted(path.name for path in learned.folder.iterdir()) == STORE
    path, generator = learned.folder / name, np.random.default_rng(STORE.index(name))
    whole, expected = path.read_bytes(), all_of(learned)
    for bit in generator.integers(0, 8 * len(whole), 40).tolist():
        flip(path, bit)
        opened = store_room._open(learned.folder, learned.corpus)
        if name.endswith(".ids"):
            byte = bit // 8
            first = byte // 512 * 512
            where = f"block {byte // 512} of .*bytes {first} to {min(first + 512, len(whole))}"
            with pytest.raises(
                ValueError, match=rf"{name}` is damaged: {where}.*Run again.*from a copy"
            ):
                all_of(opened)
            (learned.folder / "suspect").unlink()
        else:
            # A digest that differs from its file may be either's fault.
            called = r"[\w.]+" if name == "sha256sums" else name
            assert re.fullmatch(f"`{called}` is not as it was written", str(opened))
        path.write_bytes(whole)
    assert all_of(store_room._open(learned.folder, learned.corpus)) == expected


@pytest.mark.parametrize("name", STORE)
@pytest.mark.parametrize("damage", ["flipped", "longer", "shorter", "zeros", "swapped", "gone"])
def test_token_cache_damaged_in_any_way_is_rebuilt(learned, name, damage, builds, capsys):
    path, content = learned.folder / name, (learned.folder / name).read_bytes()
    half, expected = len(content) // 2, all_of(learned)
    damaged = {
        "longer": content + b"\0\0", "shorter": content[:-2], "zeros": bytes(half) + content[half:],
        "swapped": content[half : 2 * half] + content[:half] + content[2 * half :],
    }  # fmt: skip
    if damage == "gone":
        path.unlink()
    elif damage == "flipped":
        flip(path, 8 * half)
    else:
        path.write_bytes(damaged[damage])
    if name.endswith(".ids") and damage in ("flipped", "zeros", "swapped"):
        with pytest.raises(ValueError, match=f"{name}` is damaged: block"):
            all_of(prepare(learned.corpus, learned.folder.parent))
    again = prepare(learned.corpus, learned.folder.parent)
    assert len(builds) == 1 and "it is made anew" in capsys.readouterr().err
    assert all_of(again) == expected and again.train.fingerprint == learned.train.fingerprint
    assert [one.name for one in learned.folder.parent.iterdir()] == [learned.folder.name]


def test_token_cache_checks_each_block_once_and_keeps_others_readable(learned, monkeypatch, builds):
    expected, read, pread = np.asarray(learned.train.ids).tolist(), [], os.pread
    monkeypatch.setattr(
        os, "pread", lambda file, size, at: (read.append(at), pread(file, size, at))[1]
    )
    flip(learned.folder / "train.ids", 8 * 512)
    ids = prepare(learned.corpus, learned.folder.parent).train.ids
    for _ in range(2):
        assert (
            ids[0] == expected[0]
            and ids[:256].tolist() == expected[:256]
            and ids[[255, 3]].tolist() == expected[255::-252]
        )
        assert ids[-1] == expected[-1] and ids[2 * 256 :].tolist() == expected[2 * 256 :]
    assert sorted(read) == [start for start in range(0, ids.nbytes, 512) if start != 512], (
        "each block once"
    )
    for index in (
        slice(200, 300),
        256,
        [1, 511],
        slice(300, 100, -1),
        slice(None),
        np.arange(ids.size) == 300,
    ):
        with pytest.raises(
            ValueError, match=r"block 1 of \d+ of `train.ids` \(bytes 512 to 1024\)"
        ):
            ids[index]
    # It was only one machine's memory: nothing is made again, and the mark is gone.
    flip(learned.folder / "train.ids", 8 * 512)
    assert prepare(learned.corpus, learned.folder.parent).train.fingerprint and not builds
    assert not (learned.folder / "suspect").exists()
    assert ids[200:300].tolist() == expected[200:300]


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 40), st.sampled_from(["<u2", "<u4", "<i8"]), st.data())
def test_checked_array_is_indexed_like_a_numpy_array(size, dtype, data):
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks_room, "BLOCK_BYTES", 16)
        truth = np.arange(size, dtype=dtype) * 3
        path, digests = Path(folder, "a"), blocks_room.Digests()
        path.write_bytes(truth.tobytes())
        cuts = sorted(data.draw(st.lists(st.integers(0, truth.nbytes), max_size=4)))
        for start, stop in itertools.pairwise([0, *cuts, truth.nbytes]):
            digests.update(truth.tobytes()[start:stop])
        array = blocks_room.CheckedArray(path, dtype, digests.finish())
        array = pickle.loads(pickle.dumps(array)) if data.draw(st.booleans()) else array
        ends = st.none() | st.integers(-50, 50)
        index = slice(
            data.draw(ends), data.draw(ends), data.draw(st.none() | st.sampled_from([1, 2, -1, -3]))
        )
        assert array[index].tolist() == truth[index].tolist()
        if size:
            numbers = data.draw(st.lists(st.integers(-size, size - 1), min_size=1, max_size=5))
            assert (
                array[numbers].tolist() == truth[numbers].tolist()
                and array[numbers[0]] == truth[numbers[0]]
            )
            for kind in (np.int8, np.int32, np.uint8, np.uint64):
                some = np.array([abs(number) % size for number in numbers]).astype(kind)
                assert array[some].tolist() == truth[some].tolist()
            starts = np.array([abs(number) % size for number in numbers])
            width = data.draw(st.integers(1, 12))
            assert (
                blocks_room.windows(array, starts, width).tolist()
                == blocks_room.windows(truth, starts, width).tolist()
            )
        assert (
            array.shape == truth.shape
            and array.dtype == truth.dtype
            and np.array_equal(array, truth)
        )
        assert (
            (array == truth).all()
            and (array + 1).tolist() == (truth + 1).tolist()
            and list(array) == list(truth)
        )
        for wrong in (size, -size - 1):
            with pytest.raises(IndexError, match="has no element"):
                array[wrong]


def test_token_cache_damage_is_raised_from_threads_and_after_pickling(learned):
    flip(learned.folder / "train.ids", 8 * 700)
    train = prepare(learned.corpus, learned.folder.parent).train
    for tokens in (train, pickle.loads(pickle.dumps(train))):
        reader = Sequences(tokens, 64, batch=8, seed=0).local(threads=4, ahead=8)
        with pytest.raises(ValueError, match=r"train.ids` is damaged: block 1 of"):
            for _ in range(200):
                next(reader)
        reader.close()


def test_token_cache_reads_from_many_threads_are_right(learned):
    expected = np.asarray(learned.train.ids)
    for _ in range(5):
        ids = prepare(learned.corpus, learned.folder.parent).train.ids
        starts = np.random.default_rng(0).integers(0, len(expected) - 99, (32, 4))
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            found = list(
                pool.map(blocks_room.windows, itertools.repeat(ids), starts, itertools.repeat(99))
            )
        for some, rows in zip(starts, found, strict=True):
            assert rows.tolist() == [expected[start : start + 99].tolist() for start in some]


def test_token_cache_damage_that_cannot_be_marked_asks_to_delete_it(learned, monkeypatch):
    flip(learned.folder / "train.ids", 0)
    monkeypatch.setattr(blocks_room, "SUSPECT", "no/such/folder")
    with pytest.raises(ValueError, match=rf"Delete `{learned.folder}` and run again"):
        np.asarray(prepare(learned.corpus, learned.folder.parent).train.ids)


def test_token_cache_names_the_file_of_a_disk_read_error(learned, monkeypatch):
    def failing(*_):
        raise OSError(errno.EIO, "Input/output error")

    ids = prepare(learned.corpus, learned.folder.parent).train.ids
    monkeypatch.setattr(os, "pread", failing)
    with pytest.raises(
        ValueError, match=r"train.ids`: block 0 of .* cannot be read: Input/output error"
    ):
        ids[:3]


def test_token_cache_without_digests_is_rebuilt(learned, builds):
    for path in learned.folder.glob("*sums"):
        path.unlink()
    assert (
        prepare(learned.corpus, learned.folder.parent).train.fingerprint
        == learned.train.fingerprint
    )
    assert len(builds) == 1


def test_token_cache_refuses_a_tokenizer_file_that_changed(tmp_path, bpe, lines, monkeypatch):
    file = tmp_path / "tokenizer.json"
    file.write_bytes(bpe.read_bytes())
    prepared = prepare(Corpus(lines, tokenizer=file), tmp_path / "cache")
    file.write_bytes(bpe.read_bytes() + b"\n")
    with pytest.raises(
        ValueError,
        match=r"tokenizer.json` is not the tokenizer that the tokens in .* were made with",
    ):
        _ = prepared.tokenizer
    other = prepare(prepared.corpus, tmp_path / "cache")
    assert other.folder != prepared.folder and other.tokenizer.vocab == 300
    build = store_room.build
    monkeypatch.setattr(
        store_room,
        "build",
        lambda *args: (file.write_bytes(bpe.read_bytes() + b"\n\n"), build(*args)),
    )
    with pytest.raises(ValueError, match=r"tokenizer.json` changed while it was used"):
        prepare(dataclasses.replace(prepared.corpus, held_out=0.5), tmp_path / "cache")


def test_token_cache_does_not_follow_planted_links_and_pipes(learned, tmp_path, builds, capsys):
    cache, folder = learned.folder.parent, learned.folder
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "kept").write_text("mine")
    expected = all_of(learned)

    def is_made_again(count):
        assert all_of(prepare(learned.corpus, cache)) == expected and len(builds) == count
        assert [one.name for one in cache.iterdir()] == [folder.name] and not folder.is_symlink()
        assert [one.name for one in elsewhere.iterdir()] == ["kept"]

    for count, name in enumerate(("train.ids", "meta.json", "sha256sums", "train.crc32"), 1):
        (folder / name).unlink()
        (folder / name).symlink_to(elsewhere / "kept")
        is_made_again(count)
    (folder / "meta.json").unlink()
    os.mkfifo(folder / "meta.json")  # opened, it would wait
    is_made_again(5)
    for count, target in enumerate((elsewhere, tmp_path / "nowhere"), 6):
        shutil.rmtree(folder)
        folder.symlink_to(target)
        is_made_again(count)
    shutil.rmtree(folder)
    folder.write_text("a file")
    is_made_again(8)
    assert "it is no folder" in capsys.readouterr().err
    lock = folder.with_suffix(".lock")
    shutil.rmtree(folder)
    for plant in (
        lambda: lock.symlink_to(tmp_path / "nowhere"),
        lambda: os.mkfifo(lock),
        lock.mkdir,
    ):
        plant()
        with pytest.raises(ValueError, match=r".lock` is no file, and no lock of ours: remove it"):
            prepare(learned.corpus, cache)
        lock.rmdir() if lock.is_dir() else lock.unlink()


# Ids and the vocabulary


@pytest.mark.parametrize("documents", ["cut", "whole"])
@pytest.mark.parametrize("wrong", [10, 40_000, -1])
def test_sequences_refuse_ids_beyond_the_vocabulary(documents, wrong):
    ids = np.array([1, 2, 3, 0] * 8, np.int32)
    tokens = Tokens(ids, np.arange(4, 33, 4), vocab=10, end=0, bytes=24)
    sequences = Sequences(tokens, 4, batch=2, seed=None, documents=documents)
    ids[17] = wrong
    assert sequences.examples([0, 1])["tokens"].max() == 3
    with pytest.raises(
        ValueError,
        match=rf"vocab=10\)` have ids from .*{wrong}.* in these examples, and ids are from 0 to 9",
    ):
        sequences.examples(range(len(sequences)))
    with pytest.raises(ValueError, match="from 0 to 9"):
        list(sequences.once())


def test_token_cache_refuses_a_tokenizer_with_ids_beyond_its_vocabulary(
    tmp_path, lines, bpe, monkeypatch
):
    made = tokens_room.make_tokenizer
    monkeypatch.setattr(
        tokens_room, "make_tokenizer", lambda *args: dataclasses.replace(made(*args), vocab=100)
    )
    with pytest.raises(ValueError, match=r"gave the id \d+, and its vocabulary has 100 tokens"):
        prepare(Corpus(lines, tokenizer=bpe), tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_tokens_check_that_the_model_embeds_every_id():
    tokens = tokens_of(4, 4, vocab=300)
    for enough in (300, 512, np.int64(301)):
        tokens.check_vocab(enough)
    for few in (299, 1, np.int32(257)):
        with pytest.raises(
            ValueError,
            match=rf"ids below 300, and the model has {few} embeddings: it needs 300 or more",
        ):
            tokens.check_vocab(few)


def test_trainer_refuses_too_few_embeddings_and_prompts_without_tokens(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(jsonl(["bad", "cab"]))
    file = save_tokenizer(tmp_path / "tokenizer.json", bpe_of())
    prepared = prepare(Corpus(tmp_path / "a.jsonl", tokenizer=file, held_out=0), tmp_path / "cache")
    for vocab, prompt, message in (
        (
            prepared.train.vocab - 1,
            "bad",
            rf"has {len(LETTERS) + 1} tokens, and `model.vocab` is {len(LETTERS)}",
        ),
        (prepared.train.vocab, "bad ü", r"`--prompt`: .* has no token for 'ü' \(1 times\)"),
    ):
        chosen = [
            "tiny",
            "--data.tokenizer",
            str(file),
            "--model.vocab",
            str(vocab),
            "--prompt",
            prompt,
        ]
        with pytest.raises(SystemExit, match=message):
            train_lm.check_tokens(from_command_line(chosen), prepared)
    train_lm.check_tokens(from_command_line([*chosen[:-1], "bad"]), prepared)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            dict(ids=[1, 2]),
            r"`Tokens\(ids=\[1, 2\]\)` must be a numpy array of whole numbers, of one dim",
        ),
        (dict(ids=np.zeros(4)), "must be a numpy array of whole numbers"),
        (dict(ids=np.zeros((2, 2), int)), "of one dim"),
        (dict(ends=np.array([4.0])), "must be a numpy array of whole numbers"),
        (dict(ends=np.array([3])), "the last is the number of tokens, 4; got"),
        (dict(ends=np.array([2, 2, 4])), "each beyond the one before"),
        (dict(ends=np.array([0, 4])), "each beyond the one before"),
        (dict(vocab=0), r"vocab=0\)` must be a whole number from 1 up"),
        (dict(end=10), r"end=10\)` must be a whole number from 0 up to 9"),
        (dict(bytes=-1), r"bytes=-1\)` must be a whole number from 0 up"),
        (dict(fingerprint=None), r"fingerprint=None\)` is a text"),
    ],
)
def test_tokens_refuse_wrong_arguments(change, message):
    given = {
        "ids": np.array([1, 2, 3, 0]),
        "ends": np.array([4]),
        "vocab": 10,
        "end": 0,
        "bytes": 3,
        **change,
    }
    with pytest.raises(ValueError, match=message):
        Tokens(**given)


# Characters that a tokenizer lacks


def save_tokenizer(path, model, **parts):
    from tokenizers import AddedToken, Tokenizer

    tokenizer = Tokenizer(model)
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    tokenizer.add_special_tokens([AddedToken("</s>", special=True)])
    tokenizer.save(str(path))
    return path


LETTERS = {letter: number for number, letter in enumerate("abcde <")}


def bpe_of(letters=None, merges=(), **options):
    from tokenizers import models

    return models.BPE(vocab=dict(letters or LETTERS), merges=list(merges), **options)


def lacking_tokenizers():
    """Models that would leave characters out or fail, by what they are; and what each says of
    `bad faces, ü`.
    """
    from tokenizers import models, normalizers, pre_tokenizers

    words = pre_tokenizers.Whitespace()
    suffixed = {
        **{f"{letter}</w>": number for number, letter in enumerate("abcdefs")},
        "a": 7,
        "b": 8,
        "c": 9,
        "e": 10,
    }
    half_of_bytes = {f"<0x{byte:02X}>": byte for byte in range(128)}
    marks = pre_tokenizers.ByteLevel(add_prefix_space=False)
    few_marks = {mark: number for number, mark in enumerate(sorted(marks.alphabet())[:150])}
    return {
        "letters": (bpe_of(), {}),
        "words": (bpe_of(), {"pre_tokenizer": words}),
        "decomposed": (
            bpe_of({letter: k for k, letter in enumerate("abcdefsu ,")}),
            {"normalizer": normalizers.NFD()},
        ),
        "suffixed": (bpe_of(suffixed, end_of_word_suffix="</w>"), {"pre_tokenizer": words}),
        "half the bytes": (bpe_of(half_of_bytes, byte_fallback=True), {}),
        "few marks": (bpe_of(few_marks), {"pre_tokenizer": marks}),
        "whole words": (models.WordLevel({"bad": 0}), {"pre_tokenizer": words}),
        "pieces": (models.Unigram([(letter, -1.0) for letter in "abcde "]), {}),
    }


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "letters",
            r"no token for .*'ü' \(1 times\).*would leave out 4 of the 12 characters of the 1 text",
        ),
        ("words", r"no token for .*'ü' \(1 times\).*would leave out 4 of the 12"),
        ("decomposed", r"no token for '̈' \(1 times\).*would leave out 1 of the 13"),
        ("suffixed", r"no token for .*'f' .*would leave out"),
        ("half the bytes", r"no token for 'ü' \(1 times\).*would leave out 1 of the 12"),
        ("few marks", "would leave out"),
        ("whole words", "cannot encode the texts: .*UNK"),
        ("pieces", "cannot encode the texts: .*unk_id"),
    ],
)
def test_tokenizer_that_lacks_characters_of_the_text_is_refused(tmp_path, name, message):
    model, parts = lacking_tokenizers()[name]
    file = save_tokenizer(tmp_path / "tokenizer.json", model, **parts)
    (tmp_path / "a.jsonl").write_bytes(
        jsonl(
            ["bad", "bad faces, ü"][name != "letters" :] if name != "letters" else ["bad faces, ü"]
        )
    )
    corpus = Corpus(tmp_path / "a.jsonl", tokenizer=file, held_out=0)
    with pytest.raises(
        ValueError, match=rf"(?s)tokenizer.json` .*{message}.*\"bytes\".*unknown=\"<unk>\""
    ):
        prepare(corpus, tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_tokenizer_unknown_token_stands_for_missing_characters(tmp_path):
    from tokenizers import models, pre_tokenizers

    corpus = Corpus(tmp_path / "a.jsonl", tokenizer=tmp_path / "tokenizer.json", held_out=0)
    (tmp_path / "a.jsonl").write_bytes(jsonl(["bad", "bad ü, ü"]))
    save_tokenizer(tmp_path / "tokenizer.json", bpe_of())
    prepared = prepare(dataclasses.replace(corpus, unknown="<"), tmp_path / "cache")
    ids = prepared.train.ids[4:-1].tolist()
    assert ids == [LETTERS[letter] for letter in "bad <<" + " <"] and prepared.unknown == 3
    assert "3 tokens stand for characters that the tokenizer lacks" in str(prepared)
    assert str(prepare(prepared.corpus, tmp_path / "cache")) == str(prepared)
    assert load_tokenizer(tmp_path / "tokenizer.json", unknown="<").encode_batch(["x"])[
        0
    ].tolist() == [LETTERS["<"]]
    with pytest.raises(ValueError, match=r"`unknown='nosuch'` is no token of the vocabulary"):
        prepare(dataclasses.replace(corpus, unknown="nosuch"), tmp_path / "cache")
    # A file with a token of its own for what is unknown has chosen.
    save_tokenizer(tmp_path / "tokenizer.json", bpe_of(unk_token="<"))
    assert prepare(corpus, tmp_path / "cache").train.fingerprint == prepared.train.fingerprint
    words = {"pre_tokenizer": pre_tokenizers.Whitespace()}
    save_tokenizer(tmp_path / "tokenizer.json", models.WordLevel({"bad": 0, "?": 1}), **words)
    assert prepare(dataclasses.replace(corpus, unknown="?"), tmp_path / "cache").train.ids[
        :5
    ].tolist() == [
        0,
        2,
        0,
        1,
        1,
    ]
    save_tokenizer(
        tmp_path / "tokenizer.json", models.Unigram([(letter, -1.0) for letter in "abcde "])
    )
    with pytest.raises(ValueError, match="Unigram, has its own token for what is unknown, or none"):
        prepare(dataclasses.replace(corpus, unknown="a"), tmp_path / "cache")
    for tokenizer in ("bytes", "bpe:300"):
        with pytest.raises(
            ValueError, match=r"`Corpus\(unknown='<unk>'\)` is a token of a tokenizer's file"
        ):
            dataclasses.replace(corpus, tokenizer=tokenizer, unknown="<unk>")


def test_tokenizer_with_full_coverage_takes_any_text(tmp_path, bpe):
    from tokenizers import normalizers, pre_tokenizers

    fallback = {**LETTERS, **{f"<0x{byte:02X}>": 10 + byte for byte in range(256)}}
    marks = pre_tokenizers.ByteLevel(add_prefix_space=False)
    every_mark = bpe_of({mark: number for number, mark in enumerate(sorted(marks.alphabet()))})
    files = [
        bpe,
        save_tokenizer(tmp_path / "a.json", bpe_of(fallback, byte_fallback=True)),
        save_tokenizer(tmp_path / "b.json", every_mark, normalizer=normalizers.ByteLevel()),
    ]
    for file in files:
        tokenizer = load_tokenizer(file)
        (ids,) = tokenizer.encode_batch(["a ü✓\U00050000"])
        assert len(ids) >= 8 and tokenizer.alphabet is None
    # What is split away on purpose, such as spaces between words, is not lacking.
    words = save_tokenizer(
        tmp_path / "c.json",
        bpe_of({"a": 0, "b": 1}),
        pre_tokenizer=pre_tokenizers.WhitespaceSplit(),
    )
    assert load_tokenizer(words).encode_batch(["a b\n\tab"])[0].tolist() == [0, 1, 0, 1]
    # Nor does a merge of a letter with itself hide it.
    doubled = save_tokenizer(tmp_path / "d.json", bpe_of({"a": 0, "é": 1, "éé": 2}, [("é", "é")]))
    assert load_tokenizer(doubled).encode_batch(["ééaé"])[0].tolist() == [2, 0, 1]


@pytest.mark.parametrize("run", ["letters", "spaces", "newlines", "marks", "digits", "accents"])
def test_tokenizer_learning_cuts_endless_runs_of_characters(run):
    unit = {
        "letters": "ab",
        "spaces": " ",
        "newlines": "\n",
        "marks": "=-",
        "digits": "12",
        "accents": "éü",
    }[run]
    text = "word " + unit * 200_000 + " word"
    inner = learn_tokenizer(300, [text])
    words = [word for word, _ in inner.pre_tokenizer.pre_tokenize_str(text[:5000])]
    assert max(map(len, words)) <= 200 and len(inner.encode(text).ids) > 1000
    assert inner.decode(inner.encode(text).ids) == text
    assert learn_tokenizer(300, [text]).to_str() == inner.to_str()


def test_tokenizer_learning_keeps_ordinary_words_whole():
    inner = learn_tokenizer(
        400,
        [CODE.format(k=k) for k in range(99)]
        + ["x" * 64 + " Donaudampfschiffahrtsgesellschaft"] * 9,
    )
    words = [
        word
        for word, _ in inner.pre_tokenizer.pre_tokenize_str(
            " Donaudampfschiffahrtsgesellschaft" + " " + "x" * 64
        )
    ]
    assert len(words) == 2
    assert len(inner.encode(" Donaudampfschiffahrtsgesellschaft").ids) == 1


# Files that are no texts


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ("", r"`Corpus\(files=''\)` is blank. Give a path"),
        (" \n", r"is blank. Give a path"),
        (("a", " "), r"is blank. Give a path"),
        ([], "names no files"),
        (None, r"files=None\)` names no files"),
        (True, r"files=True\)` names no files"),
        (b"a", "names no files"),
        (("a", None), r"is no path"),
        ("a\0b", "holds a character of number 0"),
        ("\ud800", "holds half of a character"),
        ("x" * 10_000, "has 10000 bytes; a path has at most 4095"),
        (("a", "b", "a"), "lists 'a' twice"),
        (Path(), None),
    ],
)
def test_corpus_refuses_files_that_are_no_paths(tmp_path, files, message):
    if message is None:
        assert Corpus(files).files == "."  # said, the current folder is read
        return
    with pytest.raises(ValueError, match=message):
        Corpus(files)


def test_corpus_refuses_a_file_that_is_listed_twice(tmp_path):
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "b.txt").symlink_to(tmp_path / "a.txt")
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "c.txt").write_text("two")
    for twice in ((tmp_path / "a.txt", tmp_path / "b.txt"), (tmp_path / "a.txt", tmp_path / "in" / ".." / "a.txt"),
                  (tmp_path / "in", f"{tmp_path}/in/")):  # fmt: skip
        with pytest.raises(ValueError, match=r"lists `.*` twice, as .* and as .*list it once"):
            read(twice)
    assert read((tmp_path / "in" / "c.txt", tmp_path))[0] == ["two", "one"], (
        "a folder is no second listing"
    )


def test_corpus_names_folders_that_cannot_be_read(tmp_path, monkeypatch):
    (tmp_path / "in").mkdir()
    (tmp_path / "a.txt").write_text("one")
    scan = os.scandir

    def refused(path):
        if str(path).endswith("in"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", refused)
    for files in (tmp_path, tmp_path / "in"):
        with pytest.raises(
            ValueError,
            match=r"The folder `.*in` of `Corpus\(files=...\)` cannot be read: Permission denied",
        ):
            read(files)
    with pytest.raises(ValueError, match="cannot be read: File name too long"):
        read("x" * 300)
    with pytest.raises(ValueError, match="a user's home folder that is not known"):
        read("~nosuchuser/a.txt")


@pytest.mark.parametrize("format", ["text", "jsonl", "parquet", "arrayrecord"])
def test_corpus_refuses_pipes_devices_and_sockets(tmp_path, format):
    os.mkfifo(tmp_path / "pipe.txt")
    (tmp_path / "zero.txt").symlink_to("/dev/zero")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "socket.txt"))
        for name, kind in (("pipe", "a pipe"), ("zero", "a device"), ("socket", "a socket")):
            with pytest.raises(
                ValueError,
                match=rf"{name}.txt` of `Corpus\(files=...\)` is {kind}, where a file was expected",
            ):
                read(tmp_path / f"{name}.txt", format=format)
    with pytest.raises(ValueError, match="There is no tokenizer at"):
        load_tokenizer(tmp_path / "pipe.txt")


@pytest.mark.parametrize("suffix", [".txt", ".jsonl", ".txt.gz"])
def test_corpus_refuses_a_file_that_grows_while_it_is_read(tmp_path, suffix):
    path = tmp_path / f"a{suffix}"
    content = b"".join(jsonl([f"line {k}"]) for k in range(3000))
    path.write_bytes(gzip.compress(content) if suffix.endswith("gz") else content)
    corpus = Corpus(path, separator="\n" if ".txt" in suffix else None)
    sources = tuple(
        dataclasses.replace(source, size=source.size // 2) for source in find_files(corpus)
    )
    with pytest.raises(
        ValueError,
        match=r"has more than the [\d,]+ bytes it had when it was found: it grows, or has no end",
    ):
        for _ in read_documents(sources, corpus, Reading()):
            pass


@pytest.mark.parametrize("block", [1, 7, 64, 1 << 20])
def test_corpus_limits_the_size_of_a_document(tmp_path, monkeypatch, block):
    monkeypatch.setattr(documents_room, "_DOCUMENT_BYTES", 100)
    monkeypatch.setattr(documents_room, "_BLOCK", block)
    long = "y" * 300
    (tmp_path / "a.jsonl").write_bytes(jsonl(["a", long, "b"]) + long.encode())
    (tmp_path / "b.txt").write_text(f"a\n--\n{long}\n{long}\n--\nb\nc\n--\n{long}")
    (tmp_path / "c.txt").write_text(long)
    (tmp_path / "d.txt.gz").write_bytes(gzip.compress(bytes(100_000)))
    cases = [("a.jsonl", None, "line 2", "ended by newlines", ["a", "b"], 2),
             ("b.txt", "--", "line 2", "cut it", ["a", "b\nc"], 2),
             ("c.txt", None, "line 1", "say what separates documents", [], 1),
             ("d.txt.gz", None, "line 1", "say what separates documents", [], 1)]  # fmt: skip
    for name, separator, where, way_out, expected, count in cases:
        with pytest.raises(
            ValueError, match=rf"{name}`, {where}: a document of more than 100 B; .*{way_out}"
        ):
            read(tmp_path / name, separator=separator)
        documents, reading = read(tmp_path / name, separator=separator, bad="skip")
        assert documents == expected and reading.skipped[tmp_path / name].count == count
    (tmp_path / "b.txt").write_text(f"a\n--\n{long}\n{long}\n--\nb\xff\n--", encoding="latin-1")
    documents, reading = read(tmp_path / "b.txt", separator="--", bad="skip")
    assert documents == ["a"] and reading.skipped[tmp_path / "b.txt"].count == 2


@pytest.mark.parametrize("kind", ["parquet", "arrayrecord"])
def test_corpus_names_damaged_parquet_and_array_record_files(tmp_path, kind):
    """Any flipped bit is an error that names the file, or changes nothing, where the format has
    digests.
    """
    path, texts = tmp_path / f"a.{kind}", [f"{k} a text of some words" for k in range(300)]
    if kind == "parquet":
        pq.write_table(
            pa.table({"text": texts}),
            path,
            row_group_size=100,
            write_page_checksum=True,
            compression="none",
        )
    else:
        write_records(path, [text.encode() for text in texts])
    whole, generator = path.read_bytes(), np.random.default_rng(0)
    pages = len(whole) // 2  # behind, Parquet's footer has none
    noticed = 0
    for bit in generator.integers(0, 8 * pages, 60).tolist():
        path.write_bytes(whole)
        flip(path, bit)
        try:
            documents, _ = read(path)
        except ValueError as error:
            noticed += str(path) in str(error)
        else:
            noticed += documents == texts
    assert noticed == 60
    for bit in generator.integers(8 * pages, 8 * len(whole), 60).tolist():
        path.write_bytes(whole)
        flip(path, bit)
        with contextlib.suppress(ValueError):
            assert all(isinstance(text, str) for text in read(path)[0])


# Arguments of any kind


class Unprintable:
    def __repr__(self):
        raise RuntimeError("no")


class PathLike:
    def __init__(self, value):
        self.value = value

    def __fspath__(self):
        return self.value


ANY = [
    None, True, False, 0, -1, 3.5, float("nan"), float("inf"), 10**12, 10**30, 10**5000, -(10**30),
    1j, "", " ", "\0", "\ud800",
    "a" * 10_000, "/" * 10_000, "a/" * 4000, "~nosuch/x", "*" * 3000, "[", "bpe:1", "nofile", b"x",
    [], (), {}, [None],
    ["a", "a"], ("",), (3,), [1, [2]], {"examples": "x"}, {1: 2}, [10**30], set(), iter([1, 2]),
    range(3),
    slice(None, None, 0), slice("a"),
    np.zeros(3), np.array(3), np.array(["a"]), np.array([[1]]), np.array([2**63], np.uint64),
    np.float32(2), np.bool_(True),
    object(), int, print, Unprintable(), PathLike(b"x"), PathLike(3), PathLike(""),
    Path("/dev/zero"),
]  # fmt: skip


def test_data_functions_accept_or_refuse_arguments_of_any_kind(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.jsonl").write_bytes(jsonl(["To be", "or not"] * 30))
    corpus = Corpus("a.jsonl", held_out=0.2)
    prepared, learned = (
        prepare(corpus, "cache"),
        prepare(dataclasses.replace(corpus, tokenizer="bpe:300"), "cache"),
    )
    sequences = Sequences(prepared.train, 8, 2)
    told = {field.name: getattr(prepared, field.name) for field in dataclasses.fields(prepared)}
    calls = [
        (Corpus, dataclasses.asdict(corpus)),
        (
            lambda **given: prepare(dataclasses.replace(corpus, **given), "cache"),
            {"files": 0, "tokenizer": 0, "end": 0},
        ),
        (prepare, {"corpus": corpus, "cache": "cache"}),
        (cache_folder, {"cache": "cache"}),
        (load_tokenizer, {"tokenizer": "bytes", "end": None, "unknown": None}),
        (
            Tokens,
            {
                "ids": np.array([1, 0]),
                "ends": np.array([2]),
                "vocab": 3,
                "end": 0,
                "bytes": 2,
                "fingerprint": "",
            },
        ),
        (prepared.train.bits_per_byte, {"loss": 1.0}),
        (prepared.train.check_vocab, {"embeddings": 300}),
        (
            Sequences,
            {"tokens": prepared.train, "length": 8, "batch": 2, "seed": 0, "documents": "cut"},
        ),
        (sequences.examples, {"positions": [0]}),
        (sequences.local, {"rows": slice(None), "threads": 1, "ahead": 1}),
        (lambda rows: next(sequences.once(rows)), {"rows": [0]}),
        (sequences.local().set_state, {"state": {"examples": 0}}),
        (Reader, {"sequences": sequences, "rows": np.arange(2), "threads": 1, "ahead": 1}),
        (lambda **given: str(Skipped(**given)), {"file": "a", "count": 1, "first": "x"}),
        (lambda **given: Prepared(**given).describe(), told),
        (prepared.tokenizer.encode_batch, {"texts": ["a"]}),
        (learned.tokenizer.encode_batch, {"texts": ["a"]}),
        (prepared.tokenizer.decode, {"ids": [1]}),
        (learned.tokenizer.decode, {"ids": [1]}),
    ]
    foreign, refused = [], 0
    for number, (call, good) in enumerate(calls):
        for name, value in itertools.product(good, ANY):
            given = {**good, name: value} if number != 1 else {name: value}
            try:
                call(**given)
            except ValueError as error:
                frames = traceback.extract_tb(error.__traceback__)
                ours = "shardlib/data/" in frames[-1].filename.replace(os.sep, "/")
                refused += 1
                if not ours or len(str(error)) > 1500:
                    foreign.append((number, name, type(value), str(error)[:100]))
            except Exception as error:
                foreign.append((number, name, type(value), repr(error)[:100]))
    assert foreign == [] and refused > 1500


def test_bits_per_byte_of_an_empty_text_is_refused():
    empty = Tokens(np.empty(0, np.uint16), np.empty(0, np.int64), 257, 256, bytes=0)
    with pytest.raises(
        ValueError, match=r"Tokens\(0 of 0 documents, vocab=257\) are of a text of 0 bytes"
    ):
        empty.bits_per_byte(1.0)
