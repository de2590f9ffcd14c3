"""Two transformer blocks on packed rows: compiled or not, recomputed or not."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch._dynamo.utils import counters

from benchmarks.parts import documents
from benchmarks.parts.measure import (
    Case,
    Ready,
    Setting,
    Size,
    Tensors,
    Unavailable,
    Variant,
    leaf,
    normal,
)
from trainer import activations, attention, distributed, fp8, lora, models, nf4
from trainer.compat import TransformerDecoder, get_adapter_params

LAYERS = 2
# Errors of two blocks add up.
TOLERANCE_FACTOR = 3
FP8_TOLERANCE = 0.4
OTHER_BATCHES = 4
VOCABULARY = 64


class Way(NamedTuple):
    """How the blocks are run; recompute as the trainer's config says it, fp8 by its recipe."""

    name: str
    compiled: bool = False
    recompute: Any = None
    fp8: str | None = None


WAYS = (
    Way("eager"),
    Way("compiled", True),
    Way("eager, all recomputed", recompute=1),
    Way("compiled, all recomputed", True, 1),
    Way("eager, all but products recomputed", recompute="op"),
    Way("compiled, all but products recomputed", True, "op"),
)
FP8_WAYS = (
    Way("compiled, fp8 tensorwise", True, fp8="tensorwise"),
    Way("compiled, fp8 rowwise", True, fp8="rowwise"),
)


def cases(setting: Setting) -> Iterator[Case]:
    """Full fine-tuning, LoRA and QLoRA."""
    distributed.start(setting.device.type)
    try:
        for method, ways in (
            ("full", WAYS + FP8_WAYS),
            ("LoRA", WAYS + FP8_WAYS),
            ("QLoRA", WAYS),
        ):
            # A case's compiled code is counted and kept by itself.
            torch._dynamo.reset()
            yield _case(setting, method, ways)
    finally:
        distributed.stop()


def _case(setting: Setting, method: str, ways: tuple[Way, ...]) -> Case:
    size = setting.size
    rows = documents.lengths(size, seed=1)
    x = setting.random(size.batch, size.sequence, size.dim, seed=0)
    upstream = setting.random(size.batch, size.sequence, size.dim, seed=1)

    def variant(way: Way) -> Variant:
        return Variant(way.name, lambda: _ready(setting, method, x, rows, way))

    return Case(
        name=method,
        what=(
            f"{LAYERS} blocks of {size.dim}, {size.batch} x {size.sequence} tokens, "
            f"{documents.WORDS}, seed 1"
        ),
        variants=[variant(way) for way in ways],
        reference=lambda: _reference(setting, method, x, rows, upstream),
        tolerance=TOLERANCE_FACTOR * setting.tolerance,
        upstream=upstream,
        rate=("tokens/s through one block", LAYERS * size.tokens),
    )


def _model(
    size: Size,
    method: str,
    device: torch.device,
    dtype: torch.dtype,
    way: Way,
) -> TransformerDecoder:
    """Weights drawn by their order alone; laid out as the trainer does it."""
    block: dict[str, Any] = {
        "_component_": "torchtune.models.llama3_1.llama3_1",
        "vocab_size": VOCABULARY,
        "num_layers": LAYERS,
        "num_heads": size.heads,
        "num_kv_heads": size.kv_heads,
        "embed_dim": size.dim,
        "intermediate_dim": size.hidden,
        "max_seq_len": size.sequence,
    }
    if method != "full":
        block |= {
            "_component_": "torchtune.models.llama3_1.lora_llama3_1",
            "lora_attn_modules": ["q_proj", "k_proj", "v_proj", "output_proj"],
            "apply_lora_to_mlp": True,
            "lora_rank": size.rank,
            "lora_alpha": 2 * size.rank,
            "quantize_base": method == "QLoRA",
        }
    with torch.device("meta"):
        model = models.empty_module(block)
    for owner in model.modules():
        for name, parameter in list(owner.named_parameters(recurse=False)):
            if parameter.is_floating_point():
                setattr(owner, name, torch.nn.Parameter(parameter.to(dtype)))
    adapter = get_adapter_params(model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not adapter or name in adapter)
    if way.fp8 is not None:
        lora.use_fp8(model, way.fp8)
    attention.use_documents(model, device, dtype)
    activations.prepare(
        model,
        SimpleNamespace(
            compile=way.compiled,
            activation_checkpointing=way.recompute,
            enable_activation_offloading=False,
        ),
    )
    model.to_empty(device=device)
    models.fill_rope_caches(model, device)
    nf4.fill_tables(model)
    with torch.no_grad():
        for seed, parameter in enumerate(model.parameters()):
            _fill(parameter, seed)
    fp8.fill_magnitudes(model)
    return model


