"""The role of each module of a transformers model, from one forward pass without data.

The pass shows what goes into each module, so that no list of families is needed: which norms stand
before which layers, and what each attention layer asks for.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from trainer.layers import delta
from trainer.layers import experts as routed
from trainer.model import Decoder, Inputs, Role, name_of, pattern
from trainer.models.transformers.attention import Observer

# A style of transformers' tensor-parallel plans, and the role that does the same; where a plan
# gathers outputs, ours exchanges the parts.
STYLES = {
    "colwise": Role.COLUMN,
    "colwise_gather_output": Role.COLUMN,
    "rowwise": Role.ROW,
    "rowwise_split_input": Role.ROW,
    "replicated_with_grad_allreduce": Role.REPLICATED,
}
# What classes without a plan for their attention call its layers, latent attention included.
ATTENTION = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "q_b_proj", "kv_b_proj"), Role.COLUMN),
    **dict.fromkeys(("q_a_proj", "kv_a_proj_with_mqa"), Role.REPLICATED),
    "o_proj": Role.ROW,
}
# And linear attention, whose gated norm works on each head.
DELTA = {
    "in_proj_qkv": Role.FUSED,
    **dict.fromkeys((f"in_proj_{name}" for name in ("z", "b", "a", "qkvz", "ba")), Role.COLUMN),
    **dict.fromkeys(("conv1d", "norm"), Role.WHOLE),
    "out_proj": Role.ROW,
}
# An attention layer's own parameters, which are numbers of its heads.
OF_HEADS = ({"sinks"}, {"A_log", "dt_bias"})
QKV, GATE_UP = "qkv_proj", "gate_up_proj"
SLIDING = "sliding_attention"
LINEAR = "linear_attention"
# Enough tokens for every operation; nothing is computed on the meta device.
PROBE_TOKENS = 8


class Flow:
    """What went into each module and came out of it, distinguished by the identity of tensors.

    Args:
        run: `Decoder.hidden` of the model.
    """

    def __init__(self, model: Decoder, run: Callable[..., torch.Tensor]) -> None:
        self.into: dict[str, Any] = {}
        self.out_of: dict[str, Any] = {}
        self.observer = Observer()
        hooks = []
        for name, module in model.named_modules():
            hooks.append(module.register_forward_hook(self._keep(name), with_kwargs=True))
        tokens = torch.zeros(1, PROBE_TOKENS, dtype=torch.int64, device="meta")
        positions = torch.arange(PROBE_TOKENS, device="meta").unsqueeze(0)
        with torch.no_grad():
            self.last = run(Inputs(tokens, self.observer, positions))
        for hook in hooks:
            hook.remove()

    def _keep(self, name: str) -> Callable[..., None]:
        def hook(
            module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
        ) -> None:
            self.into[name] = args[0] if args else kwargs.get("hidden_states")
            self.out_of[name] = output

        return hook

    def shared_inputs(self, names: list[str]) -> tuple[tuple[str, ...], ...]:
        """Which of the modules `names` had the same input, if several had."""
        groups: dict[int, list[str]] = {}
        for name in names:
            groups.setdefault(id(self.into.get(name, name)), []).append(name)
        return tuple(tuple(group) for group in groups.values() if len(group) > 1)

    def faults(self, model: Decoder, kinds: list[str] | None) -> list[str]:
        """What the pass did otherwise than block after block, each with its attention.

        Args:
            kinds: the layer_types of the configuration, if it has them.
        """
        faults = list(self.observer.faults)
        layers = Counter(id(layer) for layer in self.observer.seen)
        prefix = name_of(model.blocks, model)
        for index, block in enumerate(model.blocks):
            kind = kinds[index] if kinds else "no attention"
            if sum(layers[id(module)] for module in block.modules()) != int(kind != LINEAR):
                faults.append(
                    f"its layer {index} ({kind}) does not call one attention function, so "
                    "that the documents of packed rows could leak"
                )
                break
        if self.out_of.get(f"{prefix}.{len(model.blocks) - 1}") is not self.last:
            faults.append("its last block's output does not go to the final norm as it is")
        windows = [layer.document_attention.window for layer in self.observer.seen]
        slides = [kind == SLIDING for kind in kinds or () if kind != LINEAR]
        if kinds and not faults and slides != [window is not None for window in windows]:
            faults.append("its layers do not have the windows that layer_types says")
        return faults


class Roles:
    """The roles of all modules.

    Attributes:
        unsplit: what stands against tensor parallelism, a line each.
        pieces: by a fused layer's name, the widths of what it computes one after another.

    Args:
        prefix: the base model's name.
        plan: the class's tensor-parallel plan, by names within the base model.
    """

    def __init__(self, model: Decoder, flow: Flow, prefix: str, plan: dict[str, str]) -> None:
        self.unsplit: list[str] = []
        self.pieces: dict[str, tuple[int, ...]] = {}
        self._model, self._flow, self._prefix, self._plan = model, flow, prefix, plan
        self._modules = dict(model.named_modules())
        self._of = self._experts()
        inside = [f"{name}." for name in self._mixtures]
        self._attentions = [
            name for name, module in self._modules.items() if hasattr(module, "document_attention")
        ]
        self._deltas = [name for name, _ in delta.layers(model)]
        self._linears([name for name in self._modules if not name.startswith(tuple(inside))])
        self._norms()
        for name in [*self._attentions, *self._deltas]:
            if own := dict(self._modules[name].named_parameters(recurse=False)):
                self._of[name] = Role.HEADS
                if own.keys() not in OF_HEADS:
                    self.unsplit.append(f"its attention has {', '.join(sorted(own))}")
        self._ends()
        for name, _ in model.named_parameters():
            if name.rpartition(".")[0] not in self._of:
                self.unsplit.append(f"its plan says nothing of {pattern(name)}")
        self.unsplit = list(dict.fromkeys(self.unsplit))

    def by_pattern(self) -> dict[str, Role]:
        """The roles, where all blocks have the same by one name with * for the block's number."""
        alike: dict[str, set[Role | None]] = {}
        for name in self._modules:
            alike.setdefault(pattern(name), set()).add(self._of.get(name))
        return {
            pattern(name) if len(alike[pattern(name)]) == 1 else name: role
            for name, role in self._of.items()
        }

    def _experts(self) -> dict[str, Role]:
        """The parts of the mixtures of experts, which work on each rank's own tokens."""
        roles: dict[str, Role] = {}
        self._mixtures = [name.rpartition(".")[0] for name, _ in routed.layers(self._model)]
        for mixture in self._mixtures:
            for name, module in self._modules[mixture].named_modules(prefix=mixture):
                if list(module.parameters(recurse=False)):
                    linear = type(module) is nn.Linear
                    roles[name] = Role.REPLICATED if linear else Role.WHOLE
        return roles | {name: Role.EXPERT for name, _ in routed.layers(self._model)}

    def _linears(self, names: list[str]) -> None:
        for name in names:
            module, (above, _, last) = self._modules[name], name.rpartition(".")
            planned = self._plan.get(pattern(name).removeprefix(f"{self._prefix}."))
            if above in self._deltas and last in DELTA:
                self._of[name] = DELTA[last]
                if DELTA[last] is Role.FUSED:
                    self.pieces[name] = self._modules[above].pieces
                continue
            if isinstance(module, nn.Embedding):
                continue  # the decoder splits it; before 5.21 the plans of tied models name it
            if planned is not None:
                self._of[name] = STYLES.get(planned, Role.REPLICATED)
                if planned not in STYLES:
                    self.unsplit.append(f"its plan has {pattern(name)} as {planned}")
            elif above in self._attentions and isinstance(module, nn.Linear) and last in ATTENTION:
                self._of[name] = ATTENTION[last]
            if planned == "colwise_gather_output" and last not in ATTENTION:
                self._fused(name, module, above, last)

    def _fused(self, name: str, module: nn.Module, above: str, last: str) -> None:
        """A layer that computes several outputs one after another."""
        self._of[name], outputs = Role.FUSED, module.out_features
        keys = getattr(self._modules[above], "num_key_value_heads", None)
        if last == GATE_UP:
            self.pieces[name] = (outputs // 2, outputs // 2)
        elif last == QKV and above in self._attentions and keys:
            own = keys * self._modules[above].document_attention.head_dim
            self.pieces[name] = (outputs - 2 * own, own, own)
        else:
            self.unsplit.append(f"its plan gathers what {pattern(name)} computes")

    def _norms(self) -> None:
        flow, made = self._flow, {}
        norms = [name for name, module in self._modules.items() if _is_norm(module)]
        norms = [
            n for n in norms if n in flow.into and self._modules[n] is not self._model.final_norm
        ]
        norms = [n for n in norms if self._of.get(n) is not Role.WHOLE]
        for name in norms:
            made[id(flow.out_of[name])] = name
            self._of.setdefault(name, Role.REPLICATED)
        columns = {name for name, role in self._of.items() if role is Role.COLUMN}
        split = {id(flow.out_of[name]) for name in columns}
        for name in norms:
            if id(flow.into[name]) in split:
                self._of[name] = Role.SPLIT_NORM
        mixed = {id(flow.into[name]) for name in self._mixtures}
        for name in self._column_parts():
            given = id(flow.into[name])
            if given in mixed:
                self.unsplit.append(f"{pattern(name)} and experts stand behind the same norm")
            elif given in made:
                self._of[made[given]] = Role.NORM
            else:
                self._of[name] = Role.GATHER
        for name in {pattern(name): name for name in norms}.values():
            self._prepare_norm(name)

    def _column_parts(self) -> list[str]:
        """The parts of the blocks that begin with layers whose outputs are split."""
        parts: dict[str, None] = {}
        for name, role in self._of.items():
            if role in (Role.COLUMN, Role.FUSED):
                above = [each for each in self._attentions if name.startswith(f"{each}.")]
                parts[above[0] if above else name.rpartition(".")[0]] = None
        return list(parts)

    def _prepare_norm(self, name: str) -> None:
        """Tell tensor parallelism how the norms of this kind compute, if it is an RMSNorm."""
        norm = self._modules[name]
        eps = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
        with torch.device("cpu"), torch.no_grad():
            weight = torch.linspace(0.5, 2.0, len(norm.weight), dtype=torch.float32)
            x = torch.linspace(-1, 3, 2 * len(weight), dtype=torch.float32).view(2, -1)
            try:
                output = torch.func.functional_call(norm, {"weight": weight}, x)
            except (AttributeError, TypeError):
                output = x  # It has another input.
            for unit_offset in (False, True):
                expected = F.rms_norm(x, weight.shape, weight + unit_offset, eps)
                if torch.allclose(output, expected, rtol=1e-5, atol=1e-6):
                    break
            else:
                self.unsplit.append(f"{pattern(name)} is no RMSNorm")
                return
        for other, module in self._modules.items():
            if pattern(other) == pattern(name):
                module.eps, module.unit_offset = eps, unit_offset

    def _ends(self) -> None:
        """The embedding, the final norm and the output layer."""
        embedding = self._model.embedding
        self._of[name_of(embedding, self._model)] = Role.EMBEDDING
        scale = getattr(embedding, "scalar_embed_scale", None)
        if scale is not None:
            embedding.output_scale = scale
        elif type(embedding) is not nn.Embedding:
            self.unsplit.append(f"its embedding is a {type(embedding).__name__}")
        self._prepare_norm("final_norm")
        self._of["final_norm"] = Role.NORM
        if (head := self._model.output_head) is not None:
            self._of[name_of(head, self._model)] = Role.OUTPUT


def _is_norm(module: nn.Module) -> bool:
    own = [parameter.ndim for parameter in module.parameters(recurse=False)]
    return own == [1] and not list(module.children())
