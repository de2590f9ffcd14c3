"""Shares of a GPU's data sheet that kernels and links reach."""

from typing import NamedTuple

from launcher.gpus import Gpu

# Of a link's data sheet, what NCCL reaches with large messages. Its developers name 370 of NVLink's
# 450 GB/s on H100 (NVIDIA/nccl-tests issue 212) and 46 to 48 of the 50 of a 400 Gbit/s port (290);
# 32 nodes of eight such ports gave 340 of 400 (NVIDIA/nccl issue 1218). For others an assumption.
REACHED = 0.8


class Reached(NamedTuple):
    """What kernels reach of a GPU's data sheet, as shares."""

    # By large bf16 products.
    products: float
    # By FlashAttention on long rows.
    attention: float
    attention_backward: float
    # Of `products`, by those of experts in one kernel.
    grouped: float
    # Speed of fp8 products, over bf16's.
    fp8: float = 1.7
    # Of the bandwidth, by elementwise kernels.
    memory: float = 0.85
    # Seconds of the host to launch a kernel.
    launch_s: float = 8e-6

    @classmethod
    def of(cls, gpu: Gpu) -> "Reached":
        """Return what is usual on a kind of GPU.

        Cards with more than 400 TFLOP/s are held back by their power, and FlashAttention 2 does
        not use what is new in them, so it is as fast on all: on H100 it reaches 350 to 370 TFLOP/s
        forward and about 290 backward (Shah et al. 2024, arXiv 2407.08608, figures 5 and 6), on
        A100 200 and 180 (Dao 2023, arXiv 2307.08691, figures 4 to 6).
        """
        if gpu.bf16_tflops <= 400:
            return AMPERE
        more = max(1.0, gpu.bf16_tflops / 989.4)
        forward, backward = HOPPER.attention / more, HOPPER.attention_backward / more
        return HOPPER._replace(attention=forward, attention_backward=backward)


HOPPER = Reached(products=0.66, attention=0.37, attention_backward=0.29, grouped=0.6)
AMPERE = Reached(products=0.80, attention=0.65, attention_backward=0.58, grouped=0.6)
