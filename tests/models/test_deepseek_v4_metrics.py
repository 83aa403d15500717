"""Expert loads of DeepSeek-V4 as metrics: every row counts once for each expert it was sent to, in every layer."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families
from v4.support import BLOCK, random_model, random_tokens

from deepinfer_core import LLM, SamplingParams

PROMPTS, OUT = (5, 21, 40), 7


def expert_rows(llm: LLM) -> dict[tuple[int, str], int]:
    """(layer, expert) -> rows."""
    families = {family.name: family for family in text_string_to_metric_families(llm.metrics_text())}
    samples = families["deepinfer_expert_rows"].samples
    return {(int(s.labels["layer"]), s.labels["expert"]): int(s.value) for s in samples if s.name.endswith("_total")}


def test_expert_loads_add_up_to_rows_times_experts_per_token(tmp_path: Path) -> None:
    model = random_model(3)
    model.generation_config.eos_token_id = model.config.eos_token_id = None
    model.save_pretrained(tmp_path)
    config = model.config
    settings: dict[str, Any] = {
        "kv_cache": {"block_size": BLOCK, "prefix_cache": False},
        "logging": {"progress": False, "metrics": ("prometheus",)},
    }
    prompts = [random_tokens(i, n) for i, n in enumerate(PROMPTS)]
    with LLM(str(tmp_path), **settings) as llm:
        assert set(expert_rows(llm).values()) == {0}
        inputs: Any = [{"prompt_token_ids": p} for p in prompts]
        outputs = llm.generate(inputs, SamplingParams(max_tokens=OUT, temperature=0), progress=False)
        found = expert_rows(llm)
    texts = [prompt + list(output.outputs[0].token_ids) for prompt, output in zip(prompts, outputs, strict=True)]
    # The last token of an output is never computed on.
    rows = sum(len(text) - 1 for text in texts)
    per_layer = Counter[int]()
    for (layer, expert), count in found.items():
        if expert == "nan":
            assert count == 0
        else:
            per_layer[layer] += count
    assert per_layer == dict.fromkeys(range(config.num_hidden_layers), rows * config.num_experts_per_tok)
    table = model.model.layers[0].mlp.gate.tid2eid
    wanted = Counter(int(e) for text in texts for token in text[:-1] for e in table[token])
    assert {int(e): n for (layer, e), n in found.items() if layer == 0 and e != "nan" and n} == dict(wanted)
