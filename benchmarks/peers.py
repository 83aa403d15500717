"""Other engines over the same checkpoint, each at its usual way of working; those not installed say so."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch

Prompts = Sequence[Sequence[int]]


@attrs.frozen
class Peer:
    """``run(prompts, new_tokens)`` gives seconds and the output ids; greedy, end of sequence ignored."""

    name: str
    run: Callable[[Prompts, int], tuple[float, list[list[int]]]]
    batches: bool = True
    close: Callable[[], None] = lambda: None


def deepinfer(directory: Path, *, accelerator: str = "cpu", **config: Any) -> Peer:
    from deepinfer_core import LLM, SamplingParams, __version__

    settings = {"logging.progress": False, "kv_cache.prefix_cache": False, **config}
    llm = LLM(directory, accelerator=accelerator, config=settings)

    def run(prompts: Prompts, new_tokens: int) -> tuple[float, list[list[int]]]:
        params = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True)
        start = time.perf_counter()
        outputs = llm.generate([list(p) for p in prompts], params, progress=False)
        return time.perf_counter() - start, [o.outputs[0].token_ids for o in outputs]

    return Peer(f"deepinfer {__version__}", run, close=llm.close)


def transformers_model(directory: Path, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Any:
    import transformers

    library: Any = transformers
    library.logging.set_verbosity_error()
    model = library.AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, attn_implementation="sdpa")
    return model.to(device)


def transformers_generate(model: Any, **ways: Any) -> Peer:
    """``ways``: further arguments of ``generate``."""
    import transformers

    def run(prompts: Prompts, new_tokens: int) -> tuple[float, list[list[int]]]:
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(p)) + list(p) for p in prompts], device=model.device)
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=model.device)
        start = time.perf_counter()
        with torch.inference_mode():
            out = model.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=new_tokens,
                min_new_tokens=new_tokens,
                do_sample=False,
                pad_token_id=0,
                **ways,
            )
        found = out[:, longest:].tolist()  # waits for the device
        return time.perf_counter() - start, found

    return Peer(f"transformers {transformers.__version__} generate", run)


def transformers_continuous(model: Any) -> Peer:
    """``generate_batch``: requests enter and leave steps as they come."""
    import transformers

    def run(prompts: Prompts, new_tokens: int) -> tuple[float, list[list[int]]]:
        config = transformers.GenerationConfig(
            max_new_tokens=new_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0
        )
        start = time.perf_counter()
        found = model.generate_batch(inputs=[list(p) for p in prompts], generation_config=config)
        return time.perf_counter() - start, [output.generated_tokens for output in found.values()]

    return Peer(f"transformers {transformers.__version__} continuous batching", run)


def llama_cpp(gguf_file: Path, threads: int) -> Peer | None:
    """One sequence at a time, which is all its high-level interface does. None when it is not installed."""
    if importlib.util.find_spec("llama_cpp") is None:
        return None
    import llama_cpp

    model = llama_cpp.Llama(str(gguf_file), n_ctx=1024, n_threads=threads, n_threads_batch=threads, verbose=False)

    def run(prompts: Prompts, new_tokens: int) -> tuple[float, list[list[int]]]:
        outputs = []
        start = time.perf_counter()
        for prompt in prompts:
            model.reset()
            stream = model.generate(list(prompt), temp=0.0)
            outputs.append([next(stream) for _ in range(new_tokens)])
        return time.perf_counter() - start, outputs

    return Peer(f"llama.cpp ({llama_cpp.__version__})", run, batches=False)


def weights_alone(directory: Path) -> Peer:
    """No engine: every weight matrix is multiplied by as many rows as there are prompts, once a step, and no more.

    With one row that is reading the weights at the speed of memory, the floor of any engine's step.
    """
    from safetensors.torch import load_file

    pack, multiply = torch.ops.mkldnn._reorder_linear_weight, torch.ops.mkldnn._linear_pointwise.default
    loaded = load_file(directory / "model.safetensors").values()
    weights = [(weight.shape[1], pack(weight, 32)) for weight in loaded if weight.dim() == 2]

    def run(prompts: Prompts, new_tokens: int) -> tuple[float, list[list[int]]]:
        rows = {width: torch.randn(len(prompts), width) for width, _ in weights}
        start = time.perf_counter()
        with torch.inference_mode():
            for _ in range(new_tokens):
                for width, weight in weights:
                    multiply(rows[width], weight, None, "none", [], "")
        return time.perf_counter() - start, []

    return Peer(f"weights alone, torch {torch.__version__}", run)


def vllm(directory: Path) -> Peer | None:
    """In one process, eager. None when it is not installed."""
    if importlib.util.find_spec("vllm") is None:
        return None
    import os

    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
    if os.environ.get("ATEN_CPU_CAPABILITY") == "avx2":  # it asks the processor itself which of its kernels to load
        torch.cpu._is_avx512_supported = torch.cpu._is_avx512_bf16_supported = lambda: False
    from vllm import LLM, SamplingParams, __version__

    llm = LLM(
        str(directory),
        dtype="float32",
        enforce_eager=True,
        max_model_len=1024,
        max_num_batched_tokens=8192,
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
    )

    def run(prompts: Prompts, new_tokens: int) -> tuple[float, list[list[int]]]:
        params = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
        start = time.perf_counter()
        outputs = llm.generate([{"prompt_token_ids": list(p)} for p in prompts], params, use_tqdm=False)
        return time.perf_counter() - start, [list(o.outputs[0].token_ids) for o in outputs]

    return Peer(f"vllm {__version__}", run)


def write_gguf(directory: Path, target: Path) -> Path:
    """The checkpoint of ``common.random_qwen3`` as a float32 GGUF file, with a vocabulary of placeholder tokens."""
    import json

    import gguf
    from safetensors.torch import load_file

    config = json.loads((directory / "config.json").read_text())
    writer = gguf.GGUFWriter(str(target), "qwen3")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list([f"<{i}>" for i in range(config["vocab_size"])])
    writer.add_token_types([gguf.TokenType.NORMAL] * config["vocab_size"])
    writer.add_token_merges(["< 0"])  # never used, but the field may not be empty
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, config["num_hidden_layers"])
    for name, tensor in load_file(directory / "model.safetensors").items():
        stem, _, suffix = name.rpartition(".")
        writer.add_tensor(f"{names.get_name(stem)}.{suffix}", tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target
