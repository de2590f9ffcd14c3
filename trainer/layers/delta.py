"""Linear attention by the gated delta rule, in which no document of a packed row sees another one.

Each head has a state, [key, value], that goes from token to token: it decays, what it says of the
token's key is replaced in part by the token's value, and the token's query reads it (Yang et al.
2024, arXiv 2412.06464). A short convolution stands before it. A document begins with a state of
zeros, and with zeros before its first token.
"""

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from runspec.shape import DELTA_CHUNK as CHUNK
from trainer.layers.flex import BlockMasks
from trainer.layers.patch import patch_forward
from trainer.model import Documents
from trainer.sharded import local

# What a layer of this kind has, beside the layers that make its inputs.
PARTS = ("A_log", "dt_bias", "conv1d", "norm", "out_proj")

KERNELS = find_spec("fla") is not None and find_spec("triton") is not None

Heads = tuple[torch.Tensor, ...]


def prepare(base: nn.Module) -> None:
    """Let the layers of this kind in `base`, a transformers model, be computed here, in place."""
    for module in list(base.modules()):
        inputs = _inputs_of(module)
        if inputs is None:
            continue
        module.delta_inputs = inputs
        # Of queries, keys and values, which the convolution sees one after another.
        module.pieces = (module.key_dim, module.key_dim, module.value_dim)
        patch_forward(module, forward)


def layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The layers that `prepare` has found, by name."""
    for name, module in model.named_modules():
        if hasattr(module, "delta_inputs"):
            yield name, module


def divide(layer: nn.Module, ranks: int) -> None:
    """Tell a layer that this rank has a part of its heads, one of `ranks`."""
    for name in ("num_k_heads", "num_v_heads", "key_dim", "value_dim"):
        setattr(layer, name, getattr(layer, name) // ranks)


def forward(
    layer: nn.Module, hidden_states: torch.Tensor, *, documents: Any = None, **_: Any
) -> torch.Tensor:
    """[batch, sequence, dim] to the same, document by document."""
    packed = isinstance(documents, Documents | BlockMasks)
    ids = documents.ids if packed else hidden_states.new_zeros(hidden_states.shape[:2])
    mixed, gate, rate, decay = layer.delta_inputs(layer, hidden_states)
    weight = _channels(layer, local(layer.conv1d.weight, partial_gradient=True)).squeeze(1)
    mixed = F.silu(convolution(mixed, weight, ids))
    parts = mixed.split((layer.key_dim, layer.key_dim, layer.value_dim), -1)
    widths = (layer.head_k_dim, layer.head_k_dim, layer.head_v_dim)
    query, key, value = [
        part.unflatten(-1, (-1, width)) for part, width in zip(parts, widths, strict=True)
    ]
    # In fp32: a state decays over thousands of tokens. The softplus is this sum: of softplus's own
    # backward the compiler expects another layout than it has (torch 2.13).
    steps = decay.float() + local(layer.dt_bias)
    logs = -local(layer.A_log).float().exp() * torch.logaddexp(steps, torch.zeros_like(steps))
    if KERNELS and query.is_cuda:
        bounds = documents.cu_seqlens if packed else None
        out = by_kernels(query, key, value, logs, rate.sigmoid(), bounds)
    else:
        out = gated_delta_rule(query, key, value, logs, rate.sigmoid(), ids)
    out = layer.norm(out.reshape(-1, layer.head_v_dim), gate.reshape(-1, layer.head_v_dim))
    return layer.out_proj(out.view(*hidden_states.shape[:2], -1))


def convolution(x: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Each channel's own causal convolution, over the tokens of one document.

    Args:
        x: [batch, sequence, channels]. weight: [channels, kernel], the last for the token itself.
        ids: [batch, sequence], the document of each token.
    """
    kernel, length = weight.shape[1], x.shape[1]
    out = x * weight[:, -1]
    for back in range(1, min(kernel, length)):
        same = (ids[:, back:] == ids[:, :-back]).unsqueeze(-1)
        before = F.pad(x[:, :-back] * same, (0, 0, back, 0))
        out = out + before * weight[:, -1 - back]
    return out


