"""Reads what users write about the form of their output into a :class:`ConstraintSpec`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from deepinfer_core.api import ConstraintKind, ConstraintSpec, InvalidRequestError

KINDS: Mapping[str, ConstraintKind] = {
    "json": "json",
    "json_object": "json_object",
    "regex": "regex",
    "ebnf": "ebnf",
    "grammar": "ebnf",
    "choice": "choice",
    "structural_tags": "structural_tags",
    "structural_tag": "structural_tags",
}
"""Key of ``structured_outputs`` -> kind; ``grammar`` and ``structural_tag`` are the names vLLM uses."""

SCHEMA_TYPES: Mapping[str, ConstraintKind] = {"json": "json", "regex": "regex", "ebnf": "ebnf"}
SO_KEYS = ("schema_type", "schema", "trigger_token_ids", "bound_token_id")
MAX_TEXT = 1_000_000
"""Characters a schema or grammar may have."""


def constraint_of(structured_outputs: Any, so_args: Any) -> ConstraintSpec | None:
    """The constraint of a request; None when neither argument is given.

    Args:
        structured_outputs: a mapping with one of :data:`KINDS`, or a ConstraintSpec.
        so_args: a mapping with the keys :data:`SO_KEYS`, the first two of them required.

    Raises:
        InvalidRequestError: names the key, its value and what was expected.
    """
    if structured_outputs is not None and so_args is not None:
        raise InvalidRequestError("structured_outputs and so_args: two ways to say one thing; give one of them")
    if so_args is not None:
        return _from_so_args(so_args)
    if structured_outputs is None or isinstance(structured_outputs, ConstraintSpec):
        return structured_outputs
    if not isinstance(structured_outputs, Mapping):
        _refuse("structured_outputs", structured_outputs, f"a mapping with one of {', '.join(KINDS)}")
    given = {key: value for key, value in structured_outputs.items() if value is not None}
    if len(given) != 1 or not given.keys() <= KINDS.keys():
        _refuse("structured_outputs", structured_outputs, f"exactly one of {', '.join(KINDS)}")
    ((key, value),) = given.items()
    return ConstraintSpec(kind=KINDS[key], text=_text(f"structured_outputs[{key!r}]", KINDS[key], value))


def _from_so_args(so_args: Any) -> ConstraintSpec:
    if not isinstance(so_args, Mapping):
        _refuse("so_args", so_args, f"a mapping with {', '.join(SO_KEYS)}")
    for key in so_args:
        if key not in SO_KEYS:
            raise InvalidRequestError(f"so_args[{key!r}]: expected one of {', '.join(SO_KEYS)}")
    schema_type = so_args.get("schema_type")
    if not isinstance(schema_type, str) or schema_type not in SCHEMA_TYPES:
        _refuse("so_args['schema_type']", schema_type, "'json', 'regex' or 'ebnf'")
    if so_args.get("schema") is None:
        raise InvalidRequestError("so_args['schema'] is missing: give the schema, regular expression or grammar")
    kind = SCHEMA_TYPES[schema_type]
    trigger = so_args.get("trigger_token_ids") or ()
    if isinstance(trigger, str) or not isinstance(trigger, Sequence) or not all(map(_is_token, trigger)):
        _refuse("so_args['trigger_token_ids']", trigger, "a list of token ids (integers >= 0)")
    bound = so_args.get("bound_token_id")
    if bound is not None and not _is_token(bound):
        _refuse("so_args['bound_token_id']", bound, "a token id (integer >= 0)")
    if bound is not None and not trigger:
        raise InvalidRequestError("so_args['bound_token_id'] forces trigger_token_ids: give these too")
    return ConstraintSpec(
        kind=kind,
        text=_text("so_args['schema']", kind, so_args["schema"]),
        trigger_token_ids=tuple(trigger),
        bound_token_id=bound,
    )


def _is_token(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31


def _text(name: str, kind: ConstraintKind, value: Any) -> str:
    if kind == "json_object":
        if value is not True:
            _refuse(name, value, "True")
        return ""
    if kind == "choice":
        choices = [value] if isinstance(value, str) else value
        if not isinstance(choices, Sequence) or not choices or not all(isinstance(c, str) and c for c in choices):
            _refuse(name, value, "a list of one or more non-empty strings")
        return _dumps(name, list(dict.fromkeys(choices)))
    if kind in ("json", "structural_tags"):
        return _dumps(name, _document(name, kind, value))
    if not isinstance(value, str) or not value.strip():
        _refuse(name, value, "a non-empty string")
    return _short(name, value)


def _document(name: str, kind: ConstraintKind, value: Any) -> Any:
    if isinstance(value, str):
        try:
            value = json.loads(value, parse_constant=lambda word: _refuse(name, word, "a JSON number"))
        except json.JSONDecodeError as error:
            near = value[max(0, error.pos - 20) : error.pos + 20]
            raise InvalidRequestError(f"{name} is no JSON: {error}, near {near!r}") from None
        except RecursionError:
            raise InvalidRequestError(f"{name} nests too deeply to be read: {_dumped(value)}") from None
    elif kind == "json" and hasattr(value, "model_json_schema"):
        value = value.model_json_schema()
    if kind == "json" and not isinstance(value, Mapping | bool):
        _refuse(name, value, "a JSON Schema: an object, true, or the text of one")
    if kind == "structural_tags":
        _check_tags(name, value)
    return value


def _check_tags(name: str, value: Any) -> None:
    if not isinstance(value, Mapping) or value.keys() != {"structures", "triggers"}:
        _refuse(name, value, "{'structures': [{'begin', 'schema', 'end'}, ...], 'triggers': [text, ...]}")
    structures, triggers = value["structures"], value["triggers"]
    if not isinstance(triggers, Sequence) or not triggers or not all(isinstance(t, str) and t for t in triggers):
        _refuse(f"{name}['triggers']", triggers, "a list of one or more non-empty strings")
    if not isinstance(structures, Sequence) or not structures:
        _refuse(f"{name}['structures']", structures, "a list of one or more tags")
    for index, tag in enumerate(structures):
        where = f"{name}['structures'][{index}]"
        if not isinstance(tag, Mapping) or tag.keys() != {"begin", "schema", "end"}:
            _refuse(where, tag, "{'begin': text, 'schema': a JSON Schema, 'end': text}")
        if not isinstance(tag["begin"], str) or not isinstance(tag["end"], str):
            _refuse(where, tag, "texts for 'begin' and 'end'")
        if not isinstance(tag["schema"], Mapping | bool):
            _refuse(f"{where}['schema']", tag["schema"], "a JSON Schema: an object or true")
        if sum(tag["begin"].startswith(trigger) for trigger in triggers) != 1:
            _refuse(f"{where}['begin']", tag["begin"], "a text that begins with exactly one of the triggers")


def _dumps(name: str, value: Any) -> str:
    """Normalised JSON: however a character was escaped, it is the same schema."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        text.encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequestError(f"{name} cannot be written as JSON: {error}") from None
    return _short(name, text)


def _short(name: str, text: str) -> str:
    if len(text) > MAX_TEXT:
        raise InvalidRequestError(f"{name} has {len(text)} characters: expected at most {MAX_TEXT}")
    return text


def _dumped(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."


def _refuse(name: str, value: Any, expected: str) -> NoReturn:
    raise InvalidRequestError(f"{name}={_dumped(value)}: expected {expected}")
