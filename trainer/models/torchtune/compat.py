"""Every import of torchtune and torchao that may break between versions, in one place.

Tested with torchtune 0.6.1, torchao 0.15.0 and torch 2.11 to 2.13.
"""

import logging

# torchao warns that its C++ kernels do not fit this torch; none of them is used here.
logging.getLogger("torchao").addFilter(
    lambda record: "Skipping import of cpp extensions" not in record.getMessage()
)

from torchtune.models.gemma.gemma_norm_embedding import GemmaNormEmbeddings  # noqa: E402
from torchtune.models.gemma.rms_norm import GemmaRMSNorm  # noqa: E402
from torchtune.models.gemma2._attention import Gemma2Attention  # noqa: E402
from torchtune.models.gemma2._component_builders import Gemma2FinalNorm  # noqa: E402
from torchtune.models.llama3_1._position_embeddings import Llama3ScaledRoPE  # noqa: E402
from torchtune.models.phi3._position_embeddings import (  # noqa: E402
    Phi3RotaryPositionalEmbeddings,
)
from torchtune.models.qwen2._positional_embeddings import (  # noqa: E402
    Qwen2RotaryPositionalEmbeddings,
)
from torchtune.modules import (  # noqa: E402
    FeedForward,
    MultiHeadAttention,
    RMSNorm,
    RotaryPositionalEmbeddings,
    TiedLinear,
    TransformerDecoder,
)
from torchtune.modules.peft import DoRALinear, LoRALinear  # noqa: E402

__all__ = [
    "DoRALinear",
    "FeedForward",
    "Gemma2Attention",
    "Gemma2FinalNorm",
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
