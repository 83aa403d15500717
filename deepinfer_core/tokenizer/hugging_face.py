"""A tokenizer from the files Hugging Face checkpoints carry."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import tokenizers

from deepinfer_core.api import CheckpointError
from deepinfer_core.checkpoint.damage import remedy
from deepinfer_core.checkpoint.json_files import read_optional_json_object

from .tokenizer import Tokenizer

ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")

# Files of tokenizers that were never converted; reading on without one would silently lose it.
_UNCONVERTED = ("tokenizer.model", "vocab.json", "tekken.json", "tiktoken.model", "spiece.model")


def load_directory(
    directory: Path, config: Mapping[str, Any], generation_config: Mapping[str, Any]
) -> Tokenizer | None:
    """The tokenizer of ``directory``; None when it has none.

    What is put around a text (BOS) is tokenizer.json's to say: as in Hugging Face's own loader, ``add_bos_token`` in
    tokenizer_config.json does not count beside it.

    Raises CheckpointError for a damaged file, or when only files of an unconverted tokenizer are there.
    """
    path = directory / "tokenizer.json"
    if not path.is_file():
        for name in _UNCONVERTED:
            if (directory / name).is_file():
                raise CheckpointError(
                    f"{path}: missing, and {name} is not read; convert it once with Hugging Face's "
                    "AutoTokenizer.from_pretrained(directory).save_pretrained(directory)"
                )
        return None
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception for every kind of damage
        raise CheckpointError(f"{path}: not a tokenizer ({error}); {remedy(path)}") from error
    settings = read_optional_json_object(directory / "tokenizer_config.json")
    special_map = read_optional_json_object(directory / "special_tokens_map.json")
    try:
        _add_listed_tokens(backend, settings)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"{directory / 'tokenizer_config.json'}: 'added_tokens_decoder' must map ids to tokens with 'content'"
        ) from error
    roles = {role: text for role in ROLES if (text := _text(settings.get(role) or special_map.get(role)))}
    _mark_special(backend, [*roles.values(), *_extra_special(settings, special_map)])
    eos = list(_ids(generation_config.get("eos_token_id")))
    if "eos_token" in roles:
        eos += _ids(backend.token_to_id(roles["eos_token"]))
    return Tokenizer(
        backend,
        eos_token_ids=eos or _ids(config.get("eos_token_id")),
        special_tokens=roles,
        chat_templates=_chat_templates(directory, settings),
    )


def _text(token: Any) -> str | None:
    """The text of a token given as a string or as ``{"content": …}``."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) and text else None


def _ids(value: Any) -> Iterator[int]:
    """Token ids from a config value: none, one, or a list."""
    if isinstance(value, int):
        yield value
    elif isinstance(value, list):
        yield from value


def _extra_special(settings: Mapping[str, Any], special_map: Mapping[str, Any]) -> Iterator[str]:
    for source in (settings, special_map):
        for key in ("additional_special_tokens", "extra_special_tokens"):
            listed = source.get(key) or []
            for token in listed.values() if isinstance(listed, dict) else listed:
                if text := _text(token):
                    yield text


def _add_listed_tokens(backend: tokenizers.Tokenizer, settings: Mapping[str, Any]) -> None:
    """Add tokens that only tokenizer_config.json's ``added_tokens_decoder`` lists, in the order of their ids."""
    known = backend.get_added_tokens_decoder()
    listed = settings.get("added_tokens_decoder") or {}
    flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
    for token_id in sorted(map(int, listed)):
        if token_id not in known:
            entry = listed[str(token_id)]
            token = tokenizers.AddedToken(entry["content"], **{flag: entry[flag] for flag in flags if flag in entry})
            backend.add_tokens([token])


def _mark_special(backend: tokenizers.Tokenizer, texts: list[str]) -> None:
    """Tokens with a role are special even where tokenizer.json forgot to say so."""
    special = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    missing = [text for text in dict.fromkeys(texts) if text not in special]
    backend.add_special_tokens([tokenizers.AddedToken(text, special=True, normalized=False) for text in missing])


def _chat_templates(directory: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """Name -> source: ``chat_template.jinja`` and ``additional_chat_templates`` win over tokenizer_config.json."""
    templates: dict[str, str] = {}
    stored = settings.get("chat_template")
    if isinstance(stored, str):
        templates["default"] = stored
    elif isinstance(stored, list):
        try:
            templates.update({entry["name"]: entry["template"] for entry in stored})
        except (KeyError, TypeError) as error:
            raise CheckpointError(
                f"{directory / 'tokenizer_config.json'}: each entry of 'chat_template' needs 'name' and 'template'"
            ) from error
    single = directory / "chat_template.jinja"
    files = {"default": single} if single.is_file() else {}
    files |= {path.stem: path for path in sorted((directory / "additional_chat_templates").glob("*.jinja"))}
    return templates | {name: path.read_text(encoding="utf-8") for name, path in files.items()}
