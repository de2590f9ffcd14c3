"""LoRA and DoRA as kinds of adapters: on linear layers and on experts."""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from runspec import adapters
from trainer.errors import ConfigError
from trainer.layers import experts
from trainer.layers.adapters import lora_embedding, lora_experts, lora_linear, lora_peft
from trainer.layers.adapters.base import AdapterKind
from trainer.layers.adapters.lora_linear import LowRankLinear, adapted_layers, row_norms

if TYPE_CHECKING:
    from trainer.models.decoder import Decoder


ORTHOGONAL, GAUSSIAN, PISSA = "orthogonal", "gaussian", "pissa"


class LoRA(AdapterKind):
    """LoRA on linear layers and on experts."""

    declared: ClassVar[adapters.Adapter] = adapters.LORA

    def __init__(self, settings: Mapping[str, Any]) -> None:
        super().__init__(settings)
        # By the name of what is adapted, the matrix that A and B share at first; or PiSSA's.
        self._shared: dict[str, torch.Tensor] = {}
        self._principal: dict[str, dict[str, torch.Tensor]] = {}

    @property
    def pissa(self) -> bool:
        """Whether A and B begin as the weights' largest singular values."""
        return self.settings.get("init_lora_weights") == PISSA

    def owns(self, name: str) -> bool:
        """Of PiSSA the frozen parameters, too."""
        return super().owns(name) or name.endswith(tuple(f".{part}" for part in lora_linear.PISSA))

    def trains(self, name: str) -> bool:
        """All but PiSSA's frozen parameters."""
        return super().owns(name)

    @property
    def use_dora(self) -> bool:
        """Whether layers have magnitudes."""
        return "magnitude" in self.declared.parts

    def add(self, model: "Decoder") -> None:
        """To the linear layers of the blocks, or to those that `lora_modules` names.

        It may also name the embedding and the output head.
        """
        rank = self.settings.get("lora_rank")
        if rank is None:
            raise ConfigError("model.adapter: LoRA and DoRA need model.lora_rank")
        layers = {name: name.rpartition(".")[2] for name in model.linear_layers()}
        routed = [layer for _, layer in experts.layers(model)]
        known = {*layers.values(), *([experts.NAME] if routed else [])}
        tables = {name.rpartition(".")[2]: name for name in model.tables}
        wanted = set(self.settings.get("lora_modules") or known)
        if unknown := wanted - known - tables.keys():
            raise ConfigError(
                f"model.lora_modules: no layer {', '.join(sorted(unknown))}; has "
                f"{', '.join(sorted(known | tables.keys()))}"
            )
        alpha, use_rslora = self.settings.get("lora_alpha", 2 * rank), self._use_rslora
        dropout = self.settings.get("lora_dropout", 0.0)
        if experts.NAME in wanted:
            self._check_experts(dropout, known - {experts.NAME})
            for layer in routed:
                lora_experts.add(layer, rank, alpha, use_rslora)
        chosen = [name for name, last in layers.items() if last in wanted]
        chosen += [name for last, name in tables.items() if last in wanted]
        self.check(chosen)
        for name in chosen:
            if model.get_submodule(name) is model.embedding:
                self._adapt_embedding(model, name, rank, alpha)
            else:
                self.wrap(model, name, rank, alpha, dropout)

    def _adapt_embedding(self, model: "Decoder", name: str, rank: int, alpha: float) -> None:
        wrong = {
            "is the output head, too (tied), and PEFT would adapt one of the two": (
                model.output_head is None
            ),
            "is not possible with use_dora": self.use_dora,
            "has no PiSSA": self.pissa,
        }
        if faults := [reason for reason, is_so in wrong.items() if is_so]:
            last = name.rpartition(".")[2]
            raise ConfigError(
                f"model.lora_modules: {last} {' and '.join(faults)}; leave it out, or train it "
                f"whole with model.modules_to_save=[{last}]"
            )
        rank, alpha = self._by_pattern(name, rank, alpha)
        lora_embedding.add(model.get_submodule(name), rank, alpha, self._use_rslora)

    def _by_pattern(self, name: str, rank: int, alpha: float) -> tuple[int, float]:
        """These, or the rank and alpha that the patterns have for a layer."""
        return (
            adapters.by_pattern(self.settings.get("rank_pattern"), name) or rank,
            adapters.by_pattern(self.settings.get("alpha_pattern"), name) or alpha,
        )

    @property
    def _use_rslora(self) -> bool:
        return bool(self.settings.get("use_rslora"))

    def wrap(
        self, model: "Decoder", name: str, rank: int, alpha: float, dropout: float = 0.0
    ) -> None:
        """Give a linear layer LoRA of this rank and alpha, or of those that its patterns say."""
        rank, alpha = self._by_pattern(name, rank, alpha)
        base, dora = model.get_submodule(name), self.use_dora
        layer = LowRankLinear(base, rank, alpha, dropout, dora, self._use_rslora, self.pissa)
        model.set_submodule(name, layer)

    def check(self, names: list[str]) -> None:
        """Raise ConfigError if the settings fit no layer of these names."""
        faults = []
        if self.pissa and self.use_dora:
            faults.append("model.init_lora_weights: pissa is not possible with use_dora")
        for key, kind in (("rank_pattern", int), ("alpha_pattern", (int, float))):
            for pattern, value in (self.settings.get(key) or {}).items():
                if not any(adapters.by_pattern({pattern: 1}, name) for name in names):
                    faults.append(f"model.{key}: {pattern} is the end of no adapted layer's name")
                if not isinstance(value, kind) or value <= 0:
                    faults.append(f"model.{key}: {pattern} has {value!r}, and needs a number")
        ranks = {adapters.by_pattern(self.settings.get("rank_pattern"), name) for name in names}
        ranks = ranks - {None} | {self.settings.get("lora_rank", adapters.TORCHTUNE_RANK)}
        if self.settings.get("init_lora_weights") == ORTHOGONAL and any(r % 2 for r in ranks):
            faults.append("model.init_lora_weights: orthogonal needs even ranks")
        if faults:
            raise ConfigError(*faults)

    def learning_rate(self, name: str) -> float:
        """LoRA+ (Hayou et al. 2024, arXiv 2402.12354): B's is `lora_plus_ratio` times as high."""
        is_b = name.endswith("lora_b.weight")
        return float(self.settings.get("lora_plus_ratio") or 1.0) if is_b else 1.0

    def _check_experts(self, dropout: float, others: set[str]) -> None:
        """PEFT has neither for weights of several experts."""
        given = {
            "use_dora": self.use_dora,
            "lora_dropout": dropout,
            "init_lora_weights": self.pissa,
        }
        if wrong := [key for key, value in given.items() if value]:
            raise ConfigError(
                *(
                    f"model.{key}: is not possible for the experts; leave it out, or leave the "
                    f"experts out: model.lora_modules=[{','.join(sorted(others))}]"
                    for key in wrong
                )
            )

    def first_value(
        self, model: "Decoder", name: str, shape: torch.Size, generator: torch.Generator
    ) -> torch.Tensor:
        """A by Kaiming uniform, B by zeros (Hu et al. 2021, arXiv 2106.09685); magnitudes by the
        norms of the base weight's rows.

        As in PEFT "gaussian" is a normal A; "orthogonal" is an A and a B that are not zero, and
        whose product is (peft.tuners.lora.layer.LoraLayer.orthogonal_init).
        """
        owner, _, last = name.rpartition(".")
        if last in (lora_embedding.A, lora_embedding.B):
            return lora_embedding.first_value(name, shape, generator)
        if last == "magnitude":
            return row_norms(model.get_submodule(owner))
        if self.pissa:
            return self._of_pissa(model, name, generator)
        chosen, is_a = self.settings.get("init_lora_weights"), owner.endswith(".lora_a")
        if chosen == ORTHOGONAL:
            rank = shape[-2] if is_a else shape[-1]
            if is_a:
                whole = torch.linalg.qr(torch.randn(rank, rank, generator=generator)).Q
                self._shared[owner.removesuffix("lora_a")] = whole[1::2]
                rows = torch.randn(*shape[:-2], rank // 2, shape[-1], generator=generator)
                return whole[0::2].T @ rows / 10
            columns = torch.randn(*shape[:-1], rank // 2, generator=generator)
            return columns @ self._shared.pop(owner.removesuffix("lora_b")) / 10
        if chosen == GAUSSIAN and is_a:
            return torch.randn(shape, generator=generator) / shape[-2]
        full = torch.zeros(shape, dtype=torch.float32)
        if owner.endswith(".lora_a"):
            bound = 1 / math.sqrt(shape[-1])
            full.uniform_(-bound, bound, generator=generator)
        return full

    def identity(self, model: "Decoder") -> dict[str, Any]:
        """The factors of B A."""
        return {"lora_scaling": sorted({layer.scaling for layer in adapted_layers(model)})}

    def _of_pissa(self, model: "Decoder", name: str, generator: torch.Generator) -> torch.Tensor:
        """A and B begin as the frozen ones."""
        owner, _, last = name.removesuffix(".weight").rpartition(".")
        if owner not in self._principal:
            a, b = model.get_submodule(owner).principal(generator.initial_seed())
            self._principal[owner] = {"initial_a": a, "lora_a": a, "initial_b": b, "lora_b": b}
        factor = self._principal[owner].pop(last)
        if not self._principal[owner]:
            del self._principal[owner]
        return factor.cpu()

    to_peft, from_peft = lora_peft.write, lora_peft.read


class DoRA(LoRA):
    """LoRA with a trained magnitude for each row."""

    declared: ClassVar[adapters.Adapter] = adapters.DORA


def built_in(model: "Decoder", settings: Mapping[str, Any]) -> LoRA | None:
    """The kind of the layers that a builder has made; None if there are none.

    Args:
        settings: the model block.
    """
    layers = {n: m for n, m in model.named_modules() if isinstance(m, LowRankLinear)}
    if not layers:
        return None
    dora = any(layer.magnitude is not None for layer in layers.values())
    kind = (DoRA if dora else LoRA)(settings)
    kind.check([*layers])
    for name, layer in layers.items():
        dropout = getattr(layer.dropout, "p", 0.0)
        kind.wrap(model, name, layer.rank, layer.scaling * layer.rank, dropout)
    return kind
