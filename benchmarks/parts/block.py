"""Two transformer blocks on packed rows, with torch.compile, activation checkpointing and fp8."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch._dynamo.utils import counters

from benchmarks.parts import documents
from benchmarks.parts.measure import (
    Case,
    Runnable,
    Setting,
    Size,
    Tensors,
    Unavailable,
    Variant,
    leaf,
    normal,
)
from trainer.layers import attention, fp8, linear, nf4
from trainer.models import build as models
from trainer.models.decoder import Decoder
from trainer.parallel import activations
from trainer.parallel import world as distributed

LAYERS = 2
# The errors of two blocks add up.
TOLERANCE_FACTOR = 3
FP8_TOLERANCE = 0.4
OTHER_BATCHES = 4
VOCABULARY = 64


class Mode(NamedTuple):
    """How the blocks run.

    recompute: the trainer's setting for activation checkpointing (None, 1 = every layer, "op").
    fp8: the name of the fp8 recipe.
    """

    name: str
    compiled: bool = False
    recompute: Any = None
    fp8: str | None = None


MODES = (
    Mode("eager"),
    Mode("compiled", True),
    Mode("eager, activation_checkpointing=full", recompute=1),
    Mode("compiled, activation_checkpointing=full", True, 1),
    Mode("eager, activation_checkpointing=op", recompute="op"),
    Mode("compiled, activation_checkpointing=op", True, "op"),
)
FP8_MODES = (
    Mode("compiled, fp8 tensorwise", True, fp8="tensorwise"),
    Mode("compiled, fp8 rowwise", True, fp8="rowwise"),
)


def cases(setting: Setting) -> Iterator[Case]:
    """Full fine-tuning, LoRA and QLoRA."""
    distributed.start(setting.device.type)
    try:
        for method, modes in (
            ("full", MODES + FP8_MODES),
            ("LoRA", MODES + FP8_MODES),
            ("QLoRA", MODES),
        ):
            # Each case starts with an empty compile cache, so that its graphs are counted alone.
            torch._dynamo.reset()
            yield _case(setting, method, modes)
    finally:
        distributed.stop()


def _case(setting: Setting, method: str, modes: tuple[Mode, ...]) -> Case:
    size = setting.size
    rows = documents.lengths(size, seed=1)
    x = setting.random(size.batch, size.sequence, size.dim, seed=0)
    grad_output = setting.random(size.batch, size.sequence, size.dim, seed=1)

    def variant(mode: Mode) -> Variant:
        return Variant(mode.name, lambda: _runnable(setting, method, x, rows, mode))

    return Case(
        name=method,
        what=(
            f"{LAYERS} blocks of width {size.dim}, {size.batch} x {size.sequence} tokens, "
            f"{documents.DISTRIBUTION}, seed 1"
        ),
        variants=[variant(mode) for mode in modes],
        reference=lambda: _reference(setting, method, x, rows, grad_output),
        tolerance=TOLERANCE_FACTOR * setting.tolerance,
        grad_output=grad_output,
        rate=("tokens/s per block", LAYERS * size.tokens),
    )


def _model(
    size: Size,
    method: str,
    device: torch.device,
    dtype: torch.dtype,
    mode: Mode,
) -> Decoder:
    """The blocks as the trainer sets them up, with weights that depend on their order only."""
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
    models.freeze_base(model)
    if mode.fp8 is not None:
        linear.use_fp8(model, model.linear_layers(), mode.fp8, method != "full")
    attention.choose_kernels(model, device, dtype)
    activations.prepare(
        model,
        SimpleNamespace(
            compile=mode.compiled,
            activation_checkpointing=mode.recompute,
            enable_activation_offloading=False,
        ),
    )
    model.to_empty(device=device)
    model.fill_buffers(device)
    nf4.fill_tables(model)
    with torch.no_grad():
        for seed, parameter in enumerate(model.parameters()):
            _fill(parameter, seed)
    fp8.fill_magnitudes(model)
    return model


def _fill(parameter: torch.Tensor, seed: int) -> None:
    shape = nf4.dense_shape(parameter)
    values = normal(shape, parameter.device, seed)
    # Rounded to bf16 first, so that the reference has exactly the same weights.
    values = (values * max(shape) ** -0.5 if len(shape) > 1 else 1 + 0.1 * values).bfloat16()
    parameter.copy_(nf4.quantise(values) if nf4.is_packed(parameter) else values)


def _forward(
    model: Decoder, x: torch.Tensor, batch: tuple[attention.Documents, torch.Tensor]
) -> torch.Tensor:
    mask, positions = batch
    activations.mark_dynamic(model, (), {"mask": mask})
    for layer in model.layers:
        x = layer(x, mask=mask, input_pos=positions)
    return x


def _leaves(model: Decoder, x: torch.Tensor) -> Tensors:
    trained = [p for p in model.layers.parameters() if p.requires_grad]
    return {"x": leaf(x)} | {f"weight {index}": p for index, p in enumerate(trained)}


def _runnable(
    setting: Setting,
    method: str,
    x: torch.Tensor,
    rows: list[list[int]],
    mode: Mode,
) -> Runnable:
    if mode.compiled and not setting.compiled:
        raise Unavailable("torch.compile is switched off")
    if mode.fp8 and (reason := fp8.missing(mode.fp8, setting.device)):
        raise Unavailable(reason)
    size, device = setting.size, setting.device
    model = _model(size, method, device, setting.dtype, mode)
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
        if not mode.compiled:
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
            f"new graphs in {OTHER_BATCHES} other batches": end[0] - begin[0],
        }

    bounds = dict.fromkeys(("output", *leaves), FP8_TOLERANCE) if mode.fp8 else {}
    return Runnable(run, leaves, tolerance=bounds, figures=figures)


def _reference(
    setting: Setting,
    method: str,
    x: torch.Tensor,
    rows: list[list[int]],
    grad_output: torch.Tensor,
) -> Tensors:
    """The same blocks in eager mode and higher precision, with masked SDPA attention."""
    model = _model(setting.size, method, setting.device, setting.reference_dtype, Mode("reference"))
    leaves = _leaves(model, x.to(setting.reference_dtype))
    output = _forward(model, leaves["x"], documents.documents(rows, setting.device))
    gradients = torch.autograd.grad(
        output, list(leaves.values()), grad_output.to(setting.reference_dtype)
    )
    return {"output": output.detach(), **dict(zip(leaves, gradients, strict=True))}
