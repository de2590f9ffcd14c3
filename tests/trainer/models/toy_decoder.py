"""A model that no folder names: own modules, own names on the hub, in this one file.

Its weights lie in a model folder as "toy.*": keys and values in one tensor. It has no position
embeddings; the causal mask alone tells where a token is.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn

from trainer.layers.attention import DocumentAttention, Mask
from trainer.model import Decoder, Inputs, Role

SIZES = {
    "vocab_size": 1024,
    "dim": 64,
    "layers": 2,
    "heads": 4,
    "kv_heads": 2,
    "hidden": 128,
    "max_seq_len": 512,
}
ROLES = {
    "embedding": Role.EMBEDDING,
    "blocks.*.mix": Role.REPLICATED,
    "blocks.*.attention_norm": Role.NORM,
    "blocks.*.query": Role.COLUMN,
    "blocks.*.key": Role.COLUMN,
    "blocks.*.value": Role.COLUMN,
    "blocks.*.query_norm": Role.REPLICATED,
    "blocks.*.back": Role.ROW,
    "blocks.*.mlp_norm": Role.NORM,
    "blocks.*.up": Role.COLUMN,
    "blocks.*.down": Role.ROW,
    "final_norm": Role.NORM,
    "output_head": Role.OUTPUT,
}


class Block(nn.Module):
    """A linear layer on the stream, attention with normalised queries, and an MLP with biases."""

    def __init__(self, dim: int, heads: int, kv_heads: int, hidden: int) -> None:
        super().__init__()
        self.head_dim = dim // heads
        self.mix = nn.Linear(dim, dim, bias=False)
        self.attention_norm = nn.RMSNorm(dim, eps=1e-6)
        self.query = nn.Linear(dim, dim, bias=False)
        self.key = nn.Linear(dim, kv_heads * self.head_dim, bias=False)
        self.value = nn.Linear(dim, kv_heads * self.head_dim, bias=False)
        self.query_norm = nn.RMSNorm(self.head_dim, eps=1e-6)
        self.attention = DocumentAttention(self.head_dim)
        self.back = nn.Linear(dim, dim, bias=False)
        self.mlp_norm = nn.RMSNorm(dim, eps=1e-6)
        self.up = nn.Linear(dim, hidden)
        self.down = nn.Linear(hidden, dim)

    def forward(self, x: torch.Tensor, mask: Mask = None) -> torch.Tensor:
        x = x + self.mix(x)
        inner = self.attention_norm(x)
        query, key, value = (
            layer(inner).unflatten(-1, (-1, self.head_dim))
            for layer in (self.query, self.key, self.value)
        )
        x = x + self.back(self.attention(self.query_norm(query), key, value, mask).flatten(2))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


class ToyDecoder(Decoder):
    """A small causal language model."""

    def __init__(
        self,
        vocab_size: int,
        dim: int,
        layers: int,
        heads: int,
        kv_heads: int,
        hidden: int,
        max_seq_len: int,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, dim)
        self.blocks = nn.ModuleList(Block(dim, heads, kv_heads, hidden) for _ in range(layers))
        self.final_norm = nn.RMSNorm(dim, eps=1e-6)
        self.output_head = nn.Linear(dim, vocab_size, bias=False)
        self.max_seq_len = max_seq_len
        self._sizes = {"num_heads": heads, "num_kv_heads": kv_heads, "intermediate_dim": hidden}

    def hidden(self, inputs: Inputs) -> torch.Tensor:
        x = self.embedding(inputs.tokens)
        for block in self.blocks:
            x = block(x, inputs.documents)
        return x

    def roles(self) -> dict[str, Role]:
        return ROLES

    def sizes(self) -> dict[str, int]:
        return self._sizes

    def fit(self, hf_config: dict[str, Any], config: Any) -> list[str]:
        if hf_config.get("model_type") != "toy":
            return [f"model: config.json has model_type {hf_config.get('model_type')}, not toy"]
        return []

    def hub_name(self, parameter: str) -> str:
        return "toy." + parameter.replace(".key.", ".key_value.").replace(".value.", ".key_value.")


def write_folder(folder: Path, tokenizer: Path) -> Path:
    """Write a random model with the tokenizer of another folder; return `folder`."""
    folder.mkdir(parents=True)
    for path in [*tokenizer.glob("*token*"), *tokenizer.glob("chat_template*")]:
        shutil.copyfile(path, folder / path.name)
    (folder / "config.json").write_text(json.dumps({"model_type": "toy"} | SIZES))
    torch.manual_seed(0)
    dim, kv, hidden = 64, 32, 128
    shapes = {"embedding": (1024, dim), "final_norm": (dim,), "output_head": (1024, dim)}
    for index in range(2):
        block = {
            "mix": (dim, dim),
            "attention_norm": (dim,),
            "query": (dim, dim),
            "key_value": (2 * kv, dim),
            "query_norm": (16,),
            "back": (dim, dim),
            "mlp_norm": (dim,),
            "up": (hidden, dim),
            "down": (dim, hidden),
        }
        shapes |= {f"blocks.{index}.{name}": shape for name, shape in block.items()}
    tensors = {
        f"toy.{name}.weight": 1 + 0.2 * torch.randn(shape)
        if len(shape) == 1
        else 0.05 * torch.randn(shape)
        for name, shape in shapes.items()
    }
    for index in range(2):
        for name, size in (("up", hidden), ("down", dim)):
            tensors[f"toy.blocks.{index}.{name}.bias"] = 0.1 * torch.randn(size)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
