"""Tensor parallelism with sequence-parallel norms: the matrices of each layer over the ranks.

Between the blocks every rank holds its part of the sequence. A norm gathers the whole sequence,
column-split layers compute their part of the features, and the row-split layer after them sums
the ranks' shares and hands each rank its part of the sequence again (Korthikanti et al. 2022,
arXiv 2205.05198). Inside a module the arithmetic is on plain local tensors; DTensor describes
the parameters, and does the communication and its gradients.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import (
    ParallelStyle,
    loss_parallel,
    parallelize_module,
)

from trainer import forwards, lora, nf4
from trainer.compat import (
    GemmaNormEmbeddings,
    GemmaRMSNorm,
    RMSNorm,
    TiedLinear,
    TransformerDecoder,
)

SEQUENCE = Shard(1)
# How a column-split layer's parameters lie.
COLUMN = {
    "weight": Shard(0),
    "bias": Shard(0),
    "lora_b.weight": Shard(0),
    "magnitude": Shard(0),
}


class LocalStyle(ParallelStyle):
    """Splits a module's parameters and replaces its forward by one over local tensors.

    Args:
        forward: (module, mesh, x) -> output.
        placements: by parameter name; a parameter that is not named is replicated.
    """

    def __init__(
        self,
        forward: Callable[[nn.Module, DeviceMesh, torch.Tensor], torch.Tensor],
        placements: dict[str, Placement],
    ) -> None:
        super().__init__()
        self._forward, self._placements = forward, placements

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, parameter in list(module.named_parameters()):
            placement = self._placements.get(name, Replicate())
            # Every rank fills its own part later, so none needs to send it.
            split = distribute_tensor(parameter, device_mesh, [placement], src_data_rank=None)
            owner = module.get_submodule(name.rpartition(".")[0])
            owner.register_parameter(
                name.rpartition(".")[2], nn.Parameter(split, parameter.requires_grad)
            )
        module.tensor_parallel_mesh = device_mesh
        forwards.replace(module, _on_own_mesh(self._forward))
        return module


@cache
def _on_own_mesh(
    local_forward: Callable[[nn.Module, DeviceMesh, torch.Tensor], torch.Tensor],
) -> Callable[[nn.Module, torch.Tensor], torch.Tensor]:
    return lambda module, x: local_forward(module, module.tensor_parallel_mesh, x)


def _embedding(layer: nn.Embedding, mesh: DeviceMesh, tokens: torch.Tensor) -> torch.Tensor:
    """[batch, sequence] to this rank's [batch, sequence / ranks, dim], from its rows."""
    rows = layer.weight.to_local()
    index = tokens - mesh.get_local_rank() * rows.shape[0]
    elsewhere = (index < 0) | (index >= rows.shape[0])
    found = F.embedding(index.masked_fill(elsewhere, 0), rows)
    out = _summed_parts(found.masked_fill(elsewhere.unsqueeze(-1), 0.0), mesh)
    if isinstance(layer, GemmaNormEmbeddings):
        # As Gemma was trained, the factor is rounded to the model's dtype.
        out = out * torch.tensor(layer.embedding_dim**0.5, dtype=out.dtype)
    return out


