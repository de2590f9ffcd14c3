"""Linear layers with LoRA or DoRA, and a base in bf16, NF4 or fp8.

LoRA: W x + s B A x (Hu et al. 2021, arXiv 2106.09685). DoRA: (m / ||W + s B A||) (W x + s B A x)
with the norms of the rows held constant in the backward pass, as in section 4.3 of its paper
(Liu et al. 2024, arXiv 2402.09353). With both W may be NF4 (QLoRA, QDoRA).
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import nn

from trainer.layers import fp8, nf4
from trainer.layers.patch import patch_forward
from trainer.parallel.sharded import full_tensor

# The ends of the names of an adapter's parameters.
ADAPTER_PARTS = (".lora_a.weight", ".lora_b.weight", ".magnitude")


class AdaptedLinear(nn.Module):
    """A linear layer with an adapter: `lora_a`, `lora_b`, and for DoRA `magnitude`.

    Args:
        base: has a weight [out, in] and a bias [out] or None, which become this layer's own.
        rank, alpha: the adapter's; s = alpha / rank.
        dropout: probability, on the adapter's input.
        use_dora: add the magnitude, [out], which `storage.weights` fills.
    """

    def __init__(
        self, base: nn.Module, rank: int, alpha: float, dropout: float = 0.0, use_dora: bool = False
    ) -> None:
        super().__init__()
        weight, like = base.weight, {"device": base.weight.device, "dtype": base.weight.dtype}
        self.register_parameter("weight", weight)
        self.register_parameter("bias", base.bias)
        magnitude = nn.Parameter(torch.empty(weight.shape[0], **like)) if use_dora else None
        self.register_parameter("magnitude", magnitude)
        self.adapter_enabled = True
        # A loaded adapter may have another factor: see trainer.storage.adapter.
        self.rank, self.scaling, self.use_rslora = rank, alpha / rank, False
        self.dropout = nn.Dropout(dropout) if dropout > 0 else nn.Identity()
        self.lora_a = nn.Linear(weight.shape[1], rank, bias=False, **like)
        self.lora_b = nn.Linear(rank, weight.shape[0], bias=False, **like)
        nn.init.zeros_(self.lora_b.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in] to [..., out]; the parameters are whole on this rank."""
        a, b = self.lora_a.weight, self.lora_b.weight
        out = adapted(self, x, self.weight, a, b, self.magnitude)
        return out if self.bias is None else out + self.bias


def is_adapter(name: str) -> bool:
    """True for the name of a parameter that an adapter adds."""
    return name.endswith(ADAPTER_PARTS)


def quantise(model: nn.Module, names: Iterable[str]) -> None:
    """Make the weights of the linear layers `names` NF4; on the meta device."""
    for name in names:
        nf4.pack_weight(model.get_submodule(name))
        _use_base_forward(model.get_submodule(name))


def use_fp8(model: nn.Module, names: Iterable[str], recipe: str) -> None:
    """Let the linear layers `names` multiply in fp8; A and B of an adapter stay as they are.

    Those that are too narrow stay as they are, too.

    Args:
        recipe: tensorwise or rowwise.
    """
    frozen = method(model) != "full"
    for layer in filter(fp8.applies, map(model.get_submodule, names)):
        fp8.prepare(layer, recipe, frozen)
        _use_base_forward(layer)


def _use_base_forward(layer: nn.Module) -> None:
    if not isinstance(layer, AdaptedLinear):
        patch_forward(layer, _base_forward)


