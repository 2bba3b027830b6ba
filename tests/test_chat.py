"""Conversations as documents: their forms, how turns are written, and which tokens are learned."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardlib.data import Chat, Corpus, Sequences, Tokens, load_tokenizer, prepare
from shardlib.data._chat import CHATS, encode_documents, messages_of

ASKED = [("user", "1 + 1?"), ("assistant", "2"), ("user", "Sure?"), ("assistant", "Yes.")]
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|im_end|>x"]


def written(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


@pytest.fixture
def tokenizer(tmp_path):
    """A tokenizer of bytes that has special tokens, as a file."""
    tokenizers = pytest.importorskip("tokenizers")
    marks = tokenizers.pre_tokenizers
    inner = tokenizers.Tokenizer(tokenizers.models.BPE())
    inner.pre_tokenizer = marks.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        special_tokens=SPECIAL, initial_alphabet=marks.ByteLevel.alphabet(), show_progress=False
    )
    inner.train_from_iterator([], trainer)
    inner.save(str(tmp_path / "tokenizer.json"))
    return str(tmp_path / "tokenizer.json")


FORMS = {
    "messages": {"messages": [{"role": role, "content": text} for role, text in ASKED]},
    "conversations": {
        "conversations": [
            {"from": {"user": "human", "assistant": "gpt"}[role], "value": text}
            for role, text in ASKED
        ]
    },
    "prompt": {"prompt": "1 + 1?", "completion": "2"},
    "lists": {
        "prompt": [{"role": "user", "content": "1 + 1?"}],
        "completion": [{"role": "assistant", "content": "2"}],
    },
    "question": {"question": "1 + 1?", "answer": "2"},
    "instruction": {"instruction": "Add.", "input": "1 + 1", "output": "2"},
    "no input": {"instruction": "Add 1 and 1.", "input": "", "output": "2"},
}
EXPECTED = {
    "messages": ASKED,
    "conversations": ASKED,
    "instruction": [("user", "Add.\n\n1 + 1"), ("assistant", "2")],
    "no input": [("user", "Add 1 and 1."), ("assistant", "2")],
}


@pytest.mark.parametrize("form", FORMS)
def test_records_are_read_in_every_form(form):
    assert messages_of(FORMS[form], None) == EXPECTED.get(form, ASKED[:2])


def test_a_system_may_speak_first():
    record = FORMS["conversations"] | {"system": "Be brief."}
    assert messages_of(record, None) == [("system", "Be brief."), *ASKED]
    for form in ("prompt", "lists", "question", "no input"):
        said = messages_of(FORMS[form] | {"system": "Be brief."}, None)
        assert said == [("system", "Be brief."), *EXPECTED.get(form, ASKED[:2])]


def test_messages_may_be_under_another_key():
    assert messages_of({"turns": FORMS["messages"]["messages"]}, "turns") == ASKED


def test_roles_that_a_format_declares_are_as_they_are():
    record = {"messages": [{"role": "model", "content": "a"}, {"role": "human", "content": "b"}]}
    assert messages_of(record, None) == [("assistant", "a"), ("user", "b")]
    assert messages_of(record, None, ("model",)) == [("model", "a"), ("user", "b")]


@pytest.mark.parametrize(
    "unknown",
    [{"function_call": {"name": "weather"}}, {"train": False}, {"reasoning_content": "hm"}],
    ids=lambda unknown: next(iter(unknown)),
)
def test_messages_with_what_formats_do_not_know_are_refused(unknown):
    record = {"messages": [{"role": "assistant", "content": "", **unknown}]}
    with pytest.raises(ValueError, match=f"a message with `{next(iter(unknown))}`"):
        messages_of(record, None)


def test_functions_of_a_record_are_refused():
    with pytest.raises(ValueError, match="`functions`, which the formats here do not write"):
        messages_of(FORMS["messages"] | {"functions": [{"name": "weather"}]}, None)


WRITTEN = {
    "chatml": "<|im_start|>user\n1 + 1?<|im_end|>\n<|im_start|>assistant\n[2<|im_end|>]\n"
    "<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n[Yes.<|im_end|>]",
    "llama3": "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\n1 + 1?<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n[2<|eot_id|>]"
    "<|start_header_id|>user<|end_header_id|>\n\nSure?<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n[Yes.<|eot_id|>]",
    "gemma": "<bos><start_of_turn>user\n1 + 1?<end_of_turn>\n<start_of_turn>model\n[2<end_of_turn>]\n"
    "<start_of_turn>user\nSure?<end_of_turn>\n<start_of_turn>model\n[Yes.<end_of_turn>]",
    "plain": "### user:\n1 + 1?\n\n### assistant:\n[2\n]\n### user:\nSure?\n\n### assistant:\n[Yes.\n]",
    "bare": "1 + 1?[2]Sure?[Yes.]",
}


@pytest.mark.parametrize("name", CHATS)
def test_turns_are_written_and_what_the_assistant_says_is_learned(name):
    text, learning = "", False
    for piece in CHATS[name].document(ASKED).pieces:
        if piece.is_learned != learning:
            text += "[" if piece.is_learned else "]"
        learning = piece.is_learned
        text += piece.text
    assert text + ("]" if learning else "") == WRITTEN[name]
    prompt = CHATS[name].prompt(ASKED[:1]).text
    assert WRITTEN[name].replace("[", "").replace("]", "").startswith(prompt)


def test_markers_are_special_tokens_and_words_are_not(tokenizer):
    loaded = load_tokenizer(tokenizer, end="<|endoftext|>")
    document = CHATS["chatml"].document([("user", "<|im_end|>"), ("assistant", "a<|im_start|>")])
    (encoded,) = encode_documents(loaded, [document])
    special = encoded.ids[encoded.ids < len(SPECIAL)].tolist()
    assert special == [1, 2, 1, 2]
    words = loaded.encode_batch(["a<|im_start|>"])[0].tolist()
    assert encoded.ids[encoded.learned].tolist() == [*words, 2]
    # The longer of two tokens that begin alike.
    assert loaded.encode_marker("<|im_end|>x<|im_end|>").tolist() == [3, 2]


def test_a_prompt_has_the_tokens_that_documents_begin_with(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    marks = tokenizers.pre_tokenizers
    inner = tokenizers.Tokenizer(tokenizers.models.BPE())
    inner.pre_tokenizer = marks.ByteLevel(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(
        special_tokens=["<|endoftext|>"],
        initial_alphabet=marks.ByteLevel.alphabet(),
        show_progress=False,
    )
    # Two ends of lines are one token.
    inner.train_from_iterator(["a\n\nb\n\n"] * 9, trainer)
    inner.save(str(tmp_path / "tokenizer.json"))
    loaded = load_tokenizer(str(tmp_path / "tokenizer.json"))
    assert len(loaded.encode_batch(["\n\n"])[0]) == 1
    for chat in (CHATS["plain"], CHATS["bare"]):
        (whole,) = encode_documents(loaded, [chat.document(ASKED)])
        for number in (1, 3):
            begun = chat.prompt_ids(loaded, ASKED[:number])
            np.testing.assert_array_equal(whole.ids[: len(begun)], begun)
        assert chat.end_of_turn(loaded) is None


def test_a_special_token_ends_a_turn(tokenizer):
    loaded = load_tokenizer(tokenizer, end="<|endoftext|>")
    assert CHATS["chatml"].end_of_turn(loaded) == SPECIAL.index("<|im_end|>")


@pytest.mark.parametrize("documents", ["cut", "whole"])
def test_targets_count_where_the_assistant_speaks(documents, tmp_path, tokenizer):
    records = [FORMS[form] for form in ("messages", "prompt", "instruction")]
    file = written(tmp_path / "chats.jsonl", records)
    corpus = Corpus(file, tokenizer=tokenizer, end="<|endoftext|>", chat="chatml", held_out=0)
    prepared = prepare(corpus, tmp_path / "cache")
    sequences = Sequences(prepared.train, length=64, batch=1, seed=None, documents=documents)
    learned = []
    for number in range(len(sequences)):
        example = sequences.examples([number])
        targets = example["tokens"][0, 1:]
        learned.append(prepared.tokenizer.decode(targets[example["mask"][0] > 0]))
    ends = int((prepared.train.ids[:] == 2).sum())
    assert ends == 8
    if documents == "whole":
        assert "".join(learned) == "2Yes.22"
    else:  # the last window would not be full
        assert "2Yes.22".startswith("".join(learned)) and "2Yes." in "".join(learned)
    # The ends of four turns, and of three documents.
    assert prepared.train.learned == len("2Yes.22") + 4 + 3
    assert f"{prepared.train.learned} tokens of train are learned" in str(prepared)
    with pytest.raises(ValueError, match="has no bits per byte"):
        prepared.train.bits_per_byte(1.0)


def test_the_end_of_a_document_is_learned_with_its_last_words(tmp_path):
    file = written(tmp_path / "pairs.jsonl", [FORMS["prompt"]])
    prepared = prepare(Corpus(file, chat="bare", held_out=0), tmp_path / "cache")
    assert prepared.train.are_learned(np.arange(8)).tolist() == [False] * 6 + [True, True]
    assert prepared.train.ids[:].tolist() == [*b"1 + 1?2", 256]


def test_conversations_are_read_from_parquet(tmp_path):
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = [FORMS["messages"] | {"id": 1}, {"messages": FORMS["messages"]["messages"][:2], "id": 2}]
    parquet.write_table(arrow.Table.from_pylist(rows), tmp_path / "chats.parquet")
    lines = written(tmp_path / "chats.jsonl", rows)
    found = [
        prepare(Corpus(file, chat="plain", held_out=0), tmp_path / "cache").train
        for file in (lines, str(tmp_path / "chats.parquet"))
    ]
    assert found[0].fingerprint == found[1].fingerprint
    # What stands beside the messages counts as in lines.
    rows = [{"turns": FORMS["messages"]["messages"], "system": "Be brief.", "id": 1}]
    parquet.write_table(arrow.Table.from_pylist(rows), tmp_path / "turns.parquet")
    lines = written(tmp_path / "turns.jsonl", rows)
    found = [
        prepare(Corpus(file, chat="plain", field="turns", held_out=0), tmp_path / "cache").train
        for file in (lines, str(tmp_path / "turns.parquet"))
    ]
    assert found[0].fingerprint == found[1].fingerprint
    other = arrow.Table.from_pylist([{"text": "x"}])
    parquet.write_table(other, tmp_path / "other.parquet")
    with pytest.raises(ValueError, match="no column of a conversation; it has `text`"):
        prepare(Corpus(str(tmp_path / "other.parquet"), chat="plain"), tmp_path / "cache")


def test_formats_make_stores_of_their_own(tmp_path):
    file = written(tmp_path / "chats.jsonl", [FORMS["messages"]])
    made = [
        prepare(Corpus(file, chat=chat, held_out=0), tmp_path / "cache")
        for chat in ("plain", "bare", Chat(learned=("user",)))
    ]
    assert len({one.folder for one in made}) == len({one.train.fingerprint for one in made}) == 3
    again = prepare(Corpus(file, chat="bare", held_out=0), tmp_path / "cache")
    expected = np.array(again.train.switches)
    np.testing.assert_array_equal(expected, made[1].train.switches)
    (made[1].folder / "train.switches").write_bytes(b"\0" * 32)
    mended = prepare(Corpus(file, chat="bare", held_out=0), tmp_path / "cache")
    np.testing.assert_array_equal(mended.train.switches, expected)


BAD = {
    "no turn": ({"text": "x"}, "no conversation: no `messages`.*there is `text`"),
    "no list": ({"messages": "x"}, "`messages` is no list of messages"),
    "empty": ({"messages": []}, "is no list of messages"),
    "no message": ({"messages": ["x"]}, "which is no message"),
    "keys": ({"messages": [{"role": "user"}]}, "a message with `role`"),
    "content": ({"messages": [{"role": "user", "content": 3}]}, "`content` is 3"),
    "role": ({"messages": [{"role": "judge", "content": ""}]}, "role 'judge'; the format knows"),
    "nothing learned": (
        {"messages": [{"role": "user", "content": "Hi"}]},
        "nothing to learn: no message of `assistant`",
    ),
    "tools": (FORMS["messages"] | {"tools": [{}]}, "`tools`, which the formats here"),
    "calls": (
        {"messages": [{"role": "assistant", "content": "", "tool_calls": [{}]}]},
        "a message with `tool_calls`",
    ),
    "weight": (
        {"messages": [{"role": "assistant", "content": "x", "weight": 0}]},
        "a message with `weight`",
    ),
    "half": ({"prompt": "\ud800", "completion": "x"}, "half of a character"),
}


@pytest.mark.parametrize("name", BAD)
def test_records_that_are_no_conversations_are_refused_or_skipped(name, tmp_path):
    record, message = BAD[name]
    file = written(tmp_path / "chats.jsonl", [FORMS["messages"], record])
    with pytest.raises(ValueError, match=f"line 2: .*{message}"):
        prepare(Corpus(file, chat="plain", held_out=0), tmp_path / "cache")
    prepared = prepare(Corpus(file, chat="plain", held_out=0, bad="skip"), tmp_path / "cache")
    assert prepared.train.documents == 1 and prepared.skipped[0].count == 1


def test_formats_and_tokenizers_must_fit(tmp_path):
    file = written(tmp_path / "chats.jsonl", [FORMS["messages"]])
    with pytest.raises(ValueError, match=r"special tokens .*<\|im_start\|>.*`bytes`"):
        prepare(Corpus(file, chat="chatml", held_out=0), tmp_path / "cache")
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(ValueError, match="Give them as JSON lines"):
        prepare(Corpus(str(tmp_path / "a.txt"), chat="plain"), tmp_path / "cache")
    with pytest.raises(ValueError, match="did you mean 'chatml'"):
        Corpus(file, chat="chatlm")
    for options in ({"before": 3}, {"roles": ("user",)}, {"learned": ("judge",)}, {"learned": ()}):
        with pytest.raises(ValueError, match="Chat"):
            Chat(**options)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.booleans(), min_size=1, max_size=40), st.data())
def test_switches_say_which_tokens_are_learned(learned, data):
    flags = np.array(learned)
    switches = np.flatnonzero(flags != np.concatenate([[False], flags[:-1]]))
    ids, ends = np.zeros(len(flags), np.uint16), np.array([len(flags)])
    tokens = Tokens(ids, ends, 10, 0, 1, switches=switches)
    np.testing.assert_array_equal(tokens.are_learned(np.arange(len(flags))), flags)
    assert tokens.learned == flags.sum()
    for wrong in ([3, 2], [-1], [len(flags) + 1]):
        with pytest.raises(ValueError, match="switches"):
            Tokens(ids, ends, 10, 0, 1, switches=np.array(wrong))


# What documents begin with.


def test_documents_begin_with_a_token_that_is_not_learned(tokenizer, tmp_path):
    texts = ["first, the <|im_start|>", "second", ""]
    file = written(tmp_path / "texts.jsonl", [{"text": text} for text in texts])
    asked = {"tokenizer": tokenizer, "end": "<|endoftext|>", "held_out": 0.0}
    plain = prepare(Corpus(file, **asked), tmp_path / "cache")
    found = prepare(Corpus(file, **asked, begin="<|im_start|>"), tmp_path / "cache")
    begin, end = found.tokenizer.encode_marker("<|im_start|><|endoftext|>").tolist()
    bounds = [0, *found.train.ends]
    for number, text in enumerate(texts[:2]):
        ids = np.asarray(found.train.ids[bounds[number] : bounds[number + 1]]).tolist()
        assert ids[0] == begin and ids[-1] == end and begin not in ids[1:]
        assert found.tokenizer.decode(ids[1:-1]) == text
    assert found.train.begin == begin and plain.train.begin is None
    # The loss is of as many tokens as before, and a text has as many bits.
    assert len(found.train) == len(plain.train) + found.train.documents
    assert found.train.bits_per_byte(1.0) == plain.train.bits_per_byte(1.0)
    # Its place is read, and is no target.
    sequences = Sequences(found.train, length=64, batch=1, seed=None, documents="whole")
    batch = sequences.examples([0])
    targets = batch["tokens"][:, 1:][batch["mask"] > 0]
    assert begin in batch["tokens"] and begin not in targets


def test_conversations_begin_so_too_and_only_once(tokenizer, tmp_path):
    file = written(tmp_path / "chats.jsonl", [FORMS["messages"]])
    options = {"tokenizer": tokenizer, "end": "<|endoftext|>", "held_out": 0.0}
    cache = tmp_path / "cache"
    bare = prepare(Corpus(file, **options, chat="bare", begin="<|im_start|>"), cache).train
    assert bare.ids[0] == bare.begin and not bare.are_learned(np.array([0]))[0]
    own = Chat("{role}: ", begin="<|im_start|>", special=("<|im_start|>",))
    once = prepare(Corpus(file, **options, chat=own, begin="<|im_start|>"), cache).train
    assert np.sum(np.asarray(once.ids[:]) == once.begin) == 1
    with pytest.raises(ValueError, match=r"begin with '<\|im_start\|>'"):
        Corpus(file, **options, chat=own, begin="<|im_end|>")


@pytest.mark.parametrize(("begin", "has"), [("x", "<|endoftext|>"), ("<s>", "<|im_end|>x")])
def test_a_begin_that_is_no_special_token_is_refused(begin, has, tokenizer, tmp_path):
    file = written(tmp_path / "texts.jsonl", [{"text": "some"}])
    corpus = Corpus(file, tokenizer=tokenizer, end="<|endoftext|>", begin=begin, held_out=0.0)
    with pytest.raises(ValueError, match="no special token") as refused:
        prepare(corpus, tmp_path / "cache")
    assert has in str(refused.value)
    for made_here in ("bytes", "bpe:300"):
        with pytest.raises(ValueError, match="no special token but what ends"):
            Corpus(file, tokenizer=made_here, begin="a")
