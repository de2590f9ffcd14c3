"""What the rest of the trainer may ask of a model, whatever library its layers come from.

models/transformers makes a subclass of `Decoder` of the class that a model folder names; a
component of your own may be one too (docs/models.md, "Your own model").
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping
from enum import Enum, auto
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard

from runspec.adapters import NUM_VIRTUAL, Adapter
from runspec.keys.train import ModelSpec
from trainer.errors import ConfigError
from trainer.sharded import full_tensor

# The score head's weight, by the name that transformers' classes for sequences have for it.
SCORE = "score.weight"
PEFT_PREFIX = "base_model.model."
# By tensor of transformers' class, the base parameters in its rows:
# trainer.checkpoint.weights.hub_tensors.
Hub = Mapping[str | None, list[tuple[str, torch.Tensor]]]


class Role(Enum):
    """What tensor parallelism does with a module.

    Every module with parameters has a role. A norm, whatever its role, is an RMSNorm: it has one
    parameter, `eps`, and `unit_offset` = True if it multiplies by 1 + its parameter, as Gemma's.
    """

    # Its rows, the vocabulary, are split. `output_scale`, if it has one, multiplies its output.
    EMBEDDING = auto()
    # As a column layer; its logits stay split over the vocabulary.
    OUTPUT = auto()
    # The score head: its inputs are split, and each rank gets the sum.
    SCORE = auto()
    # A linear layer whose outputs are split.
    COLUMN = auto()
    # A column layer that computes several outputs one after another, of which each rank gets its
    # part. `pieces` has their widths.
    FUSED = auto()
    # A linear layer whose inputs are split, behind column layers; its outputs are summed.
    ROW = auto()
    # A norm before column layers: it takes this rank's tokens and gathers the whole sequence.
    NORM = auto()
    # A module that begins with column layers where no norm stands before them: it gathers the whole
    # sequence.
    GATHER = auto()
    # Whole on every rank, on this rank's tokens or heads: other norms, and linear layers.
    REPLICATED = auto()
    # A norm over all features that a column layer has split.
    SPLIT_NORM = auto()
    # An attention layer with parameters of its own, a number for each head.
    HEADS = auto()
    # A router, a norm with a gate: whole on every rank, and computed by its own forward pass on
    # this rank's tokens or heads.
    WHOLE = auto()
    # The experts of a layer, from trainer.layers.experts, on this rank's tokens; expert parallelism
    # spreads them.
    EXPERT = auto()


class Documents(NamedTuple):
    """Which document each token of a packed batch belongs to."""

    # int32 [batch, sequence], the number of the document within its row; padding has one of its own
    ids: torch.Tensor
    # int32 [documents + 1], where each begins in the flattened batch, and the end of the last one
    cu_seqlens: torch.Tensor

    def mask(self) -> torch.Tensor:
        """Boolean [batch, sequence, sequence]: True if a query (row) may see a key (column)."""
        same = self.ids.unsqueeze(2) == self.ids.unsqueeze(1)
        return same.tril()


class Inputs(NamedTuple):
    """What a model gets in one forward pass. FSDP and the compiler look into a named tuple."""

    # int64 [batch, sequence]
    tokens: torch.Tensor
    # Documents of packed rows, what a hook has made of them, or a boolean [batch, sequence,
    # sequence], for DocumentAttention; None if each row is one document
    documents: Any = None
    # int64 [batch, sequence], the position of each token in its document; None counts along the row
    positions: torch.Tensor | None = None


class Decoder(nn.Module, ABC):
    """A causal language model.

    Its attention layers use trainer.layers.attention.DocumentAttention, which keeps the documents
    of packed rows apart. It is built on the meta device.
    """

    # The transformer blocks, in order. Each is compiled, checkpointed and sharded separately, and
    # takes its input [batch, sequence, dim] as its first argument.
    blocks: nn.ModuleList
    # What the log calls it; None for the component that made it.
    title: str | None = None
    # transformers' model_type.
    family: str = ""
    # The kind of its adapter; None if all weights are trained.
    adapter: "AdapterKind | None" = None
    # Last parts of the names of the embedding and the output head, if these are trained whole
    # beside the adapter.
    modules_to_save: tuple[str, ...] = ()
    # Has a weight [vocabulary, dim].
    embedding: nn.Module
    # Between the last block and the output.
    final_norm: nn.Module
    # Number of positions that the model knows.
    max_seq_len: int
    # What the logits are multiplied with, before the soft cap.
    output_multiplier: float | None = None
    # Logits x become cap * tanh(x / cap).
    output_softcap: float | None = None
    # A loss compiles what it does to its logits; see trainer.layers.head.
    compiles_loss: bool = False
    # Packed rows keep their documents apart.
    packs: bool = True
    # Names of tensors that belong to other parts of the folder's model, such as its part for
    # images; the export holds them as they are.
    carried_tensors: tuple[str, ...] = ()
    # Linear layers that read the same tensor, as far as the model knows.
    shared_inputs: tuple[tuple[str, ...], ...] = ()
    # The names of all tensors of the model folder, for `fit`.
    folder_tensors: Collection[str] = ()

    if TYPE_CHECKING:
        # A subclass has these as attributes, which a real property would refuse, or computes them.
        @property
        def output_head(self) -> nn.Module | None:
            """A linear layer with or without an adapter; None if the embedding is tied to it."""

        @property
        def ignored_tensors(self) -> tuple[str, ...]:
            """Patterns of tensors that a model folder may hold, and that no parameter has."""
    else:
        ignored_tensors = ()

    @abstractmethod
    def hidden(self, inputs: Inputs) -> torch.Tensor:
        """The last block's output, [batch, sequence, dim]."""

    def forward(self, inputs: Inputs, output: Callable[..., Any] | None = None) -> Any:
        """Return the logits, or what `output` makes of the last block's output.

        Args:
            output: called with this model and its hidden states, [batch, sequence, dim], where FSDP
                has gathered the output head; None is `unembed`. Virtual tokens of an adapter are
                among them until the final norm, which takes them out.
        """
        hidden = self.hidden(inputs)
        if output is None:
            return self.unembed(hidden)
        # The head's weight is read, and the head not called, which would gather it.
        if isinstance(self.output_head, FSDPModule):
            self.output_head.unshard()
        return output(self, hidden)

    @abstractmethod
    def roles(self) -> dict[str, Role]:
        """The role of each module by its name; * stands for the number of a block."""

    @abstractmethod
    def sizes(self) -> dict[str, int]:
        """What tensor parallelism divides: num_heads, num_kv_heads, intermediate_dim."""

    def recurrent_state(self, module: str) -> int:
        """Numbers in all heads' states, if the module of this name is linear attention; else 0."""
        return 0

    def active_experts(self, module: str) -> int:
        """How many of its experts a token meets in the layer of experts of this name."""
        return 0

    @property
    def score_head(self) -> nn.Module | None:
        """The linear layer [1, dim] that a reward model has in place of its output head."""
        return dict(self.named_children()).get("score")

    def use_score_head(self) -> None:
        """Put a score head, without bias, in place of the output head.

        Call it on the meta device, before the model is laid out.

        Raises:
            ConfigError: the trainer cannot make a reward model of it.
        """
        raise ConfigError(
            "model: a reward model is made of transformers' classes only; leave model._component_ "
            "out, and give model.lora_rank for LoRA"
        )

    def scores(self, hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """The score head's outputs, to be called in `forward`'s `output`.

        Args:
            hidden: the last block's output, [batch, sequence, dim].
            positions: int64 [documents], indices into the flattened batch.

        Returns:
            [documents], fp32; each rank of a split model has all of them.
        """
        if (head := self.score_head) is None:
            raise RuntimeError("the model has no score head; call use_score_head first")
        rows = self.final_norm(hidden).flatten(0, 1).index_select(0, positions)
        scores: torch.Tensor = head(rows)
        return scores.squeeze(-1)

    @property
    def vocab_size(self) -> int:
        """Number of tokens that the embedding knows."""
        return self.embedding.weight.shape[0]

    def unembed(self, hidden: torch.Tensor) -> torch.Tensor:
        """[batch, sequence, dim] of the last block to logits [batch, sequence, vocabulary], fp32.

        Under tensor parallelism they are DTensors that are split over the vocabulary.
        """
        hidden, weight = self.final_norm(hidden), self.embedding.weight
        if self.output_head is not None:
            logits = self.output_head(hidden)
        elif isinstance(weight, DTensor):
            own = F.linear(hidden, weight.to_local())
            logits = DTensor.from_local(own, weight.device_mesh, [Shard(-1)], run_check=False)
        else:
            logits = F.linear(hidden, weight)
        if self.output_multiplier is not None:
            logits = logits * self.output_multiplier
        logits = logits.float()
        if self.output_softcap is None:
            return logits
        return torch.tanh(logits / self.output_softcap) * self.output_softcap

    def prepare_split(self, ranks: int) -> None:
        """Divide the counts of heads in its modules: each rank has one of this many parts."""

    def split_faults(self) -> list[str]:
        """Why tensor parallelism cannot split it into any number of parts, one line each."""
        return []

    def linear_layers(self, *roles: Role) -> list[str]:
        """Names of the linear layers in the blocks, with an adapter or not; only of these roles.

        These are the layers that `quantize_base` and fp8 change, not the embedding and the output.
        """
        prefix = name_of(self.blocks, self)
        wanted = [pattern for pattern, role in self.roles().items() if role in roles]
        return [
            name
            for name, layer in self.named_modules()
            if name.startswith(f"{prefix}.")
            # One with an adapter is a trainer.layers.linear.AdaptedLinear.
            and (isinstance(layer, nn.Linear) or hasattr(layer, "adapted"))
            and not self.is_adapter(f"{name}.weight")
            and (not roles or any(fnmatchcase(name, pattern) for pattern in wanted))
        ]

    @property
    def longest_document(self) -> int:
        """Number of positions that the model knows and virtual tokens of an adapter leave."""
        return self.max_seq_len - (0 if self.adapter is None else self.adapter.virtual_tokens)

    def is_adapter(self, parameter: str) -> bool:
        """True for the name of a parameter that an adapter adds."""
        return self.adapter is not None and self.adapter.owns(parameter)

    def is_trained(self, parameter: str) -> bool:
        """True for the name of a parameter that is not frozen.

        All are without an adapter; beside one `modules_to_save` and the score head.
        """
        if self.adapter is None or self.adapter.owns(parameter):
            return True
        return self.is_saved(parameter) or parameter == SCORE

    def is_saved(self, parameter: str) -> bool:
        """True for the name of a parameter of `modules_to_save`."""
        module, _, name = parameter.rpartition(".")
        return name == "weight" and module in self.tables and _last(module) in self.modules_to_save

    @property
    def is_tied(self) -> bool:
        """Whether the embedding's weight is the output's, too."""
        return self.output_head is None and self.score_head is None

    @property
    def tables(self) -> list[str]:
        """The names of the embedding and of the output head, if it has one of its own."""
        own = [self.embedding, self.output_head]
        return [name for name, module in self.named_modules() if any(module is m for m in own)]

    def fit(self, hf_config: dict[str, Any], spec: ModelSpec) -> list[str]:
        """Make the model compute what config.json says; return what differs, one line per fault.

        It is called once, on the meta device, before the model is laid out.

        Args:
            hf_config: the content of the model folder's config.json.
        """
        return []

    def shares_keys(self) -> bool:
        """Whether layers use the keys and values of another layer."""
        return False

    def fill_buffers(self, device: torch.device) -> None:
        """Compute on `device` the buffers that no file holds, such as rotary tables."""

    def first_values(self, seed: int) -> Iterator[tuple[str, torch.Tensor]]:
        """Every parameter's name and first value for training from scratch, in fp32 on the CPU.

        They depend on the seed and the model alone. It is called on the meta device, before the
        model is laid out, and holds one module's parameters at a time.

        Raises:
            ConfigError: the source of the model knows no first values, or not of all parameters.
        """
        raise ConfigError("from_scratch: this source of models knows no first weights")

    def hub_name(self, parameter: str) -> str | None:
        """Name of the tensor in transformers' class that holds a parameter; None if none does.

        Parameters with the same tensor lie in its rows one after another, in the model's order.
        """
        return parameter

    def file_name(self, tensor: str) -> str:
        """Name that the files of the model folder have for a tensor of transformers' class."""
        return tensor

    def hub_pieces(self, parameter: str) -> dict[str, tuple[Any, ...]]:
        """The tensors of the folder's files that each hold a piece of a parameter, and its index.

        So experts, of which files have a tensor each, are one parameter here. {} if `hub_name`
        tells the tensor.
        """
        return {}

    def routers(self) -> list[nn.Module]:
        """What chooses experts: modules that return (logits, weights, index), as Balance says.

        A router that balances by a bias of its own is not listed.
        """
        return []

    def held_buffers(self) -> dict[str, torch.Tensor]:
        """By name, the buffers that a model folder holds; they are read and written, not trained.

        They keep their dtype, whole on every rank.
        """
        return {}

    def expert_shares(self) -> dict[str, float]:
        """The parameters of the blocks that are in no linear layer, and no norm's or bias.

        By name, the share of each that one token is multiplied with: of experts those that are
        active, of a router all.
        """
        return {}


class AdapterKind(ABC):
    """One kind of adapter in one model: all that the rest of the trainer asks of it.

    Every module that it adds or changes has `adapter_enabled`, and computes what the base model
    does while that is False.

    Args:
        settings: the model block's values of `declared.keys`, those that are given.
    """

    # What it is as data; a class of your own writes it with literals only.
    declared: ClassVar[Adapter]
    # What the length of every row must be divisible by.
    row_multiple: int = 1

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self.settings = settings

    @abstractmethod
    def add(self, model: Decoder) -> None:
        """Add the parameters to a model on the meta device; raises ConfigError if it cannot."""

    def fit(self, model: Decoder, tokenizer: Mapping[str, Any]) -> list[str]:
        """Read what else it needs; return what does not fit, a line each.

        It is called once, on the meta device, before the model is laid out.

        Args:
            tokenizer: the config's block.
        """
        return []

    @property
    def virtual_tokens(self) -> int:
        """Positions that it takes before each document."""
        return dict(self.declared.numbers(self.settings)).get(NUM_VIRTUAL, 0)

    @abstractmethod
    def first_value(
        self, model: Decoder, name: str, shape: torch.Size, generator: torch.Generator
    ) -> torch.Tensor:
        """The whole tensor that a parameter begins with.

        All ranks call this together, after the base weights are loaded.
        """

    def owns(self, name: str) -> bool:
        """True for the name of a parameter of this kind; all others are frozen."""
        return f".{name}".endswith(tuple(f".{part}" for part in self.declared.parts))

    def to_peft(
        self, model: Decoder, hub: Hub, dtype: torch.dtype
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

    def check_type(self, settings: Mapping[str, Any] | None, faults: list[str]) -> None:
        """Add to `faults` that adapter_config.json is of another kind."""
        given = (settings or {}).get("peft_type", self.declared.peft_type)
        if given != self.declared.peft_type:
            faults.append(f"is a {given} adapter, the model's is {self.declared.peft_type}")

    def from_peft(
        self,
        model: Decoder,
        hub: Hub,
        tensors: dict[str, torch.Tensor],
        settings: Mapping[str, Any] | None,
        faults: list[str],
    ) -> dict[str, torch.Tensor]:
        """The inverse, also of a file with the model's own names; adds what differs to `faults`.

        Tensors are whole, by the model's own names; what is none of its names stays as it is.

        Args:
            settings: adapter_config.json; None if it does not lie beside the file.
        """
        faults += [
            f"the adapter has {key}={(settings or {})[key]}, the model model.{key}={value}"
            for key, value in self.settings.items()
            if key in (settings or {}) and (settings or {})[key] != value
        ]
        return {n.removeprefix(PEFT_PREFIX): t for n, t in tensors.items()}


def plain_name(name: str) -> str:
    """A parameter's name without the part that activation checkpointing adds."""
    return name.replace("_checkpoint_wrapped_module.", "")


def name_of(module: nn.Module, whole: nn.Module) -> str:
    """The name of a module in a larger one."""
    return next(name for name, each in whole.named_modules() if each is module)


def pattern(name: str) -> str:
    """A name with * in place of its block's number."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def _last(name: str) -> str:
    return name.rpartition(".")[2]
