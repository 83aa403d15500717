"""The tokenizer as the engine sees it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import tokenizers

from deepinfer_core.api import CheckpointError, InvalidRequestError

from .chat_template import ChatTemplates
from .decoding import Assembler, ByteAssembler, PairAssembler, byte_decoding

COMPOSED = 4
"""Characters that canonical composition makes one of, at most (U+1F82)."""


class Tokenizer:
    """Text to token ids and back, around a ``tokenizers.Tokenizer``.

    Attributes:
        eos_token_ids: every id that ends a generation, the primary one first; may be empty.
        bos_token_id, pad_token_id: None when the tokenizer names none.
        vocab_size: highest id + 1, added tokens included.
        special_ids: ids that ``skip_special_tokens`` leaves out; ``special_texts`` maps them to their text.
        chat_template: the default template's source, None when there is none.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        eos_token_ids: Iterable[int] = (),
        special_tokens: Mapping[str, str] | None = None,
        chat_templates: Mapping[str, str] | None = None,
    ) -> None:
        """``special_tokens``: role (``"bos_token"``) -> text; ``chat_templates``: name -> source."""
        # A training-time limit or padding saved in the file must not touch prompts.
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._token_of = backend.id_to_token
        roles = dict(special_tokens or {})
        self._templates = ChatTemplates(templates=dict(chat_templates or {}), special_tokens=roles)
        self._decoding = byte_decoding(backend.decoder)
        self._bytes_known: dict[int, bytes] = {}
        self.eos_token_ids = tuple(dict.fromkeys(eos_token_ids))
        self.bos_token_id = self._id_of_role(roles, "bos_token")
        self.pad_token_id = self._id_of_role(roles, "pad_token")
        vocabulary = backend.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        self._longest = max(map(len, vocabulary), default=0)
        self.special_texts: Mapping[int, str] = {
            token_id: token.content for token_id, token in backend.get_added_tokens_decoder().items() if token.special
        }
        self.special_ids = frozenset(self.special_texts)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of ``text``. Special tokens written out in ``text`` become their ids.

        Args:
            add_special_tokens: also add what the tokenizer puts around a text, such as BOS.
        """
        ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    @cached_property
    def longest_token(self) -> int | None:
        """Characters of a text that one token takes, at most; None if that has no bound.

        It has none where a run of unknown characters may be one token, a token takes the spaces beside it, or a
        normalizer drops some.
        """
        model, composed = self._backend.model, _composed(self._backend.normalizer)
        known = getattr(model, "unk_token", "unknown") is None or getattr(model, "byte_fallback", False)
        greedy = any(token.lstrip or token.rstrip for token in self._backend.get_added_tokens_decoder().values())
        if composed is None or not known or greedy or not self.has_token_bytes:
            return None
        return composed * self._longest

    def check_length(self, text: str, max_tokens: int) -> None:
        """Refuse, without encoding it, a text that surely has more tokens: many megabytes take minutes and gigabytes.

        Raises:
            InvalidRequestError: says how many characters it has and may have.
        """
        longest = self.longest_token
        if longest is not None and len(text) > longest * max_tokens:
            raise InvalidRequestError(
                f"prompt has {len(text)} characters: expected at most {longest * max_tokens}, as many as "
                f"max_model_len={max_tokens} tokens of at most {longest} have: shorten it, or raise "
                "model.max_model_len as far as the checkpoint goes"
            )

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of ``ids``; ids without a token give nothing, invalid UTF-8 gives U+FFFD.

        Equal to Hugging Face's decoding but for one case: where byte tokens (``<0xE6>``) do not form UTF-8, only
        the invalid bytes become U+FFFD, not every byte of the run.
        """
        if self._decoding is None or not self._decoding.byte_fallback:
            return self._backend.decode(ids, skip_special_tokens=skip_special_tokens)
        assembler = self.assembler()
        visible = (i for i in ids if not (skip_special_tokens and i in self.special_ids))
        return "".join(map(assembler.push, visible)) + assembler.flush()

    def assembler(self) -> Assembler:
        """A fresh assembler of text from one token at a time; the caller leaves out special tokens."""
        if self._decoding is not None:
            return ByteAssembler(self._decoding, self._token_of, self._bytes_known)
        return PairAssembler(self._decode_all, self._token_of)

    def id_to_bytes(self, token_id: int) -> bytes:
        """What ``token_id`` adds to a text in its middle, as bytes; ``b""`` for ids without a token."""
        token = self._token_of(token_id)
        if token is None:
            return b""
        return token.encode() if self._decoding is None else self._decoding.token_bytes(token)

    @property
    def has_token_bytes(self) -> bool:
        """Whether :meth:`id_to_bytes` is exact: each token has a text of its own, wherever it stands."""
        return self._decoding is not None

    @property
    def chat_template(self) -> str | None:
        return self._templates.templates.get("default")

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        chat_template: str | None = None,
        **kwargs: Any,
    ) -> str:
        """The prompt text of a conversation; encode it with ``add_special_tokens=False``.

        Args:
            messages: ``{"role": …, "content": …}`` in order.
            add_generation_prompt: end with the header of the assistant's answer.
            chat_template: name of one of the tokenizer's templates, or a template's source.
            kwargs: variables for the template, e.g. ``tools``.

        Raises:
            InvalidRequestError: there is no template, or it refused the messages.
            CheckpointError: the template is not valid Jinja.
        """
        return self._templates.render(
            messages, template=chat_template, add_generation_prompt=add_generation_prompt, variables=kwargs
        )

    def token_ids_from(self, first: int) -> dict[int, str]:
        """Every token with an id of at least ``first``, in order."""
        vocabulary = self._backend.get_vocab(with_added_tokens=True)
        return dict(sorted((token_id, token) for token, token_id in vocabulary.items() if token_id >= first))

    def _decode_all(self, ids: list[int]) -> str:
        return self._backend.decode(ids, skip_special_tokens=False)

    def _id_of_role(self, roles: Mapping[str, str], role: str) -> int | None:
        return self._backend.token_to_id(roles[role]) if role in roles else None


def _composed(normalizer: Any) -> int | None:
    """Characters that a ``tokenizers`` normalizer makes one of, at most; None if that is not known."""
    if normalizer is None:
        return 1
    state = json.loads(normalizer.__getstate__())
    most = 1
    for step in state["normalizers"] if state["type"] == "Sequence" else [state]:
        match step:
            case {"type": "NFC"}:
                most = COMPOSED
            case {"type": "Prepend"}:
                pass
            case {"type": "Replace", "pattern": {"String": old}, "content": new} if len(old) <= len(new):
                pass
            case _:
                return None
    return most


def check_tokenizer(tokenizer: Tokenizer, model_vocab_size: int) -> None:
    """Refuse a tokenizer that can produce ids the model has no row for.

    A model with more rows than the tokenizer has ids is fine: embeddings are often padded.

    Raises:
        CheckpointError: names the first tokens beyond ``model_vocab_size``.
    """
    beyond = tokenizer.token_ids_from(model_vocab_size)
    if not beyond:
        return
    examples = ", ".join(f"{token_id} {token!r}" for token_id, token in list(beyond.items())[:3])
    raise CheckpointError(
        f"the tokenizer does not belong to this model: its ids reach {max(beyond)}, the model's vocab_size is "
        f"{model_vocab_size}; {len(beyond)} token(s) beyond: {examples}"
    )
