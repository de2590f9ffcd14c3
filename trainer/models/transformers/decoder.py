"""A model class of transformers as a `Decoder`: its parts, roles, buffers and names."""

import math
import re
from collections.abc import Callable, Iterator
from copy import copy
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING

from runspec.keys.train import ModelSpec
from trainer.checkpoint import weights
from trainer.checkpoint.weights import named_parameters
from trainer.errors import ConfigError
from trainer.layers import delta, nf4
from trainer.layers import experts as routed
from trainer.layers.score import ScoreHead
from trainer.model import Decoder, Inputs, Role, name_of, pattern
from trainer.model import plain_name as plain
from trainer.models.transformers import experts, head, rope
from trainer.models.transformers.names import FileNames
from trainer.models.transformers.roles import LINEAR, QKV, SLIDING, Flow, Roles

PLACE = "checkpointer.checkpoint_dir"
CHUNKED = "chunked_attention"
LAYER_TYPES = {"full_attention", SLIDING, LINEAR, CHUNKED}


class TransformersDecoder(Decoder):
    """The text model and the output layer of a class, by the names that they have in the class.

    The text model runs as it is, all but the final norm, which `unembed` has. What the attention
    layers ask for, and which norms stand before which linear layers, is seen in one forward pass on
    the meta device, so that no list of families is needed. A larger model's other parts, such as
    that for images, are left out; the export takes them from the folder.

    Args:
        whole: a `...ForCausalLM` or `...ForConditionalGeneration` on the meta device, whose text
            model has the attention function of models/transformers/attention.

    Raises:
        ConfigError: it computes what the trainer cannot; one line per reason.
    """

    def __init__(self, whole: PreTrainedModel) -> None:
        super().__init__()
        self.title = f"transformers.{type(whole).__name__}"
        self.config = whole.config.get_text_config()
        self._is_part = self.config is not whole.config
        base = _text_model(whole)
        self._initialise: Callable[[nn.Module], None] = base._init_weights
        self._prefix = name_of(base, whole)
        head_name = name_of(whole.get_output_embeddings(), whole)
        self._names = FileNames(self.config.model_type, self._prefix, head_name)
        # What a folder may hold beside the model, such as layers that predict further tokens.
        self._others = [re.compile(p) for p in whole._keys_to_ignore_on_load_unexpected or ()]
        experts.prepare(base)
        delta.prepare(base)
        self._held = [f"{self._prefix}.{name}" for name in _held_buffers(base)]
        linear = (getattr(self.config, "layer_types", None) or []).count(LINEAR)
        self._linear = linear > 0
        # The state of others goes from token to token, whatever document it belongs to.
        self.packs = linear == len(dict(delta.layers(base)))
        self._check_parts(base)
        scaling = head.scaling(whole, self._prefix, head_name)
        if isinstance(scaling, str):
            self._refuse([scaling])
        else:
            self.output_multiplier, self.output_softcap = scaling
        self._put(self._prefix, base)
        self.final_norm, base.norm = base.norm, nn.Identity()
        self._head: str | None = None
        if not self.config.tie_word_embeddings:
            self._head = head_name
            self._put(head_name, whole.get_output_embeddings())
        self.max_seq_len = _longest_row(self.config)
        rope.prepare(self)
        kinds = getattr(self.config, "layer_types", None)
        flow = Flow(self, self.hidden)
        self._refuse(flow.faults(self, kinds))
        roles = Roles(
            self, flow, self._prefix, getattr(self.config, "base_model_tp_plan", None) or {}
        )
        self._roles, self._unsplit, self._pieces = roles.by_pattern(), roles.unsplit, roles.pieces
        self.shared_inputs = flow.shared_inputs(self.linear_layers())
        if not self.packs:
            self._unsplit = ["it has layers of linear attention"]
        self._sizes = self._split_sizes()

    def _put(self, name: str, module: nn.Module) -> None:
        """Make a module a part of this one by the name that it has in the class."""
        owner, (*above, last) = self, name.split(".")
        for each in above:
            if each not in owner._modules:
                owner.add_module(each, nn.Module())
            owner = getattr(owner, each)
        owner.add_module(last, module)

    @property
    def base(self) -> nn.Module:
        """The text model: transformers' model without its output layer."""
        return self.get_submodule(self._prefix)

    @property
    def blocks(self) -> nn.ModuleList:
        """The transformer blocks."""
        return self.base.layers

    @property
    def embedding(self) -> nn.Module:
        """The token embedding."""
        return self.base.get_input_embeddings()

    @property
    def output_head(self) -> nn.Module | None:
        """The output layer; None if it is tied to the embedding."""
        return None if self._head is None else self.get_submodule(self._head)

    def use_score_head(self) -> None:
        """See `Decoder.use_score_head`; it is that of the class's ...ForSequenceClassification."""
        known = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING
        if self._is_part or type(self.config) not in known:
            what = "its text model is a part" if self._is_part else "transformers has no class"
            self._refuse([f"as a reward model, as {what} for sequence classification"])
        if self._head is not None:
            owner, _, last = self._head.rpartition(".")
            delattr(self.get_submodule(owner), last)
            self._head = None
        self.score = ScoreHead(self.config.hidden_size)
        self._roles = {k: r for k, r in self._roles.items() if r is not Role.OUTPUT}
        self._roles["score"] = Role.SCORE

    @property
    def ignored_tensors(self) -> tuple[str, ...]:
        """Rotary tables of old folders, and the copy of a tied output."""
        return ("*rotary_emb.inv_freq", *((self._names.head,) if self._head is None else ()))

    def hidden(self, inputs: Inputs) -> torch.Tensor:
        """See `Decoder.hidden`."""
        tokens, positions = inputs.tokens, inputs.positions
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device).unsqueeze(0)
        hidden: torch.Tensor = self.base(
            input_ids=tokens, position_ids=positions, use_cache=False, documents=inputs.documents
        ).last_hidden_state
        return hidden

    def roles(self) -> dict[str, Role]:
        """The role of each module by its name, from the class's own tensor-parallel plan."""
        return self._roles

    def sizes(self) -> dict[str, int]:
        """What tensor parallelism divides."""
        return self._sizes

    def _split_sizes(self) -> dict[str, int]:
        keys = 0
        for layer in (m for m in self.modules() if hasattr(m, "document_attention")):
            if (inner := getattr(layer, "k_proj", None)) is not None:
                # Of what all layers have in common: Gemma 4's have different numbers.
                keys = math.gcd(keys, inner.out_features // layer.document_attention.head_dim)
        heads, config = self.config.num_attention_heads, self.config
        sizes = {
            "num_heads": heads,
            "num_kv_heads": keys or getattr(config, "num_key_value_heads", None) or heads,
            # Where all layers have experts, no MLP is split.
            "intermediate_dim": getattr(config, "intermediate_size", None) or heads,
        }
        for _, layer in delta.layers(self):
            sizes["linear_num_key_heads"] = layer.num_k_heads
        return sizes

    def prepare_split(self, ranks: int) -> None:
        """See `Decoder.prepare_split`."""
        for name, layer in self.named_modules():
            if name in self._pieces:
                layer.pieces = self._pieces[name]
        for layer in (m for m in self.modules() if hasattr(m, QKV)):
            layer.config = copy(layer.config)
            layer.config.num_attention_heads //= ranks
            layer.num_key_value_heads //= ranks
        for _, layer in delta.layers(self):
            delta.divide(layer, ranks)

    def recurrent_state(self, module: str) -> int:
        """See `Decoder.recurrent_state`."""
        config = self.config
        if not self._linear or not hasattr(self.get_submodule(module), "A_log"):
            return 0
        heads, width = config.linear_num_value_heads, config.linear_value_head_dim
        return heads * width * config.linear_key_head_dim

    def active_experts(self, module: str) -> int:
        """See `Decoder.active_experts`."""
        return self.config.num_experts_per_tok

    def linear_layers(self, *roles: Role) -> list[str]:
        """See `Decoder.linear_layers`; routers are left out, whatever their class is."""
        names = super().linear_layers(*roles)
        return [name for name in names if not experts.is_router(self.get_submodule(name))]

    def shares_keys(self) -> bool:
        """See `Decoder.shares_keys`; Gemma 3n and some of Gemma 4."""
        return bool(getattr(self.config, "num_kv_shared_layers", 0))

    def split_faults(self) -> list[str]:
        """Why tensor parallelism cannot split it, one line each."""
        kind = self.config.model_type
        return [
            f"tensor_parallel_dim: a {kind} model cannot be split: {reason}; set "
            "tensor_parallel_dim=1"
            for reason in self._unsplit
        ]

    def fill_buffers(self, device: torch.device) -> None:
        """Compute rotary tables and embedding scales as transformers does when it loads a model."""
        for parameter in self.parameters():
            # Weights come from the folder: transformers' functions leave marked ones alone.
            parameter._is_hf_initialized = True
        for module in self.modules():
            own = module._buffers
            if not own or hasattr(module, "nf4_table"):
                continue
            for name, buffer in own.items():
                own[name] = torch.zeros(buffer.shape, dtype=buffer.dtype, device=device)
            self._initialise(module)
        rope.fill(self)

    def first_values(self, seed: int) -> Iterator[tuple[str, torch.Tensor]]:
        """See `Decoder.first_values`: each module's by transformers' class, seeded by its name."""
        for owner, module in self.named_modules():
            shapes = {name: p.shape for name, p in module.named_parameters(recurse=False)}
            if not shapes:
                continue
            for name, shape in shapes.items():
                setattr(module, name, nn.Parameter(torch.full(shape, math.nan, device="cpu")))
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(weights.seed_of(seed, owner))
                self._initialise(module)
            for name, shape in shapes.items():
                value = getattr(module, name).detach()
                if value.isnan().any():
                    raise ConfigError(
                        f"from_scratch: {self.title} gives no first values to {owner}.{name}; "
                        "start from trained weights with from_scratch=False"
                    )
                yield f"{owner}.{name}", value
                setattr(module, name, nn.Parameter(torch.empty(shape, device="meta")))

    def fit(self, hf_config: dict[str, Any], spec: ModelSpec) -> list[str]:
        """Find the names of a text part's tensors among those of the folder's files."""
        if not spec.reads_weights:
            return [f"{PLACE}: from_scratch trains no part of a larger model"] * self._is_part
        names = self.folder_tensors
        if self._is_part:
            embedding = f"{name_of(self.embedding, self)}.weight"
            carried = self._names.find(names, embedding)
            if isinstance(carried, int):
                end = ".".join(embedding.split(".")[-2:])
                return [f"{spec.model_folder}: {carried} tensors are called *.{end}, not one"]
            self.carried_tensors = carried
        else:
            others = (n for n in names if any(p.search(n) for p in self._others))
            own = {
                self._names.of(self.hub_name(name))
                for name, _ in [*self.named_parameters(), *self.named_buffers()]
            }
            self.carried_tensors = tuple(name for name in others if name not in own)
        return []

    def hub_name(self, parameter: str) -> str:
        """Its own name, which is the class's; the final norm's is that of the text model's norm."""
        owner, _, last = parameter.partition(".")
        return f"{self._prefix}.norm.{last}" if owner == "final_norm" else parameter

    def file_name(self, tensor: str) -> str:
        """See `Decoder.file_name`."""
        return self._names.of(tensor)

    def hub_pieces(self, parameter: str) -> dict[str, tuple[Any, ...]]:
        """The files' tensors of the experts that a parameter stacks; see FileNames."""
        return self._names.pieces(parameter, nf4.dense_shape(self.get_parameter(parameter)))

    def routers(self) -> list[nn.Module]:
        """What chooses the experts of each block, if its scores are a softmax."""
        chosen = {name for name, role in self._roles.items() if role is Role.WHOLE}
        names = [(plain(name), module) for name, module in self.named_modules()]
        modules = [module for name, module in names if chosen & {name, pattern(name)}]
        return [router for router in modules if experts.is_balanced(router)]

    def held_buffers(self) -> dict[str, torch.Tensor]:
        """The routers' biases, for one, which no gradient changes."""
        # A block may be wrapped by activation checkpointing by now.
        buffers = {plain(name): buffer for name, buffer in self.named_buffers()}
        return {name: buffers[name] for name in self._held}

    def expert_shares(self) -> dict[str, float]:
        """Of experts, stacked in one parameter, the share that a token meets; of a router, all."""
        linear = {f"{name}.weight" for name in self.linear_layers()}
        active = getattr(self.config, "num_experts_per_tok", 1)
        known = tuple(f"{name}." for name, _ in routed.layers(self))
        return {
            name: active / len(parameter) if name.startswith(known) else 1.0
            for name, parameter in named_parameters(self)
            if "layers" in name and parameter.ndim > 1 and name not in linear
            if not isinstance(self.get_submodule(name.rpartition(".")[0]), nn.Conv1d)
            if not self.is_adapter(name) and not name.endswith(routed.BIAS)
        }

    def _check_parts(self, base: nn.Module) -> None:
        lacks = [
            f"its code has no {name}"
            for name, kind in (("layers", nn.ModuleList), ("norm", nn.Module))
            if not isinstance(getattr(base, name, None), kind)
        ]
        other = set(getattr(self.config, "layer_types", None) or ()) - LAYER_TYPES
        known = tuple(f"{name}." for name, _ in routed.layers(base))
        deep = [
            name
            for name, parameter in base.named_parameters()
            if parameter.ndim > 2 and not name.startswith(known)
            if not isinstance(base.get_submodule(name.rpartition(".")[0]), nn.Conv1d)
        ]
        if other:
            lacks.append(f"it has layers of {', '.join(sorted(other))}, which is not supported yet")
        elif deep:
            what = "experts that are stored" if ".experts." in deep[0] else "weights"
            lacks.append(f"it has {what} in a way that is not supported yet ({deep[0]})")
        self._refuse(lacks)

    def _refuse(self, reasons: list[str]) -> None:
        if reasons:
            kind = self.config.model_type
            raise ConfigError(
                *(
                    f"{PLACE}: the {kind} model cannot be trained: {reason}; choose another model"
                    for reason in reasons
                )
            )


def _longest_row(config: Any) -> int:
    """Positions up to which every layer computes as if it saw all tokens before.

    Beyond them Llama 4's layers of chunked attention begin anew, and its others change their
    scores, by the position in the row instead of the document.
    """
    longest: int = config.max_position_embeddings
    if CHUNKED not in (getattr(config, "layer_types", None) or ()):
        return longest
    if config.attn_temperature_tuning:
        # Rounded down to what tensor parallelism may divide.
        longest = min(longest, (config.floor_scale - 1) // 8 * 8)
    return min(longest, config.attention_chunk_size or longest)


def _text_model(whole: PreTrainedModel) -> PreTrainedModel:
    """The model of tokens without its output layer."""
    base, inner = whole, whole.get_decoder()
    while inner is not base:
        base, inner = inner, inner.get_decoder()
    # Llama 4's class for text alone looks for it by the name that it has in the larger model.
    return base if hasattr(base, "layers") else getattr(base, "model", base)


def _held_buffers(base: PreTrainedModel) -> list[str]:
    """Names of the buffers that files hold; in fp32 where the class keeps them so, in place."""
    kept = tuple(base._keep_in_fp32_modules_strict or ())
    names = sorted(base.state_dict().keys() - dict(base.named_parameters()).keys())
    for name in names:
        owner, _, last = name.rpartition(".")
        buffers = base.get_submodule(owner)._buffers
        if last in kept:
            buffers[last] = buffers[last].float()
    return names
