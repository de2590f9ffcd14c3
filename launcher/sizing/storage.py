"""What a run keeps outside the GPUs: checkpoints, the export, and offloaded state."""

from __future__ import annotations

from dataclasses import replace

from launcher.sizing.memory import StepMemory, state_bytes
from launcher.sizing.step_config import StepConfig


def checkpoint_bytes(step: StepConfig) -> float:
    """Bytes of a checkpoint: what is trained and its optimizer state."""
    return step.trainable * (step.weight_bytes + state_bytes(step))


def export_bytes(step: StepConfig) -> float:
    """Bytes of the exported model, adapters merged."""
    return step.shape.parameters * step.element_bytes


def host_bytes(step: StepConfig) -> float:
    """CPU memory of a node that offloading takes: weights, gradients and optimizer state."""
    if not step.cpu_offload:
        return 0.0
    there = StepMemory(replace(step, cpu_offload=False)).phases["optimizer step"]
    return step.gpus_per_node * (there["weights"] + there["gradients"] + there["optimizer"])
