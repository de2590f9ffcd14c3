"""Compares predicted training speeds with published ones: python -m benchmarks.speeds

Each row is a setting that others have published for their engine, computed as if it were a recipe
of the kit: the same model, layout, rows and recomputation, and the same constants for all rows.
Nothing is run. benchmarks/results/published.md has the output, and says where the rows are from.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from launcher import paths
from launcher.gpus import Gpu, by_name
from launcher.recipe import load as recipes
from plugins.estimate.launcher.links import Links
from plugins.estimate.launcher.reached import Reached
from plugins.estimate.launcher.recipe_step import step_of
from plugins.estimate.launcher.shapes import shape_of
from plugins.estimate.launcher.step_config import StepConfig
from plugins.estimate.launcher.step_time import step_time
from runspec.description import PUBLISHED
from runspec.layout import Layout
from runspec.shape import Attention, Block, Matrix, Shape, Vector

H100, A100, H200 = by_name("h100-80"), by_name("a100-80"), by_name("h200-141")
# torchtitan's H100 have HBM2e and a limit of 500 instead of 700 W. Power goes with about the cube
# of the clock.
LIMITED = replace(H100, memory_bandwidth_gbs=2400)
CLOCK = (500 / 700) ** (1 / 3)
# torchtitan's mode op recomputes every second matrix product, as much as every second layer.
TITAN_OP = "2"


@dataclass(frozen=True)
class Row:
    """A published speed and the predicted one, tokens per second and GPU."""

    source: str
    workload: str
    gpus: int
    published: float
    predicted: float

    @property
    def error(self) -> float:
        """What the prediction is too high, as a share."""
        return self.predicted / self.published - 1


def speed(gpu: Gpu, step: StepConfig, clock: float = 1.0) -> float:
    """Return what is predicted of a step at this share of a GPU's usual clock."""
    usual = Reached.of(gpu)
    slower = usual._replace(
        products=usual.products * clock,
        attention=usual.attention * clock,
        attention_backward=usual.attention_backward * clock,
    )
    found = step_time(step, gpu, Links.of(gpu, 8), slower)
    return found.tokens_per_second_per_gpu


def published(name: str) -> Shape:
    """Return the shape of a model in configs/shapes."""
    return shape_of({}, PUBLISHED / name)


def of_recipe(name: str) -> Shape:
    """Return the shape of a recipe's model."""
    return step_of(recipes.load(name).resolved(paths.REPO_ROOT, "run"), 1, 8).shape


def mpt(dim: int, layers: int, heads: int) -> Shape:
    """Return the shape of an MPT: no gate in the MLP, tied tables."""
    sizes = {
        "qkv": ("attention", "column", dim, 3 * dim),
        "out": ("attention", "row", dim, dim),
        "up": ("mlp", "column", dim, 4 * dim),
        "down": ("mlp", "row", 4 * dim, dim),
    }
    head = dim // heads
    attention = Attention(heads, heads, head, head, dim)
    matrices: dict[str, Matrix] = {name: Matrix(*each) for name, each in sizes.items()}  # type: ignore[arg-type]
    block = Block(matrices, (Vector(dim, features=dim),) * 2, attention)
    return Shape(dim, 50368, 65536, (block,), (0,) * layers, tied=True)


def full(shape: Shape, layout: Layout, batch: int, length: int, **more: Any) -> StepConfig:
    """Return a step of full fine-tuning with fp32 master weights, compiled, all logits at once."""
    usual = {"compiled": True, "fp32_master": True, "loss": "plain"}
    return StepConfig(shape, "full", layout, batch=batch, length=length, **{**usual, **more})


def rows() -> Iterator[Row]:
    """Yield every row."""
    for name, found in (
        ("torchtitan, H100", _titan()),
        ("torchtitan, A100", _titan_a100()),
        ("torchtitan, H200", _titan_h200()),
        ("NeMo Automodel, H100", _automodel()),
        ("LLM Foundry, H100", _foundry()),
    ):
        for workload, gpus, published, predicted in found:
            yield Row(name, workload, gpus, published, predicted)


Found = Iterator[tuple[str, int, float, float]]


def _titan() -> Found:
    small, large = of_recipe("llama8b_full"), of_recipe("llama70b_full")
    for gpus, eager, compiled, fp8 in ((8, 5762, 6667, 8532), (128, 5605, 6514, 8380)):
        step = full(small, Layout(shard=gpus), 2, 8192, checkpointing=TITAN_OP)
        for words, rate, more in (
            ("not compiled", eager, {"compiled": False}),
            ("compiled", compiled, {}),
            ("compiled, fp8", fp8, {"fp8": True}),
        ):
            predicted = speed(LIMITED, replace(step, **more), CLOCK)  # type: ignore[arg-type]
            yield f"Llama 8B full, {words}", gpus, rate, predicted
    layout = Layout(shard=8, tensor_parallel=8)
    step = full(small, layout, 12, 8192, checkpointing=TITAN_OP)
    yield "Llama 8B full, TP 8", 64, 4378, speed(LIMITED, step, CLOCK)
    layout = Layout(shard=32, tensor_parallel=8)
    step = full(large, layout, 16, 8192, checkpointing="full")
    yield "Llama 70B full, TP 8, recomputed", 256, 597, speed(LIMITED, step, CLOCK)
    fp8_speed = speed(LIMITED, replace(step, fp8=True), CLOCK)
    yield "Llama 70B full, TP 8, recomputed, fp8", 256, 829, fp8_speed


