"""Declares the built-in architectures."""

from __future__ import annotations

from collections.abc import Sequence

from deepinfer_core.api import LazyRef, ModelInfo, PluginInfo, hookimpl


@hookimpl
def deepinfer_plugin() -> PluginInfo:
    return PluginInfo(
        name="models", api=(1, 1), help="Built-in model families: Llama, Qwen3 and DeepSeek-V4, and their draft modules"
    )


@hookimpl
def deepinfer_models() -> Sequence[ModelInfo]:
    return [
        ModelInfo(
            architectures=("LlamaForCausalLM", "Qwen3ForCausalLM"),
            definition=LazyRef("deepinfer_core.models.dense:DenseModel"),
        ),
        ModelInfo(
            architectures=("DeepseekV4ForCausalLM",),
            definition=LazyRef("deepinfer_core.models.deepseek_v4.model:DeepseekV4Model"),
        ),
        ModelInfo(
            architectures=("DeepseekV4MTP",), definition=LazyRef("deepinfer_core.models.deepseek_v4.mtp:DeepseekV4MTP")
        ),
        ModelInfo(
            architectures=("DeepseekV4DSpark",),
            definition=LazyRef("deepinfer_core.models.deepseek_v4.dspark:DeepseekV4DSpark"),
        ),
        ModelInfo(
            architectures=("Qwen3DSparkModel",), definition=LazyRef("deepinfer_core.models.qwen3_dspark:Qwen3DSpark")
        ),
    ]
