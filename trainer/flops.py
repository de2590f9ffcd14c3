"""Model FLOPs of a training step, and what the GPU could do at best, for MFU.

The convention is the one of PaLM (arXiv 2204.02311, appendix B): the matrix products that the
gradient needs, whatever the implementation does beside. A product with a weight of n numbers
takes 2n a token forward, 2n for the gradient of its input where one is needed, and 2n for the
gradient of the weight where it is trained; so 6n in full fine-tuning, and about 4n for LoRA's
frozen base. Not counted: looking up embeddings, recomputation by activation checkpointing,
norms, softmax, the optimizer. Unlike PaLM's formula, attention counts only the keys that a
query may see (causal, each document by itself), and the output layer only trained positions;
padding counts nowhere.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import nn

from trainer import nf4
from trainer.compat import TiedLinear, TransformerDecoder

GPUS = Path(__file__).parents[1] / "configs/gpus.yaml"


@dataclass(frozen=True)
class ModelFlops:
    """FLOPs forward and backward: a token's, a trained position's, a query-key pair's."""

    token: float
    target: float
    pair: float

    def of(self, tokens: float, targets: float, pairs: float) -> float:
        """FLOPs of a step over all ranks.

        Args:
            tokens: real tokens, no padding.
            targets: positions with a label that is trained.
            pairs: query-key pairs; a document of n tokens has n(n + 1)/2.
        """
        return tokens * self.token + targets * self.target + pairs * self.pair


def model_flops(model: TransformerDecoder) -> ModelFlops:
    """What `model` needs, sharded or not, with the parameters trained that require a gradient."""
    token = pair = 0.0
    # Gradients flow back no further than to the first trained parameter.
    flows = _trained(model.tok_embeddings)
    for layer in model.layers:
        attention, mlp = layer.attn, layer.mlp
        stages: list[list[Any]] = [
            [layer.sa_norm],
            [attention.q_proj, attention.k_proj, attention.v_proj],
            [attention],
            [attention.output_proj],
            [layer.mlp_norm],
            [mlp.w1, mlp.w3],
            [mlp.w2],
        ]
        for modules in stages:
            if modules == [attention]:
                pair += 4 * attention.num_heads * attention.head_dim * (1 + 2 * flows)
                continue
            present = [module for module in modules if module is not None]
            token += sum(_products(module, flows) for module in present)
            flows = flows or any(_trained(module) for module in present)
    flows = flows or _trained(model.norm)
    output = model.output.tied_module if isinstance(model.output, TiedLinear) else model.output
    return ModelFlops(token, _products(output, flows), pair)


def _trained(module: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters())


def _products(module: nn.Module, flows: bool) -> float:
    """FLOPs a token of a linear layer with or without LoRA; 0 for a norm."""
    weight = getattr(module, "weight", None)
    if weight is None or weight.ndim < 2:
        return 0.0
    total = 2 * nf4.dense_numel(weight) * (1 + flows + weight.requires_grad)
    if hasattr(module, "lora_a"):
        a, b = module.lora_a.weight, module.lora_b.weight
        total += 2 * a.numel() * (1 + flows + a.requires_grad)
        total += 2 * b.numel() * (1 + (flows or a.requires_grad) + b.requires_grad)
    return total


def peak_tflops(device: torch.device) -> float | None:
    """The data sheet's dense bf16 TFLOP/s of this GPU; None on a CPU and an unknown GPU.

    Source: configs/gpus.yaml, the first entry whose `match` the driver's name contains.
    """
    if device.type != "cuda" or not GPUS.is_file():
        return None
    return known_tflops(torch.cuda.get_device_name(device))


def known_tflops(name: str) -> float | None:
    """As `peak_tflops`, by the name that the driver gives to a GPU."""
    known = yaml.safe_load(GPUS.read_text(encoding="utf-8"))
    for entry in known.values():
        if re.search(entry["match"], name, re.IGNORECASE):
            return float(entry["bf16_tflops"])
    return None