def _base_forward(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    out = base(layer, x, layer.weight)
    return out if layer.bias is None else out + layer.bias


def method(model: nn.Module) -> str:
    """What the model trains: full, LoRA, DoRA, QLoRA or QDoRA."""
    layers = [m for m in model.modules() if isinstance(m, AdaptedLinear)]
    if not any(is_adapter(name) for name, _ in model.named_parameters()):
        return "full"
    quantised = any(hasattr(m, "nf4_table") for m in model.modules())
    dora = any(layer.magnitude is not None for layer in layers)
    return f"{'Q' if quantised else ''}{'DoRA' if dora else 'LoRA'}"


def adapted_layers(model: nn.Module) -> list[nn.Module]:
    """The layers with an adapter, experts among them; each has `rank`, `scaling`, `use_rslora`."""
    return [m for m in model.modules() if isinstance(m, AdaptedLinear) or len(_adapters(m))]


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Within it the model computes as its base, without its adapters."""
    layers = adapted_layers(model)
    for layer in layers:
        layer.adapter_enabled = False
    try:
        yield
    finally:
        for layer in layers:
            layer.adapter_enabled = True


def _adapters(module: nn.Module) -> nn.ModuleDict | tuple[()]:
    return getattr(module, "adapters", ())


def base(layer: nn.Module, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """[..., in] to [..., out] by `weight`, the layer's own or this rank's part; without bias."""
    if hasattr(layer, "nf4_table"):
        return nf4.linear(x, weight, layer.nf4_table)
    if hasattr(layer, "fp8_recipe"):
        return fp8.linear(x, weight, layer.fp8_recipe, getattr(layer, "fp8_largest", None))
    return F.linear(x, weight)


def adapted(
    layer: AdaptedLinear,
    x: torch.Tensor,
    weight: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    magnitude: torch.Tensor | None = None,
    total: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> torch.Tensor:
    """[..., in] to [..., out] by base and adapter, without bias.

    The tensors are the layer's own or this rank's parts of them, of rows or of columns.

    Args:
        magnitude: [out], DoRA's.
        total: sums over the ranks that hold the other columns of the same rows.
    """
    if not layer.adapter_enabled:
        return base(layer, x, weight)
    # The factor meets r numbers per token, not all outputs, in the backward pass too.
    inner = F.linear(layer.dropout(x), a) * layer.scaling
    out = base(layer, x, weight) + F.linear(inner, b)
    if magnitude is None:
        return out
    squares = _squares(layer, weight, a, b)
    if total is not None:
        squares = total(squares)
    # A row of zeros stays one; rounded like the magnitude, the ratio is exactly 1 at first.
    norms = squares.clamp_min(torch.finfo(torch.float32).tiny).sqrt().to(magnitude.dtype)
    return out * (magnitude / norms)


@torch.no_grad()
def _squares(
    layer: AdaptedLinear, weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor
) -> torch.Tensor:
    """Sum of squares of each row of W + s B A, [out] in fp32.

    Multiplied out as ||w||^2 + 2 s b.(W A') + s^2 b (A A') b', so that B A is never made.
    """
    dense = _dense(layer, weight, a.dtype)
    own = torch.linalg.vector_norm(dense, dim=1, dtype=torch.float32)
    cross = F.linear(dense, a).float()
    a, b = a.float(), b.float()
    return (
        own.square()
        + 2 * layer.scaling * (cross * b).sum(1)
        + layer.scaling**2 * (F.linear(b, a @ a.T) * b).sum(1)
    )


def _dense(layer: nn.Module, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if hasattr(layer, "nf4_table"):
        return nf4.dequantise(weight, layer.nf4_table, dtype)
    return weight


def row_norms(rows: torch.Tensor, quantised: bool) -> torch.Tensor:
    """DoRA's first magnitude: the norms [rows] (fp32) of a base weight's rows [rows, in]."""
    if quantised:
        rows = nf4.dequantise(nf4.quantise(rows), nf4.table().to(rows.device), torch.float32)
    return torch.linalg.vector_norm(rows, dim=1, dtype=torch.float32)


@torch.no_grad()
def merged(layer: nn.Module, dtype: torch.dtype) -> torch.Tensor:
    """The whole weight [out, in] that the layer computes with; all ranks call this together.

    Over an NF4 base this is the dequantised base with the update: the weights that were trained
    and whose loss was measured. The update learned to make up for the rounding of that base,
    and merged into the unquantised weights it would be another, unmeasured model.
    """
    weight = _dense(layer, full_tensor(layer.weight.detach()), dtype)
    if not isinstance(layer, AdaptedLinear):
        return weight.to(dtype)
    a, b = full_tensor(layer.lora_a.weight.detach()), full_tensor(layer.lora_b.weight.detach())
    result = weight.float() + layer.scaling * (b.float() @ a.float())
    if layer.magnitude is not None:
        magnitude = full_tensor(layer.magnitude.detach())
        norms = torch.linalg.vector_norm(result, dim=1).to(magnitude.dtype)
        result *= (magnitude / norms).float()[:, None]
    return result.to(dtype)
