"""Compares the memory estimate with a course's figures: python -m benchmarks.published

The figures stand in configs/sweeps/four_gpus.yaml. The course (github.com/teaching-on-testbeds/
llm-chi) prints torch.cuda.memory_allocated() after the forward pass of a step, which is no peak.
So the estimate is made for that moment, and for what its scripts do in another way than the kit:

    gradients     Lightning removes those of the step before only after the forward pass
    replicas      DDP keeps the gradients a second time, in its buckets
    FSDP          the whole model is one unit, whose weights stay gathered until backward

docs/sweeps.md holds the output. Nothing is run, and no GPU is needed.
"""

from collections.abc import Iterator
from dataclasses import replace

from launcher import paths
from launcher.recipes import recipe, sweep
from launcher.recipes.sweep import Cell
from launcher.sizing.cells import PredictedSweep
from launcher.sizing.gpus import by_name
from launcher.sizing.memory import StepMemory
from launcher.sizing.recipe_step import step_of
from launcher.sizing.step_config import GIB, StepConfig

# In one direction, as configs/gpus.yaml has it for cards without NVLink.
PCIE_4_GBS = 32.0
HEADS = ("cell", "kit's peak", "at the course's moment", "course", "difference")


def at_their_moment(step: StepConfig) -> float:
    """Return the GiB per GPU after the forward pass, in the way of the course's scripts."""
    layout = step.layout
    found = sum(StepMemory(step).phases["loss, forward"].values())
    weights = step.shape.parameters * step.element_bytes
    found += weights / layout.shard  # gradients of the step before
    if layout.replicate > 1:
        found += weights  # DDP's buckets
    if layout.shard > 1:
        found += weights  # gathered as one unit
    return found / GIB


def step_of_cell(definition: sweep.Sweep, cell: Cell) -> StepConfig:
    """Return the training step of a sweep's cell."""
    made = recipe.load(definition.recipe, cell.overrides, {})
    config = made.resolved(paths.REPO_ROOT, "run")
    return step_of(config, made.resources.nodes, made.resources.gpus_per_node)


def memory_rows() -> Iterator[tuple[str, float, float, float]]:
    """Yield each cell with its peak, its memory at the course's moment, and the course's figure."""
    definition = sweep.load("four_gpus")
    for cell in definition.cells:
        if "allocated_gib" in cell.published:
            step = step_of_cell(definition, cell)
            peak = StepMemory(step).peak / GIB
            yield cell.name, peak, at_their_moment(step), cell.published["allocated_gib"]


def speedups() -> Iterator[tuple[str, float, float, float]]:
    """Yield how much faster an epoch is than on one GPU.

    Predicted with NVLink between the GPUs, predicted with PCIe 4.0 x16, and in the course.
    """
    definition = sweep.load("four_gpus")
    cells = [
        (cell.number, cell.name, recipe.load(definition.recipe, cell.overrides, {}), cell.published)
        for cell in definition.cells
        if "epoch_s" in cell.published
    ]
    gpu = by_name(definition.gpu)
    linked, plugged = (
        PredictedSweep(cells, paths.REPO_ROOT, each).cells
        for each in (gpu, replace(gpu, link_gbs=PCIE_4_GBS))
    )
    for fast, slow in zip(linked[1:], plugged[1:], strict=True):
        nvlink = (linked[0].epoch_s or 0) / (fast.epoch_s or 1)
        pcie = (plugged[0].epoch_s or 0) / (slow.epoch_s or 1)
        yield fast.name, nvlink, pcie, linked[0].published["epoch_s"] / fast.published["epoch_s"]


def lines() -> Iterator[str]:
    """Yield both comparisons as Markdown."""
    yield f"| {' | '.join(HEADS)} |"
    yield "|---" * len(HEADS) + "|"
    for name, peak, moment, theirs in memory_rows():
        change = f"{100 * (moment / theirs - 1):+.1f} %"
        yield f"| {name} | {peak:.2f} | {moment:.2f} | {theirs:.2f} | {change} |"
    yield ""
    yield "| speed, against one GPU | predicted, NVLink | predicted, PCIe 4.0 x16 | course |"
    yield "|---|---|---|---|"
    for name, linked, plugged, theirs in speedups():
        yield f"| {name} | {linked:.2f} x | {plugged:.2f} x | {theirs:.2f} x |"


if __name__ == "__main__":
    print("\n".join(lines()))