def _titan_a100() -> Found:
    for name, words, batch, length, mode, rate in (
        ("Llama-3.1-8B", "Llama 8B full, every second layer recomputed", 1, 8192, "2", 2904),
        ("Llama-3.1-8B", "Llama 8B full, op", 1, 8192, TITAN_OP, 2973),
        ("Llama-3.3-70B-Instruct", "Llama 70B full, recomputed", 1, 8192, "full", 331),
        ("Llama-2-13b-hf", "Llama 13B full", 2, 4096, "none", 2162),
        ("Llama-2-13b-hf", "Llama 13B full, every second layer", 2, 4096, "2", 1914),
        ("Llama-2-13b-hf", "Llama 13B full, op", 2, 4096, TITAN_OP, 1904),
        ("Llama-2-70b-hf", "Llama 2 70B full, op", 1, 4096, TITAN_OP, 355),
        ("Llama-2-70b-hf", "Llama 2 70B full, recomputed", 2, 4096, "full", 353),
    ):
        layout, keys = Layout(shard=64), {"checkpointing": mode, "compiled": False}
        yield words, 64, rate, speed(A100, full(published(name), layout, batch, length, **keys))


def _titan_h200() -> Found:
    shape = of_recipe("llama8b_full")
    for gpus, rate in ((32, 10938), (64, 10753)):
        step = full(shape, Layout(shard=gpus), 2, 8192, checkpointing=TITAN_OP, fp8=True)
        yield "Llama 8B full, compiled, fp8", gpus, rate, speed(H200, step)


def _automodel() -> Found:
    for name, words, layout, mode, compiled, rate in (
        ("Llama-3.1-8B", "Llama 8B LoRA, not compiled", Layout(), "none", False, 12473),
        ("Llama-3.3-70B-Instruct", "Llama 70B LoRA, TP 2", Layout(1, 4, 2), "full", True, 1092),
        ("Llama-3.3-70B-Instruct", "Llama 70B LoRA, TP 2", Layout(1, 8, 2), "full", True, 985),
    ):
        shape = published(name)
        step = StepConfig(shape, "lora", layout, batch=2, accumulation=4, checkpointing=mode)
        adapter = {"lora_rank": 16, "lora_targets": (*shape.names,)}
        step = replace(step, compiled=compiled, loss="plain", **adapter)  # type: ignore[arg-type]
        words += ", recomputed" if mode == "full" else ""
        yield words, layout.ranks, rate, speed(H100, step)
    for name, words, ranks, batch, micro, rate in (
        ("qwen3_30b_a3b_full", "Qwen3 30B A3B full, EP 8", 8, 4, 16, 12040),
        ("qwen3_30b_a3b_full", "Qwen3 30B A3B full, EP 8", 8, 4, 16, 11340),
        ("gpt_oss_20b_lora", "gpt-oss 20B full, EP 8", 8, 2, 16, 13058),
        ("gpt_oss_120b_lora", "gpt-oss 120B full, EP 64", 64, 2, 4, 7626),
    ):
        layout = Layout(shard=ranks, expert_parallel=ranks)
        step = full(of_recipe(name), layout, batch, 4096, accumulation=micro, fp32_master=False)
        yield words, ranks, rate, speed(H100, step)


def _foundry() -> Found:
    for words, sizes, gpus, length, batch, micro, mode, rate in (
        ("1B", (2048, 24, 16), 8, 2048, 14, 1, "none", 45455),
        ("1B", (2048, 24, 16), 8, 8192, 3, 4, "none", 29157),
        ("3B", (2560, 32, 20), 8, 4096, 5, 6, "none", 20964),
        ("7B", (4096, 32, 32), 8, 2048, 6, 1, "none", 10643),
        ("7B", (4096, 32, 32), 8, 4096, 16, 2, "full", 8611),
        ("7B", (4096, 32, 32), 8, 32768, 2, 2, "full", 3318),
        ("13B", (5120, 40, 40), 8, 2048, 2, 1, "none", 4792),
        ("13B", (5120, 40, 40), 64, 2048, 2, 1, "none", 4800),
        ("30B", (7168, 48, 56), 8, 4096, 1, 21, "full", 1802),
        ("30B", (7168, 48, 56), 16, 2048, 10, 3, "full", 2263),
        ("70B", (8192, 80, 64), 64, 2048, 8, 4, "full", 1039),
    ):
        keys = {"accumulation": micro, "checkpointing": mode, "sync_each": True, "compiled": False}
        step = full(mpt(*sizes), Layout(shard=gpus), batch, length, **keys)
        recomputed = ", recomputed" if mode == "full" else ""
        yield f"MPT {words} full, rows of {length}{recomputed}", gpus, rate, speed(H100, step)


def lines() -> Iterator[str]:
    """Yield the comparison as Markdown."""
    found = [*rows()]
    yield "| source | workload | GPUs | published | predicted | error |"
    yield "|---|---|---:|---:|---:|---:|"
    for row in found:
        yield (
            f"| {row.source} | {row.workload} | {row.gpus} | {row.published:,} | "
            f"{row.predicted:,.0f} | {100 * row.error:+.0f} % |"
        )
    errors = [abs(row.error) for row in found]
    within = sum(error <= 0.15 for error in errors)
    yield ""
    yield (
        f"Median error {100 * median(errors):.0f} %, largest {100 * max(errors):.0f} %; {within} "
        f"of {len(errors)} rows within 15 %."
    )


if __name__ == "__main__":
    print("\n".join(lines()))
