"""The plugin's settings, ``plugins.spec_decode.*``."""

from __future__ import annotations

import attrs


@attrs.frozen(kw_only=True)
class Settings:
    """What users may set.

    Attributes:
        draft_model: checkpoint of the smaller model for ``draft_model``.
        drafter: checkpoint of the draft module for ``dspark`` and ``mtp``, or the name of one that comes with this
            plugin; "": it is in the target's.
        ngram_max, ngram_min: longest and shortest run of tokens that ``ngram`` looks for.
        calibration: "auto": temperatures from beside the checkpoint, if they were fitted; "off": none.
        record_file: append what became of every draft to this file, as JSON lines (``calibrate-drafter`` reads them).
        cost_cache: directory of measured cost tables; "": the user's cache directory; "off": measure at each start.
        cost_cache_hours: age at which a cached table is measured again.
        probe_steps: while verifying does not pay, draft again after so many steps at least.
    """

    draft_model: str = ""
    drafter: str = ""
    ngram_max: int = attrs.field(default=4, validator=attrs.validators.ge(1))
    ngram_min: int = attrs.field(default=1, validator=attrs.validators.ge(1))
    calibration: str = attrs.field(default="auto", validator=attrs.validators.in_(("auto", "off")))
    record_file: str = ""
    cost_cache: str = ""
    cost_cache_hours: float = attrs.field(default=168.0, validator=attrs.validators.gt(0))
    probe_steps: int = attrs.field(default=32, validator=attrs.validators.ge(1))

    def __attrs_post_init__(self) -> None:
        if self.ngram_min > self.ngram_max:
            raise ValueError(f"ngram_min = {self.ngram_min}: expected at most ngram_max = {self.ngram_max}")
