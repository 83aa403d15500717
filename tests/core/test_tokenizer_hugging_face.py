"""Tokenizers of Hugging Face directories, against transformers on the same files."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from checkpoint_support import write_directory, write_json
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizer_support import (
    CONFIG,
    EOS,
    LETTER_OF,
    byte_fallback,
    byte_level_of,
    id_of,
    load,
    metaspace,
    plain_words,
    save_tokenizer,
    trained_byte_level,
    word_pieces,
    wrapped,
)
from tokenizers import AddedToken, normalizers
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from deepinfer_core.api import CheckpointError, InvalidRequestError
from deepinfer_core.checkpoint import open_checkpoint
from deepinfer_core.tokenizer import Tokenizer, check_tokenizer, load_tokenizer

AWKWARD = ["", " ", "the quick  brown\n\nfox", f"a{EOS}b", "木村🍎 é\u0301", "\t12345 x=3", "<s> </s>", "ü <tool é>"]


def both(
    directory: Path, backend: tokenizers.Tokenizer, config: Mapping[str, Any] | None = None
) -> tuple[Tokenizer, Any]:
    save_tokenizer(directory, backend, config)
    ours = load(directory)
    return ours, AutoTokenizer.from_pretrained(directory)


@pytest.mark.parametrize(
    ("build", "config"),
    [
        (trained_byte_level, {"eos_token": EOS}),
        (byte_fallback, CONFIG),
        (metaspace, CONFIG),
        (word_pieces, {"sep_token": "[SEP]"}),
        (plain_words, {}),
    ],
)
def test_encode_and_decode_equal_transformers(
    tmp_path: Path, build: Callable[[], tokenizers.Tokenizer], config: dict[str, Any]
) -> None:
    ours, theirs = both(tmp_path, build(), config)
    for text in AWKWARD:
        for add in (True, False):
            ids = ours.encode(text, add_special_tokens=add)
            assert ids == theirs.encode(text, add_special_tokens=add), text
            for skip in (True, False):
                assert ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip), text


@pytest.fixture(scope="module", params=["byte level", "metaspace"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, Any]:
    build, config = {"byte level": (trained_byte_level, {}), "metaspace": (metaspace, CONFIG)}[request.param]
    return both(tmp_path_factory.mktemp("tokenizer"), build(), dict(config))


@given(data=st.data())
@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_random_ids_decode_as_transformers_does(pair: tuple[Tokenizer, Any], data: st.DataObject) -> None:
    ours, theirs = pair
    ids = data.draw(st.lists(st.integers(0, ours.vocab_size - 1), max_size=20))
    for skip in (True, False):
        assert ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip)


@given(ids=st.lists(st.integers(0, 300), max_size=20))
@settings(max_examples=200)
def test_random_byte_tokens_decode_as_utf8(ids: list[int]) -> None:
    """The library replaces every byte of an invalid run; only the invalid ones are replaced here."""
    backend = byte_fallback()
    data = b""
    for token_id in ids:
        piece = backend.id_to_token(token_id)
        if piece is None or piece in ("<s>", "</s>"):
            continue
        data += bytes([token_id - 3]) if 3 <= token_id < 259 else piece.replace("▁", " ").encode()
    assert wrapped(backend).decode(ids) == data.removeprefix(b" ").decode("utf-8", "replace")


@given(text=st.text(max_size=20))
@settings(max_examples=100)
def test_valid_byte_tokens_decode_as_the_library_does(text: str) -> None:
    backend = byte_fallback()
    tokenizer = wrapped(backend)
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == backend.decode(ids)


# Files and what they say


def test_no_tokenizer_files(tmp_path: Path) -> None:
    write_directory(tmp_path, {"model.safetensors": {"a": torch.zeros(1)}})
    assert load_tokenizer(open_checkpoint(tmp_path)) is None


def test_unconverted_tokenizer_says_how_to_convert(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: missing, and tokenizer\.model is not read"):
        load(tmp_path)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"version": "1.0"}', '{"model": {"type": "BPE"}}'])
def test_damaged_tokenizer_json(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: not a tokenizer .*; it is damaged or was cut"):
        load(tmp_path)


def test_truncated_tokenizer_json(tmp_path: Path) -> None:
    path = save_tokenizer(tmp_path, trained_byte_level()) / "tokenizer.json"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: not a tokenizer .*; it is damaged or was cut"):
        load(tmp_path)


def test_damaged_tokenizer_config(tmp_path: Path) -> None:
    save_tokenizer(tmp_path, trained_byte_level())
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json"):
        load(tmp_path)


def test_tokenizer_json_alone_is_enough(tmp_path: Path) -> None:
    save_tokenizer(tmp_path, trained_byte_level())
    (tmp_path / "tokenizer_config.json").unlink()
    tokenizer = load(tmp_path)
    assert tokenizer.decode(tokenizer.encode("the fox")) == "the fox"
    assert (tokenizer.bos_token_id, tokenizer.pad_token_id, tokenizer.eos_token_ids) == (None, None, ())


def test_saved_truncation_and_padding_do_not_touch_prompts(tmp_path: Path) -> None:
    backend = trained_byte_level()
    plain = backend.encode("the quick brown fox").ids
    backend.enable_truncation(3)
    backend.enable_padding(length=64)
    save_tokenizer(tmp_path, backend)
    assert load(tmp_path).encode("the quick brown fox") == plain


def test_roles_from_tokenizer_config(tmp_path: Path) -> None:
    bos = {"__type": "AddedToken", "content": "<s>", "special": True}
    config = {"bos_token": bos, "eos_token": "</s>", "pad_token": "<unk>"}
    ours, theirs = both(tmp_path, byte_fallback(), config)
    assert (ours.bos_token_id, ours.pad_token_id) == (theirs.bos_token_id, theirs.pad_token_id) == (1, 0)
    assert ours.eos_token_ids == (2,)


def test_roles_from_special_tokens_map(tmp_path: Path) -> None:
    save_tokenizer(tmp_path, byte_fallback())
    write_json(tmp_path / "special_tokens_map.json", {"bos_token": "<s>", "eos_token": {"content": "</s>"}})
    tokenizer = load(tmp_path)
    assert tokenizer.bos_token_id == 1
    assert tokenizer.eos_token_ids == (2,)


@pytest.mark.parametrize(("listed", "expected"), [(7, (7, 2)), ([7, 2, 9], (7, 2, 9)), (None, (2,))])
def test_eos_of_generation_config_and_tokenizer(tmp_path: Path, listed: Any, expected: tuple[int, ...]) -> None:
    save_tokenizer(tmp_path, byte_fallback(), CONFIG)
    write_json(tmp_path / "generation_config.json", {"eos_token_id": listed})
    assert load(tmp_path).eos_token_ids == expected


def test_eos_of_config_is_the_last_resort(tmp_path: Path) -> None:
    save_tokenizer(tmp_path, byte_fallback())
    write_directory(tmp_path, {"model.safetensors": {"a": torch.zeros(1)}})
    write_json(tmp_path / "config.json", {"eos_token_id": [5, 6]})
    tokenizer = load_tokenizer(open_checkpoint(tmp_path))
    assert tokenizer is not None
    assert tokenizer.eos_token_ids == (5, 6)


@pytest.mark.parametrize("flags", [{}, {"add_bos_token": False}, {"add_bos_token": True, "add_eos_token": True}])
def test_bos_is_what_tokenizer_json_says_as_in_transformers(tmp_path: Path, flags: dict[str, bool]) -> None:
    ours, theirs = both(tmp_path, byte_fallback(), {**CONFIG, **flags})
    assert ours.encode("a b") == theirs.encode("a b") == [1, *ours.encode("a b", add_special_tokens=False)]


def test_post_processor_of_tokenizer_json_is_kept(tmp_path: Path) -> None:
    backend = trained_byte_level()
    end = backend.token_to_id(EOS)
    backend.post_processor = TemplateProcessing(single=f"$A {EOS}", special_tokens=[(EOS, end)])
    ours, theirs = both(tmp_path, backend, {"eos_token": EOS})
    assert ours.encode("the")[-1] == end
    assert ours.encode("the") == theirs.encode("the")


def test_role_tokens_are_special_even_if_not_marked(tmp_path: Path) -> None:
    backend = trained_byte_level()
    backend.add_tokens([AddedToken("<eot>", special=False, normalized=False)])
    ours, theirs = both(tmp_path, backend, {"eos_token": "<eot>"})
    ids = ours.encode("a<eot>b")
    assert ids == theirs.encode("a<eot>b")
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True) == "ab"


def test_additional_special_tokens(tmp_path: Path) -> None:
    config = {"additional_special_tokens": ["<a1>", {"content": "<a2>"}]}
    save_tokenizer(tmp_path, trained_byte_level(), config)
    tokenizer = load(tmp_path)
    ids = tokenizer.encode("x<a1><a2>")
    assert set(ids[-2:]) <= tokenizer.special_ids
    assert tokenizer.decode(ids) == "x"


def test_tokens_listed_only_in_tokenizer_config(tmp_path: Path) -> None:
    backend = trained_byte_level()
    first = backend.get_vocab_size()
    flags = {"lstrip": False, "rstrip": False, "single_word": False, "normalized": False}
    listed = {
        str(first + 1): {"content": "<late>", "special": True, **flags},
        str(first): {"content": "<early>", "special": False, **flags},
    }
    ours, theirs = both(tmp_path, backend, {"added_tokens_decoder": listed})
    assert ours.encode("<early><late>") == theirs.encode("<early><late>") == [first, first + 1]
    assert first + 1 in ours.special_ids
    assert first not in ours.special_ids


@pytest.mark.parametrize("listed", [{"x": {"content": "a"}}, {"900": {}}, {"900": "a"}, ["a"]])
def test_malformed_listed_tokens(tmp_path: Path, listed: Any) -> None:
    save_tokenizer(tmp_path, trained_byte_level(), {"added_tokens_decoder": listed})
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json: 'added_tokens_decoder' must map"):
        load(tmp_path)


# Vocabulary and bytes


def test_vocab_size_counts_up_to_the_highest_id() -> None:
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 9}, unk_token="a"))
    assert wrapped(backend).vocab_size == 10
    with_added = byte_level_of([b"a", b"b"])
    assert wrapped(with_added).vocab_size == id_of(with_added, EOS) + 1 == 3
    assert wrapped(tokenizers.Tokenizer(tokenizers.models.WordLevel({}, unk_token="a"))).vocab_size == 0


def test_bytes_of_byte_level_tokens() -> None:
    every = [bytes([byte]) for byte in range(256)]
    tokenizer = wrapped(byte_level_of([*every, b" the\n", "木".encode()]))
    assert [tokenizer.id_to_bytes(index) for index in range(258)] == [*every, b" the\n", "木".encode()]
    assert tokenizer.id_to_bytes(258) == EOS.encode()
    assert tokenizer.id_to_bytes(10_000) == b""


def test_bytes_of_added_tokens_are_what_the_decoder_gives() -> None:
    """The decoder reads letters of its alphabet as bytes in added tokens too, unless another letter is among them."""
    tokenizer = wrapped(trained_byte_level())
    (plain,) = tokenizer.encode("ü")
    (mixed,) = tokenizer.encode("<tool é>")
    assert tokenizer.id_to_bytes(plain) == bytes([next(b for b, letter in LETTER_OF.items() if letter == "ü")])
    assert tokenizer.id_to_bytes(mixed) == "<tool é>".encode()


def test_bytes_of_sentencepiece_tokens() -> None:
    tokenizer = wrapped(byte_fallback())
    backend = byte_fallback()
    assert [tokenizer.id_to_bytes(3 + byte) for byte in range(256)] == [bytes([byte]) for byte in range(256)]
    assert tokenizer.id_to_bytes(id_of(backend, "▁th")) == b" th"
    assert tokenizer.id_to_bytes(id_of(backend, "木")) == "木".encode()


def test_byte_names_are_text_without_byte_fallback() -> None:
    assert wrapped(metaspace()).id_to_bytes(3 + 0x41) == b"<0x41>"


def test_bytes_of_other_tokens_are_their_text() -> None:
    assert wrapped(word_pieces()).id_to_bytes(3) == b"##ing"


def test_special_ids() -> None:
    backend = trained_byte_level()
    assert wrapped(backend).special_ids == {backend.token_to_id(EOS)}


@pytest.mark.parametrize("padding", [0, 1, 1000])
def test_a_model_may_have_more_rows_than_the_tokenizer(padding: int) -> None:
    tokenizer = wrapped(trained_byte_level())
    check_tokenizer(tokenizer, tokenizer.vocab_size + padding)


def test_mismatched_tokenizer() -> None:
    tokenizer = wrapped(byte_level_of([b"a", b"b", b"c", b"d", b"e"]))
    with pytest.raises(CheckpointError, match=r"reach 5, the model's vocab_size is 2; 4 .* 2 'c', 3 'd', 4 'e'$"):
        check_tokenizer(tokenizer, 2)


def test_an_added_token_beyond_the_model_is_a_mismatch() -> None:
    tokenizer = wrapped(byte_level_of([b"a", b"b"]))
    with pytest.raises(CheckpointError, match=r"beyond: 2 '<\|end\|>'"):
        check_tokenizer(tokenizer, 2)


def test_the_saved_files_are_as_transformers_saves_them(tmp_path: Path) -> None:
    """A directory written by transformers itself loads to the same tokenizer."""
    _, theirs = both(tmp_path / "first", byte_fallback(), CONFIG)
    theirs.chat_template = "{{ messages[0].content }}"
    theirs.save_pretrained(tmp_path / "second")
    again = load(tmp_path / "second")
    assert again.encode("a b 🍎") == theirs.encode("a b 🍎")
    assert again.chat_template == "{{ messages[0].content }}"
    assert json.loads((tmp_path / "second" / "tokenizer_config.json").read_text())["eos_token"] == "</s>"
    assert again.eos_token_ids == (2,)


# ---- texts that are too long to be read

COMPOSING = st.text(st.sampled_from("abc  ▁\n木🍎éα\u0301\u0313\u0345"), max_size=60)
BOUNDED = {"byte level": trained_byte_level, "byte fallback": byte_fallback}


@pytest.fixture(scope="module", params=[*BOUNDED, "NFC"])
def bounded(request: Any) -> Tokenizer:
    backend = BOUNDED.get(request.param, trained_byte_level)()
    if request.param == "NFC":
        backend.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Replace(" ", "\n")])
    return Tokenizer(backend)


@given(text=COMPOSING | st.text(max_size=60) | st.text(st.sampled_from("the quick brown fox"), max_size=200))
def test_no_token_takes_more_of_a_text_than_the_longest(bounded: Tokenizer, text: str) -> None:
    assert bounded.longest_token is not None
    tokens = len(bounded.encode(text, add_special_tokens=False))
    assert len(text) <= bounded.longest_token * tokens
    bounded.check_length(text, tokens)


def test_a_text_of_more_than_all_tokens_could_take_is_refused(bounded: Tokenizer) -> None:
    assert bounded.longest_token is not None
    most = 7 * bounded.longest_token
    bounded.check_length("x" * most, 7)
    said = rf"prompt has {most + 1} characters: expected at most {most}, as many as max_model_len=7 tokens of at most"
    with pytest.raises(InvalidRequestError, match=said):
        bounded.check_length("x" * (most + 1), 7)


def greedy_for_spaces() -> tokenizers.Tokenizer:
    backend = trained_byte_level()
    backend.add_special_tokens([AddedToken("<mask>", lstrip=True, special=True)])
    return backend


def stripping() -> tokenizers.Tokenizer:
    backend = trained_byte_level()
    backend.normalizer = normalizers.Strip()
    return backend


@pytest.mark.parametrize("build", [word_pieces, plain_words, greedy_for_spaces, stripping])
def test_where_a_token_may_take_any_length_nothing_is_refused(build: Callable[[], tokenizers.Tokenizer]) -> None:
    tokenizer = Tokenizer(build())
    assert tokenizer.longest_token is None
    tokenizer.check_length(" " * 100_000, 1)