def _fill(parameter: torch.Tensor, seed: int) -> None:
    shape = nf4.dense_shape(parameter)
    values = normal(shape, parameter.device, seed)
    # Rounded first, so that the reference has the very same weights.
    values = (values * max(shape) ** -0.5 if len(shape) > 1 else 1 + 0.1 * values).bfloat16()
    parameter.copy_(nf4.quantise(values) if nf4.is_packed(parameter) else values)


def _forward(
    model: TransformerDecoder, x: torch.Tensor, batch: tuple[attention.Documents, torch.Tensor]
) -> torch.Tensor:
    mask, positions = batch
    activations.mark_dynamic(model, (), {"mask": mask})
    for layer in model.layers:
        x = layer(x, mask=mask, input_pos=positions)
    return x


def _leaves(model: TransformerDecoder, x: torch.Tensor) -> Tensors:
    trained = [p for p in model.layers.parameters() if p.requires_grad]
    return {"x": leaf(x)} | {f"weight {index}": p for index, p in enumerate(trained)}


def _ready(
    setting: Setting,
    method: str,
    x: torch.Tensor,
    rows: list[list[int]],
    way: Way,
) -> Ready:
    if way.compiled and not setting.compiled:
        raise Unavailable("compiling is switched off")
    if way.fp8 and (lack := fp8.missing(way.fp8, setting.device)):
        raise Unavailable(lack)
    size, device = setting.size, setting.device
    model = _model(size, method, device, setting.dtype, way)
    leaves = _leaves(model, x)
    batch = documents.documents(rows, device)

    def graphs() -> tuple[int, int]:
        return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())

    before = graphs()
    after_first: list[tuple[int, int]] = []

    def run() -> torch.Tensor:
        output = _forward(model, leaves["x"], batch)
        if not after_first:
            after_first.append(graphs())
        return output

    def figures() -> dict[str, Any]:
        if not way.compiled:
            return {}
        begin = graphs()
        for seed in range(2, 2 + OTHER_BATCHES):
            other = documents.documents(documents.lengths(size, seed), device)
            output = _forward(model, leaves["x"], other)
            torch.autograd.grad(output, list(leaves.values()), torch.ones_like(output))
        end = graphs()
        return {
            "graphs": after_first[0][0] - before[0],
            "graph breaks": after_first[0][1] - before[1],
            f"graphs more in {OTHER_BATCHES} other batches": end[0] - begin[0],
        }

    bounds = dict.fromkeys(("output", *leaves), FP8_TOLERANCE) if way.fp8 else {}
    return Ready(run, leaves, tolerance=bounds, figures=figures)


def _reference(
    setting: Setting,
    method: str,
    x: torch.Tensor,
    rows: list[list[int]],
    upstream: torch.Tensor,
) -> Tensors:
    """The same blocks, not compiled, in higher precision, where attention goes by a mask."""
    model = _model(setting.size, method, setting.device, setting.exact, Way("reference"))
    leaves = _leaves(model, x.to(setting.exact))
    output = _forward(model, leaves["x"], documents.documents(rows, setting.device))
    gradients = torch.autograd.grad(output, list(leaves.values()), upstream.to(setting.exact))
    return {"output": output.detach(), **dict(zip(leaves, gradients, strict=True))}
