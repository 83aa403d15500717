"""Environment variables of the original DeepInfer engine: what each means here, or why it means nothing.

Names are patterns as of :mod:`fnmatch`, so that one line speaks for a family of variables.
"""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatchcase

import attrs

from .accept import Text


def _flag(text: str) -> bool:
    """The original's flags: anything but nothing, zero and false is on."""
    return text not in ("", "0", "false", "False")


def _schedule(text: str) -> str:
    return "confidence" if _flag(text) else "fixed"


@attrs.frozen
class Counterpart:
    """A variable that still works: the setting it sets, and how its text is read."""

    path: str
    read: Callable[[str], object] = Text


COUNTERPARTS = {
    "DEEPINFER_BATCH_INVARIANT": Counterpart("features.batch_invariant", _flag),
    "DEEPINFER_ZERO_OVERHEAD_SCHEDULING": Counterpart("scheduling.async_scheduling", _flag),
    "DEEPINFER_USE_NEXTN_DECODE": Counterpart("speculation.max_draft_tokens"),
    "DEEPINFER_ENABLE_MTP_VARLEN": Counterpart("speculation.schedule", _schedule),
    "DEEPINFER_DFLASH_CONFIDENCE_HEAD_TEMPERATURE": Counterpart("speculation.confidence_temperature"),
}
"""``DEEPINFER_ACCELERATOR`` has the same name in both engines and is not listed."""

_BACKEND = "a backend decides it; see that backend's settings in `deepinfer plugins --load`"
_EXPERTS = "one process runs one model, so experts are neither spread nor moved"
_GRAMMAR = "the plugin that compiles grammars has its own settings; see `deepinfer plugins --load`"
_MEDIA = "there is no image or video input"
_PROFILE = "use logging.trace_file, or a profiler from outside"
_CHUNKS = "prompt chunks and decode rows share every step; scheduling.max_batch_tokens bounds it"

NO_COUNTERPART: tuple[tuple[str, str], ...] = (
    # Files
    ("DEEPINFER_HF_MODEL_DIR", "set model.path (DEEPINFER_MODEL__PATH) or pass --model"),
    ("DEEPINFER_JIT_CACHE_DIR", _BACKEND),
    ("DEEPINFER_DECODE_PERF_CACHE_*", "step costs are measured at run time and kept in memory"),
    # Scheduling and memory
    ("DEEPINFER_PREFILL_*ATTEMPT_INTERVAL", _CHUNKS),
    ("DEEPINFER_PREFILL_MAX_SUM_SEQLEN_K", _CHUNKS),
    ("DEEPINFER_INDEX_ATTN_MEMORY_LIMIT", _BACKEND),
    ("DEEPINFER_MAX_BACKTRACKING_TOKENS", "caches are paged and rewritten in place, so nothing has to be rolled back"),
    ("DEEPINFER_NUM_STATE_SLOTS_RATIO", "all state is paged; kv_cache.num_blocks sets how much there is"),
    ("DEEPINFER_PREFILL_STORE_EXTRA_*", "all state is paged; kv_cache.window_retention says what is kept"),
    ("DEEPINFER_YOCO_PREFILL_*", "prompts are always computed in full"),
    ("DEEPINFER_GC_INTERVAL_STEP", "Python's garbage collector is left alone"),
    ("DEEPINFER_DISABLE_SYNC_GUARD", "there is no such guard to disable"),
    # Sampling
    ("DEEPINFER_SAMPLER_FORCE_TOPK", "give top_k with each request"),
    ("DEEPINFER_DECODE_TOKEN_BLACKLIST", "give logit_bias, bad_words or allowed_token_ids with each request"),
    ("DEEPINFER_COMPUTE_SUM_SMALLER_PROBS", "ask for logprobs with each request"),
    # Graphs, kernels, communication
    ("DEEPINFER_*ENFORCE_EAGER", _BACKEND),
    ("DEEPINFER_*CUDAGRAPH_BATCH_SIZE_INTERVAL", _BACKEND),
    ("DEEPINFER_NCCL_*", _BACKEND),
    ("DEEPINFER_USERBUFFER_COMM_SMS", _BACKEND),
    ("DEEPINFER_GLOO_TIMEOUT", "one process runs one model; nothing is exchanged"),
    # Experts
    ("DEEPINFER_REARRANGE_*", _EXPERTS),
    ("DEEPINFER_OVERRIDE_NUM_EXTRA_EXPERTS", _EXPERTS),
    ("DEEPINFER_EXPERT_*", _EXPERTS),
    ("DEEPINFER_MOE_LB_STAT_INTERVAL", _EXPERTS),
    ("DEEPINFER_SHOW_EPLB_DETAIL", _EXPERTS),
    ("DEEPINFER_FORCE_LOAD_BALANCE", "routing is never falsified; benchmark with random weights"),
    ("DEEPINFER_FORCE_IMBALANCE_RATIO", "routing is never falsified; benchmark with random weights"),
    # Models
    ("DEEPINFER_ENGRAM_PAD_TOKEN", "the checkpoint's configuration says it"),
    ("DEEPINFER_ENGRAM_FORCE_GPU_STORAGE", _BACKEND),
    # Structured outputs
    ("DEEPINFER_*GRAMMAR_*", _GRAMMAR),
    ("DEEPINFER_SO_BUILDER_CPUS", _GRAMMAR),
    # Logs and profiles
    ("DEEPINFER_CPP_LOG_LEVEL", "set logging.level (DEEPINFER_LOGGING__LEVEL)"),
    ("DEEPINFER_LOGGING_INTERVAL_STEP", "name a sink in logging.metrics; it receives every step"),
    ("DEEPINFER_RINGBUFFER_WARNING_INTERVAL", "there is no ring buffer"),
    ("DEEPINFER_PROFILE_TORCH_*_MEMORY", _PROFILE),
    ("DEEPINFER_ENABLE_MEMORY_TRACING", _PROFILE),
    ("DEEPINFER_PROFILE_HTTP_*", _PROFILE),
    ("DEEPINFER_TORCH_PROFILER_DIR", _PROFILE),
    # Images
    ("DEEPINFER_USE_MULTIMODAL_POOL", _MEDIA),
    ("DEEPINFER_MULTIMODAL_POOL_SIZE_GB", _MEDIA),
    ("DEEPINFER_MULTI_MODAL_*", _MEDIA),
)
"""Pattern -> what to do instead, or why there is nothing to do."""


def why_not(name: str) -> str | None:
    """What to do instead of setting ``name``; None when the original engine had no such variable."""
    return next((reason for pattern, reason in NO_COUNTERPART if fnmatchcase(name, pattern)), None)
