"""Every import of torchtune and torchao that may break between versions, in one place.

Tested with torchtune 0.6.1, torchao 0.15.0 and torch 2.11 to 2.13.
"""

from torchtune.models.gemma.gemma_norm_embedding import GemmaNormEmbeddings
from torchtune.models.gemma.rms_norm import GemmaRMSNorm
from torchtune.models.llama3_1 import Llama3ScaledRoPE
from torchtune.models.phi3 import Phi3RotaryPositionalEmbeddings
from torchtune.models.qwen2 import Qwen2RotaryPositionalEmbeddings
from torchtune.modules import (
    FeedForward,
    MultiHeadAttention,
    RMSNorm,
    RotaryPositionalEmbeddings,
    TiedLinear,
    TransformerDecoder,
)
from torchtune.modules.peft import DoRALinear, LoRALinear

__all__ = [
    "DoRALinear",
    "FeedForward",
    "GemmaNormEmbeddings",
    "GemmaRMSNorm",
    "Llama3ScaledRoPE",
    "LoRALinear",
    "MultiHeadAttention",
    "Phi3RotaryPositionalEmbeddings",
    "Qwen2RotaryPositionalEmbeddings",
    "RMSNorm",
    "RotaryPositionalEmbeddings",
    "TiedLinear",
    "TransformerDecoder",
]
