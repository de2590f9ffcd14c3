"""What a kind of adapter is: all that the rest of the trainer asks of one.

A model has at most one kind, `Decoder.adapter`. runspec/adapters.py declares its parameters. Every
module that a kind adds or changes has `adapter_enabled`, and computes what the base model does
while that is False.
"""

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import nn

from runspec import adapters
from runspec.adapters import Adapter, Sizes
from trainer.config import refused_path
from trainer.errors import ConfigError
from trainer.layers import nf4
from trainer.parallel.sharded import full_tensor

if TYPE_CHECKING:
    from trainer.config import TrainConfig
    from trainer.model import Decoder

# By name, the class of each kind that is the trainer's own.
BUILT_IN = {
    "lora": "trainer.layers.adapters.lora.LoRA",
    "dora": "trainer.layers.adapters.lora.DoRA",
    "ia3": "trainer.layers.adapters.ia3.IA3",
    "prompt": "trainer.layers.adapters.prompt.Prompt",
    "prefix": "trainer.layers.adapters.prefix.Prefix",
}
PEFT_PREFIX = "base_model.model."
# By tensor of the hub, the base parameters in its rows: trainer.checkpoint.weights.hub_tensors.
Hub = Mapping[str | None, list[tuple[str, torch.Tensor]]]
# (name in the layer, parameter) -> what this rank computes with.
Own = Callable[[str, torch.Tensor], torch.Tensor]