# The compiler would unroll the loop over chunks, and need a minute for 32 of them.
@torch.compiler.disable
def gated_delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    rate: torch.Tensor,
    ids: torch.Tensor,
) -> torch.Tensor:
    """The outputs of all heads, [batch, sequence, heads, value], in the dtype of `query`.

    Within a chunk all tokens are computed together, by the inverse of a triangular matrix (the
    paper's section 3.3); in fp32.

    Args:
        query, key: [batch, sequence, key heads, key]; each serves as many heads in a row.
        value: [batch, sequence, heads, value].
        decay: [batch, sequence, heads], logarithms, not above 0. rate: the same, from 0 to 1.
        ids: [batch, sequence], the document of each token, ascending within each row.
    """
    dtype, length, repeats = query.dtype, query.shape[1], value.shape[2] // key.shape[2]
    query, key = (x.repeat_interleave(repeats, 2) if repeats > 1 else x for x in (query, key))
    query, key, value = (_chunks(x) for x in (query, key, value))
    decay, rate = (_chunks(x.unsqueeze(-1)).squeeze(-1) for x in (decay, rate))
    query, key = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (query, key))
    query = query * query.shape[-1] ** -0.5
    # What fills up the last chunk is a document of its own.
    ids = F.pad(ids, (0, -length % CHUNK), value=-1).unflatten(1, (-1, CHUNK)).unsqueeze(1)
    total, last = decay.cumsum(-1), ids[..., -1]
    # The state that enters a chunk is that of the last document in the chunk before.
    entering = F.pad(last[..., :-1], (1, 0), value=-2)
    seen = (ids.unsqueeze(-1) == ids.unsqueeze(-2)).tril()
    between = (total.unsqueeze(-1) - total.unsqueeze(-2)).masked_fill(~seen, -torch.inf).exp()
    since = (total.exp() * (ids == entering.unsqueeze(-1))).unsqueeze(-1)
    until = ((total[..., -1:] - total).exp() * (ids == last.unsqueeze(-1))).unsqueeze(-1)
    through = (total[..., -1].exp() * (last == entering))[..., None, None]
    fresh = key * rate.unsqueeze(-1)
    solved = torch.linalg.solve_triangular(
        (fresh @ key.mT) * between,
        torch.cat([value * rate.unsqueeze(-1), fresh * since], -1),
        upper=False,
        unitriangular=True,
    )
    new, predicted = solved.split((value.shape[-1], key.shape[-1]), -1)
    scores, query, key = (query @ key.mT) * between, query * since, key * until
    state, outputs = torch.zeros_like(key[:, :, 0].mT @ value[:, :, 0]), []
    # The one part that goes from chunk to chunk.
    steps = zip(*(x.unbind(2) for x in (new, predicted, query, key, scores, through)), strict=True)
    for fresh_values, known, asked, keys, seen_here, kept in steps:
        entering = fresh_values - known @ state
        outputs.append(asked @ state + seen_here @ entering)
        state = state * kept + keys.mT @ entering
    out = torch.stack(outputs, 2)
    return out.flatten(2, 3)[:, :, :length].transpose(1, 2).to(dtype)


def by_kernels(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    rate: torch.Tensor,
    bounds: torch.Tensor | None,
) -> torch.Tensor:
    """As `gated_delta_rule` by flash-linear-attention, on GPUs: bash setup.sh --with fla.

    Between chunks it keeps the states in fp32, and multiplies in the dtype of the queries. Its
    entry ends a compiled graph.

    Args:
        bounds: int32 [documents + 1], where each document begins in the flattened batch, and the
            end of the last one; None if each row is one.
    """
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    given = [query, key, value, decay.float(), rate]
    if bounds is not None:
        given = [x.flatten(0, 1).unsqueeze(0) for x in given]
    out, _ = chunk_gated_delta_rule(*given, use_qk_l2norm_in_kernel=True, cu_seqlens=bounds)
    return out.view(value.shape)


def _chunks(x: torch.Tensor) -> torch.Tensor:
    """[batch, sequence, heads, width] to fp32 [batch, heads, chunks, CHUNK, width].

    Zeros fill it up. In this order in memory: products would copy it, and keep the copies.
    """
    wide = x.transpose(1, 2).to(torch.float32, memory_format=torch.contiguous_format)
    return F.pad(wide, (0, 0, 0, -x.shape[1] % CHUNK)).unflatten(2, (-1, CHUNK))


def _channels(layer: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    """Of the rows of all queries, keys and values, those of this rank's heads."""
    mesh = getattr(layer, "tensor_parallel_mesh", None)
    if mesh is None:
        return rows
    rank, ranks = mesh.get_local_rank(), mesh.size()
    return torch.cat([piece.chunk(ranks)[rank] for piece in rows.split(layer.pieces)])


def _inputs_of(module: nn.Module) -> Callable[[nn.Module, torch.Tensor], Heads] | None:
    """How a layer of this kind makes its inputs; None if the module is none that is known."""
    if not all(hasattr(module, name) for name in PARTS) or module.conv1d.bias is not None:
        return None
    if module.activation != "silu":
        return None
    if all(hasattr(module, f"in_proj_{name}") for name in ("qkv", "z", "b", "a")):
        return _separate
    if hasattr(module, "in_proj_qkvz") and hasattr(module, "fix_query_key_value_ordering"):
        return _by_head
    return None


def _separate(layer: nn.Module, x: torch.Tensor) -> Heads:
    """Qwen 3.5: (queries, keys and values [..., their width], gate, rates, decays)."""
    return layer.in_proj_qkv(x), layer.in_proj_z(x), layer.in_proj_b(x), layer.in_proj_a(x)


def _by_head(layer: nn.Module, x: torch.Tensor) -> Heads:
    """Qwen3-Next: as `_separate`, of products that have all of one head after another."""
    *mixed, gate, rate, decay = layer.fix_query_key_value_ordering(
        layer.in_proj_qkvz(x), layer.in_proj_ba(x)
    )
    return torch.cat([part.flatten(2) for part in mixed], -1), gate, rate, decay
