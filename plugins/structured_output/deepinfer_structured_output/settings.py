"""What users may set, as ``plugins.structured_output.<name>``."""

from __future__ import annotations

from typing import Literal

import attrs


@attrs.frozen(kw_only=True)
class GrammarSettings:
    """Settings of structured output.

    Attributes:
        whitespace: in JSON. ``single``: one space after each comma and colon, as ``json.dumps`` writes; fewest
            tokens, and most of them forced. ``any``: wherever JSON allows it.
        mask_threads: native threads that fill the masks of a step.
    """

    whitespace: Literal["single", "any"] = "single"
    mask_threads: int = attrs.field(default=2, validator=attrs.validators.ge(1))
