"""Draft modules by transformers' layers: their inputs, keys and masks are put in from outside."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import attrs
import torch
from safetensors.torch import load_file
from transformers import DeepseekV4ForCausalLM

from v4.support import SLIDING, random_model

EPS = 1e-6


def stages(seed: int, count: int, main: DeepseekV4ForCausalLM) -> Any:
    """``count`` window-only layers with scored experts, under the main model's embedding and output head."""
    changes = {"num_hidden_layers": count, "layer_types": [SLIDING] * count, "mlp_layer_types": ["moe"] * count}
    model = random_model(seed, **changes)
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(main.model.embed_tokens.weight)
        model.lm_head.weight.copy_(main.lm_head.weight)
    return model


def released(model: DeepseekV4ForCausalLM, directory: Path) -> dict[str, torch.Tensor]:
    """Tensors under released names, by way of what transformers saves."""
    model.save_pretrained(directory)
    found = {}
    for name, tensor in load_file(directory / "model.safetensors").items():
        name = name.removeprefix("model.").replace("embed_tokens.", "embed.").replace("hc_head.hc_", "hc_head_")
        found[name.replace("attn.norm.weight", "attn.kv_norm.weight")] = tensor
    return found


def as_drafts(tensors: dict[str, torch.Tensor], count: int) -> dict[str, torch.Tensor]:
    """The stages' tensors as ``mtp.*``: layers by number, sum and norm with the last."""
    last = f"mtp.{count - 1}."
    renamed = {}
    for name, tensor in tensors.items():
        if name.startswith("layers."):
            renamed["mtp." + name.removeprefix("layers.")] = tensor
        elif name.startswith("hc_head_") or name == "norm.weight":
            renamed[last + name] = tensor
    return renamed


def rms(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)


@contextmanager
def hooked(*hooks: Any) -> Iterator[None]:
    with ExitStack() as stack:
        for hook in hooks:
            stack.callback(hook.remove)
        yield


def main_streams(model: DeepseekV4ForCausalLM, tokens: Sequence[int], layers: Sequence[int]) -> list[torch.Tensor]:
    """Streams ``[T, M, hidden]`` leaving these layers."""
    found: dict[int, torch.Tensor] = {}

    def keep(layer: int) -> Callable[..., None]:
        return lambda _module, _inputs, output: found.__setitem__(layer, output[0].detach())

    hooks = [model.model.layers[layer].register_forward_hook(keep(layer)) for layer in set(layers)]
    with hooked(*hooks), torch.inference_mode():
        model(torch.tensor([list(tokens)]), use_cache=False)
    return [found[layer] for layer in layers]


def mtp(
    stage: DeepseekV4ForCausalLM, extra: dict[str, torch.Tensor], streams: torch.Tensor, following: Sequence[int]
) -> torch.Tensor:
    """Logits ``[T, vocab]`` of the next-token module; ``following[t]`` is the token after position t."""
    ids = torch.tensor([list(following)])
    token = rms(stage.model.embed_tokens.weight[ids[0]], extra["mtp.0.enorm.weight"]) @ extra["mtp.0.e_proj.weight"].T
    rows = rms(streams, extra["mtp.0.hnorm.weight"]) @ extra["mtp.0.h_proj.weight"].T + token[:, None]
    hook = stage.model.layers[0].register_forward_pre_hook(lambda _module, inputs: (rows[None], *inputs[1:]))
    with hooked(hook), torch.inference_mode():
        logits: torch.Tensor = stage(ids, use_cache=False).logits[0]
    return logits


@attrs.frozen(eq=False)
class Block:
    """``logits [block, vocab]`` before the Markov head, and ``hidden [block, hidden]`` before the norm."""

    logits: torch.Tensor
    hidden: torch.Tensor


def dspark(stage: DeepseekV4ForCausalLM, features: torch.Tensor, newest: int, noise: int, size: int) -> Block:
    """A block after ``features [P, hidden]`` (normed) of positions 0 .. P-1."""
    past, window = len(features), stage.config.sliding_window
    whole = past + size
    mask = torch.full((1, 1, whole, whole), float("-inf"))
    mask[0, 0].fill_diagonal_(0)
    mask[0, 0, past:, max(0, past - window) :] = 0
    hooks = []
    kept: list[torch.Tensor] = []
    for layer in stage.model.layers:
        attention = layer.self_attn

        def put(module: Any, _inputs: Any, output: torch.Tensor) -> torch.Tensor:
            return torch.cat(((features @ module.weight.T)[None], output[:, past:]), 1)

        hooks.append(attention.kv_proj.register_forward_hook(put))
        hooks.append(
            attention.register_forward_pre_hook(
                lambda _module, args, kwargs: (args, kwargs | {"attention_mask": mask}), with_kwargs=True
            )
        )
    hooks.append(stage.model.hc_head.register_forward_hook(lambda _m, _i, output: kept.append(output[0])))
    ids = torch.tensor([[noise] * past + [newest] + [noise] * (size - 1)])
    with hooked(*hooks), torch.inference_mode():
        logits = stage(ids, use_cache=False).logits[0, past:]
    return Block(logits, kept[0][past:])
