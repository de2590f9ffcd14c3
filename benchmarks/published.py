"""Compares the memory estimate with a course's figures: python -m benchmarks.published

The settings stand in configs/sweeps/four_gpus.yaml. The course (github.com/teaching-on-testbeds/
llm-chi) prints torch.cuda.memory_allocated() after the forward pass of a step, which is no peak.
So the estimate is made for that moment, and for what its scripts do in another way than the kit:

    gradients     Lightning removes those of the step before only after the forward pass
    replicas      DDP keeps the gradients a second time, in its buckets
    FSDP          the whole model is one unit, whose weights stay gathered until backward

benchmarks/results/published.md has the output. Nothing is run, and no GPU is needed.
"""

from collections.abc import Iterator
from dataclasses import replace

from launcher import paths
from launcher.gpus import by_name
from launcher.recipe import load as recipes
from launcher.recipe import sweep
from launcher.recipe.sweep import Cell
from plugins.estimate.launcher.memory import StepMemory
from plugins.estimate.launcher.recipe_step import step_of
from plugins.estimate.launcher.search import Predictor
from plugins.estimate.launcher.step_config import GIB, StepConfig

# In one direction, as configs/gpus.yaml has it for cards without NVLink.
PCIE_4_GBS = 32.0
# The course trains on 80 % of 2,000 samples, in rows of at most 512 tokens.
SAMPLES, ROW_TOKENS = 1600, 512
# By cell: GiB allocated and reserved, and seconds of an epoch.
COURSE = {
    "7B, one GPU, batch 4": (61.97, 71.35, 212),
    "7B, four replicas, batch 4": (73.98, 78.30, 163),
    "7B, FSDP over four, batch 4": (36.33, 55.76, 173),
    "7B, FSDP over four, batch 8": (62.95, 67.67, 116),
}
MEMORY_HEADS = (
    "cell",
    "kit's peak",
    "at the course's moment",
    "course, allocated",
    "difference",
    "with what the kit reserves",
    "course, reserved",
    "difference",
)
SPEED_HEADS = (
    "iterations per second",
    "predicted, NVLink",
    "difference",
    "predicted, PCIe 4.0 x16",
    "difference",
    "course",
)


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
    made = recipes.load(definition.recipe, cell.overrides, {})
    config = made.resolved(paths.REPO_ROOT, "run")
    return step_of(config, made.resources.nodes, made.resources.gpus_per_node)


def memory_rows() -> Iterator[tuple[str, float, float, float, float]]:
    """Yield each cell's peak and memory at the course's moment; the course's allocated, reserved.

    All in GiB per GPU.
    """
    definition = sweep.load("four_gpus")
    for cell in definition.cells:
        if given := COURSE.get(cell.name):
            step = step_of_cell(definition, cell)
            peak, moment = StepMemory(step).peak / GIB, at_their_moment(step)
            yield cell.name, peak, moment, given[0], given[1]


def speeds() -> Iterator[tuple[str, float, float, float]]:
    """Yield each cell's iterations per second, for rows that are filled.

    Predicted with NVLink between the GPUs, predicted with PCIe 4.0 x16, and in the course.
    """
    definition = sweep.load("four_gpus")
    gpu = by_name(definition.gpu)
    for cell in definition.cells:
        if given := COURSE.get(cell.name):
            step = step_of_cell(definition, cell)
            linked, plugged = (
                Predictor(step, each).of(step).rate / (step.batch * ROW_TOKENS)
                for each in (gpu, replace(gpu, link_gbs=PCIE_4_GBS))
            )
            theirs = SAMPLES / (step.batch * step.layout.ranks) / given[2]
            yield cell.name, linked, plugged, theirs


def lines() -> Iterator[str]:
    """Yield both comparisons as Markdown."""
    gpu = by_name(sweep.load("four_gpus").gpu)
    reserve = gpu.memory_gib - gpu.usable_gib
    yield from _heads(MEMORY_HEADS)
    for name, peak, moment, allocated, reserved in memory_rows():
        whole = moment + reserve
        figures = f"{moment:.2f} | {allocated:.2f} | {_change(moment, allocated)}"
        figures += f" | {whole:.2f} | {reserved:.2f} | {_change(whole, reserved)}"
        yield f"| {name} | {peak:.2f} | {figures} |"
    yield ""
    yield from _heads(SPEED_HEADS)
    for name, linked, plugged, theirs in speeds():
        pairs = (f"{each:.2f} | {_change(each, theirs)}" for each in (linked, plugged))
        yield f"| {name} | {' | '.join(pairs)} | {theirs:.2f} |"


def _heads(names: tuple[str, ...]) -> Iterator[str]:
    yield f"| {' | '.join(names)} |"
    yield "|---" * len(names) + "|"


def _change(ours: float, theirs: float) -> str:
    return f"{100 * (ours / theirs - 1):+.1f} %"


if __name__ == "__main__":
    print("\n".join(lines()))