class AdaptedLinear(nn.Module, ABC):
    """A linear layer with an adapter.

    It has the base's weight [out, in] and bias [out] or None; `parts` has the sizes of its other
    parameters by name, as runspec.adapters says them.
    """

    parts: Mapping[str, Sizes]

    def __init__(self, base: nn.Module, parts: Mapping[str, Sizes]) -> None:
        super().__init__()
        self.parts, self.adapter_enabled = parts, True
        self.register_parameter("weight", base.weight)
        self.register_parameter("bias", base.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in] to [..., out]; the parameters are whole on this rank."""
        out = self.adapted(x, _whole)
        return out if self.bias is None else out + self.added_bias(_whole)

    @abstractmethod
    def adapted(
        self,
        x: torch.Tensor,
        own: Own,
        total: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """[..., in] to [..., out] by base and adapter, without bias.

        Args:
            own: how this rank's part of a parameter is taken.
            total: sums over the ranks that hold the other columns of the same rows.
        """

    def added_bias(self, own: Own) -> torch.Tensor:
        """What it adds to its product, if it has a bias."""
        return own("bias", self.bias)

    def factors(self, x: torch.Tensor, own: Own) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Pairs whose sum of input @ weight.T is the product, without bias.

        A loss asks this of the output head, which makes no logits as a whole.
        """
        raise ConfigError(f"model: no loss knows an output head of kind {type(self).__name__}")

    def merge(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """This rank's part of `weight` or `bias`, [out, in] or [out], with the adapter in it.

        All ranks call this together. `trainer.layers.nf4.dense_place` of the parameter says which
        rows and columns the part has.
        """
        return tensor

    @property
    def products(self) -> tuple[float, float]:
        """Numbers of the adapter that a token's input, and their result, are multiplied with."""
        return 0.0, 0.0


def _whole(name: str, parameter: torch.Tensor) -> torch.Tensor:
    return parameter


class Loaded(NamedTuple):
    """What an adapter's file means for a model.

    tensors: whole, by the model's own names; what is none of its names stays as it is.
    attributes: of modules by name, which are set beside the tensors, such as a scale.
    """

    tensors: dict[str, torch.Tensor]
    attributes: dict[str, dict[str, Any]]


class AdapterKind(ABC):
    """One kind of adapter in one model.

    Attributes:
        declared: what it is as data; a class of your own writes it with literals only.
        row_multiple: what the length of every row must be divisible by.

    Args:
        settings: the model block's values of `declared.keys`, those that are given.
    """

    declared: ClassVar[Adapter]
    row_multiple: int = 1

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self.settings = settings

    @abstractmethod
    def add(self, model: "Decoder") -> None:
        """Add the parameters to a model on the meta device; raises ConfigError if it cannot."""

    def fit(self, model: "Decoder", config: "TrainConfig") -> list[str]:
        """Read what the rest of the config says of it; return what does not fit, a line each.

        It is called once, on the meta device, before the model is laid out.
        """
        return []

    @property
    def virtual_tokens(self) -> int:
        """Positions that it takes before each document."""
        return dict(self.declared.numbers(self.settings)).get(adapters.NUM_VIRTUAL, 0)

    @abstractmethod
    def first_value(
        self, model: "Decoder", name: str, shape: torch.Size, generator: torch.Generator
    ) -> torch.Tensor:
        """The whole tensor that a parameter begins with.

        All ranks call this together, after the base weights are loaded.
        """

    def owns(self, name: str) -> bool:
        """True for the name of a parameter of this kind; all others are frozen."""
        return f".{name}".endswith(tuple(f".{part}" for part in self.declared.parts))

    def identity(self, model: "Decoder") -> dict[str, Any]:
        """What else must stay the same between a checkpoint and the start that resumes it."""
        return {}

    def to_peft(
        self, model: "Decoder", hub: Hub, dtype: torch.dtype
    ) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """PEFT's tensors by name, and adapter_config.json's fields of this kind.

        All ranks call this together. A kind that PEFT does not know has its own names.
        """
        tensors = {
            PEFT_PREFIX + plain_name(name): full_tensor(parameter.detach()).to(dtype).cpu()
            for name, parameter in model.named_parameters()
            if self.owns(name)
        }
        return tensors, dict(self.settings)

    def from_peft(
        self,
        model: "Decoder",
        hub: Hub,
        tensors: dict[str, torch.Tensor],
        settings: Mapping[str, Any] | None,
        faults: list[str],
    ) -> Loaded:
        """The inverse, also of a file with the model's own names; adds what differs to `faults`.

        Args:
            settings: adapter_config.json; None if it does not lie beside the file.
        """
        faults += [
            f"the adapter has {key}={(settings or {})[key]}, the model model.{key}={value}"
            for key, value in self.settings.items()
            if key in (settings or {}) and (settings or {})[key] != value
        ]
        return Loaded({n.removeprefix(PEFT_PREFIX): t for n, t in tensors.items()}, {})


def plain_name(name: str) -> str:
    """A parameter's name without the part that activation checkpointing adds."""
    return name.replace("_checkpoint_wrapped_module.", "")


def kind_of_layer(name: str) -> str:
    """A name without its layer's number."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def kind_of(model: Mapping[str, Any]) -> AdapterKind | None:
    """The kind that a `model` block names; None if all weights are trained.

    Raises:
        ConfigError: there is no such kind.
    """
    name = adapters.name_of(model)
    if name is None:
        return None
    dotted = BUILT_IN.get(name, name)
    if refused := refused_path("model.adapter", dotted):
        raise ConfigError(f"{refused}, or be one of {', '.join(BUILT_IN)}")
    module, _, last = dotted.rpartition(".")
    try:
        kind = getattr(importlib.import_module(module), last)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"model.adapter: there is no {dotted}: {error}") from None
    if not (isinstance(kind, type) and issubclass(kind, AdapterKind)):
        raise ConfigError(f"model.adapter: {dotted} is no trainer.layers.adapters.base.AdapterKind")
    return kind({key: model[key] for key in kind.declared.keys if model.get(key) is not None})


def method(model: "Decoder") -> str:
    """What a model trains: full, or an adapter's title, with a Q before it over a base in NF4."""
    if model.adapter is None:
        return "full"
    title = model.adapter.declared.title
    tables = (getattr(module, "nf4_table", None) for module in model.modules())
    if (table := next((each for each in tables if each is not None), None)) is None:
        return title
    return f"Q{title}" if table.shape[1] == nf4.IN_A_BYTE["nf4"] else f"{title} over fp8"


def turn_off(module: nn.Module) -> list[nn.Module]:
    """Let `module` compute what its base model does from now on; returns what was changed."""
    changed = [m for m in module.modules() if vars(m).get("adapter_enabled")]
    for each in changed:
        each.adapter_enabled = False
    return changed


@contextmanager
def disabled(module: nn.Module) -> Iterator[None]:
    """Within it `module` computes what its base model does, on every layout and compiled.

    A backward pass belongs within it, too: activation checkpointing computes the model again.
    """
    changed = turn_off(module)
    try:
        yield
    finally:
        for each in changed:
            each.adapter_enabled = True
