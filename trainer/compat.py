"""Every import of torchtune and torchao that may break between versions, in one place.

Seen to work with torchtune 0.6.1, torchao 0.15.0 and torch 2.11 to 2.13.
"""

import logging

# torchao says that its C++ kernels do not fit this torch; none of them is used here.
logging.getLogger("torchao").addFilter(
    lambda record: "Skipping import of cpp extensions" not in record.getMessage()
)

from torchtune.data import padded_collate_sft  # noqa: E402
from torchtune.models.convert_weights import (  # noqa: E402
    _FROM_HF,
    get_mapped_key,
    hf_to_tune,
    tune_to_hf,
    tune_to_peft_adapter_weights,
)
from torchtune.modules import (  # noqa: E402
    FeedForward,
    MultiHeadAttention,
    RMSNorm,
    TiedLinear,
    TransformerDecoder,
    TransformerSelfAttentionLayer,
)
from torchtune.modules.peft import DoRALinear, LoRALinear, get_adapter_params  # noqa: E402
from torchtune.training import (  # noqa: E402
    get_act_offloading_ctx_manager,
    prepare_mha_for_tp,
)

_TO_HF = {tune: hf for hf, tune in _FROM_HF.items() if tune is not None}


def hf_name(name: str) -> str:
    """The Hugging Face name of a torchtune base parameter (plain Llama layout)."""
    return get_mapped_key(name, _TO_HF)


__all__ = [
    "DoRALinear",
    "FeedForward",
    "LoRALinear",
    "MultiHeadAttention",
    "RMSNorm",
    "TiedLinear",
    "TransformerDecoder",
    "TransformerSelfAttentionLayer",
    "get_act_offloading_ctx_manager",
    "get_adapter_params",
    "hf_name",
    "hf_to_tune",
    "padded_collate_sft",
    "prepare_mha_for_tp",
    "tune_to_hf",
    "tune_to_peft_adapter_weights",
]