def _summed_parts(share: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """The ranks' shares, [batch, sequence, dim], summed; each gets its part of the sequence."""
    whole = DTensor.from_local(share, mesh, [Partial()], run_check=False)
    return whole.redistribute(placements=[SEQUENCE]).to_local()


def _part_norm(norm: RMSNorm | GemmaRMSNorm, mesh: DeviceMesh, x: torch.Tensor) -> torch.Tensor:
    """Normalise this rank's [batch, sequence / ranks, dim], which stays this rank's."""
    # Each rank has seen its part of the sequence only, so the scale's gradient is a share.
    scale = norm.scale.to_local(grad_placements=[Partial()]).float()
    if isinstance(norm, GemmaRMSNorm):
        scale = 1 + scale
    return F.rms_norm(x.float(), scale.shape, scale, norm.eps).to(x.dtype)


def _norm(norm: RMSNorm | GemmaRMSNorm, mesh: DeviceMesh, x: torch.Tensor) -> torch.Tensor:
    """Normalise this rank's [batch, sequence / ranks, dim]; return [batch, sequence, dim]."""
    part = _part_norm(norm, mesh, x)
    gathered = DTensor.from_local(part, mesh, [SEQUENCE], run_check=False).redistribute(
        placements=[Replicate()]
    )
    # What comes back from column-split layers is each rank's share of the gradient.
    return gathered.to_local(grad_placements=[Partial()])


def _column(layer: nn.Module, mesh: DeviceMesh, x: torch.Tensor) -> torch.Tensor:
    """[batch, sequence, in] to this rank's [batch, sequence, out / ranks]."""
    out = _column_product(layer, x, layer.weight.to_local())
    return out if layer.bias is None else out + layer.bias.to_local()


def _column_product(layer: nn.Module, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    if not isinstance(layer, lora.ADAPTED):
        return lora.base(layer, x, weight)
    # A sees the whole input, but only this rank's rows of B send a gradient back to it.
    a = layer.lora_a.weight.to_local(grad_placements=[Partial()])
    b = layer.lora_b.weight.to_local()
    magnitude = layer.magnitude.to_local() if hasattr(layer, "magnitude") else None
    return lora.adapted(layer, x, weight, a, b, magnitude)


def _row(layer: nn.Module, mesh: DeviceMesh, x: torch.Tensor) -> torch.Tensor:
    """This rank's [batch, sequence, in / ranks] to its [batch, sequence / ranks, out]."""
    weight = layer.weight.to_local()
    if isinstance(layer, lora.ADAPTED):
        # B is linear: the ranks' shares of A's output need no sum of their own before it.
        a = layer.lora_a.weight.to_local()
        b = layer.lora_b.weight.to_local(grad_placements=[Partial()])
        magnitude = None
        if hasattr(layer, "magnitude"):
            magnitude = layer.magnitude.to_local(grad_placements=[Partial()])
        out = lora.adapted(layer, x, weight, a, b, magnitude, partial(_total, mesh))
    else:
        out = lora.base(layer, x, weight)
    return _summed_parts(out, mesh)


def _total(mesh: DeviceMesh, share: torch.Tensor) -> torch.Tensor:
    """The sum of the ranks' tensors, on each of them."""
    summed = DTensor.from_local(share, mesh, [Partial()], run_check=False)
    return summed.redistribute(placements=[Replicate()]).to_local()


def _output(layer: nn.Module, mesh: DeviceMesh, x: torch.Tensor) -> DTensor:
    """[batch, sequence, dim] to logits that stay split over the vocabulary."""
    return DTensor.from_local(_column(layer, mesh, x), mesh, [Shard(-1)], run_check=False)


def _tied_output(mesh: DeviceMesh, x: torch.Tensor, weight: DTensor) -> DTensor:
    """As `_output`, by the rows of the embedding that this rank holds."""
    logits = F.linear(x, weight.to_local())
    return DTensor.from_local(logits, mesh, [Shard(-1)], run_check=False)


def _plan(model: TransformerDecoder) -> dict[str, ParallelStyle]:
    """The style of each module of torchtune's decoder."""
    norm, part_norm = LocalStyle(_norm, {}), LocalStyle(_part_norm, {})
    column = LocalStyle(_column, COLUMN)
    row = LocalStyle(_row, {"weight": Shard(1), "lora_a.weight": Shard(1)})
    plan: dict[str, ParallelStyle] = {
        "tok_embeddings": LocalStyle(_embedding, {"weight": Shard(0)}),
        "layers.*.sa_norm": norm,
        "layers.*.attn.q_proj": column,
        "layers.*.attn.k_proj": column,
        "layers.*.attn.v_proj": column,
        "layers.*.attn.output_proj": row,
        "layers.*.mlp_norm": norm,
        "layers.*.mlp.w1": column,
        "layers.*.mlp.w3": column,
        "layers.*.mlp.w2": row,
        "norm": norm,
    }
    if isinstance(model.layers[0].sa_scale, GemmaRMSNorm):
        plan |= {"layers.*.sa_scale": part_norm, "layers.*.mlp_scale": part_norm}
    if not isinstance(model.output, TiedLinear):
        plan["output"] = LocalStyle(_output, COLUMN)
    return plan


def split(model: TransformerDecoder, mesh: DeviceMesh) -> None:
    """Split `model` in place over the one-dimensional `mesh`.

    Every parameter becomes a DTensor on `mesh`. The model still takes whole sequences, of a
    length that the ranks divide; its logits are DTensors split over the vocabulary.

    Args:
        model: on the meta device, before activation checkpointing; `faults` found none in it.
    """
    for layer in model.layers:
        layer.attn.num_heads //= mesh.size()
        layer.attn.num_kv_heads //= mesh.size()
    if isinstance(model.output, TiedLinear):
        # It is no module with a weight of its own: it asks the embedding for it at each call.
        model.output.linear.forward = partial(_tied_output, mesh)
    parallelize_module(model, mesh, _plan(model), src_data_rank=None)


def faults(model: TransformerDecoder, ranks: int) -> list[str]:
    """Why `model` cannot be split over `ranks`, one line a reason; [] where it can."""
    if ranks == 1:
        return []
    attention, mlp = model.layers[0].attn, model.layers[0].mlp
    sizes = {
        "num_heads": attention.num_heads,
        "num_kv_heads": attention.num_kv_heads,
        "intermediate_dim": mlp.w1.weight.shape[0],
        "vocab_size": model.tok_embeddings.num_embeddings,
        "max_seq_len": model.max_seq_len,
    }
    found = [
        f"tensor_parallel_dim: {ranks} does not divide the model's {name} {size}; "
        "set tensor_parallel_dim to a number that does"
        for name, size in sizes.items()
        if size % ranks
    ]
    for name in ("attn.output_proj", "mlp.w2"):
        layer = model.layers[0].get_submodule(name)
        blocks = layer.weight.shape[1]
        if nf4.is_packed(layer.weight) and blocks % ranks:
            found.append(
                f"tensor_parallel_dim: {ranks} does not divide the {blocks} NF4 blocks of "
                f"{nf4.BLOCK} inputs of layers.*.{name}; set tensor_parallel_dim to a number that "
                "does, or model.quantize_base=False"
            )
    if any(isinstance(m, lora.ADAPTED) and getattr(m.dropout, "p", 0) for m in model.modules()):
        found.append(
            "model.lora_dropout: must be 0 under tensor parallelism; "
            "set model.lora_dropout=0.0 or tensor_parallel_dim=1"
        )
    return found


def vocabulary_split_loss(ranks: int) -> AbstractContextManager:
    """Within it cross-entropy and its backward take logits split over the vocabulary."""
    return loss_parallel() if ranks > 1 else nullcontext()
