"""Describes models: every matrix with its role and sizes, for estimates, layouts and FLOPs.

    python -m trainer.describe [--into FOLDER] [MODEL ...]

MODEL is a train.yaml, a model folder, a config.json, or the dotted path of a builder. A model is
built on the meta device, and one forward pass without data shows what goes into each layer. Prints
a line of JSON for each, a `runspec.shape.Shape`; with --into writes it to a file in FOLDER. Without
MODEL the descriptions in configs/descriptions are made again, with one for each config.json in
configs/shapes and configs/models.
"""

import argparse
import importlib.metadata
import json
import sys
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import nn

from runspec import description, shape
from trainer.config import read_yaml
from trainer.errors import ConfigError
from trainer.layers import delta
from trainer.layers import experts as routed
from trainer.layers.attention import DocumentAttention
from trainer.model import Decoder, Inputs, Role
from trainer.models.build import empty_module

# Enough for every operation; nothing is computed on the meta device.
TOKENS = 8
ROLES: dict[Role | None, shape.Role] = {
    Role.COLUMN: "column",
    Role.FUSED: "fused",
    Role.ROW: "row",
}


def of_block(model: dict[str, Any], folder: Path | None) -> shape.Shape:
    """Return the shape of the model that a `model` block names, without its adapters.

    Args:
        folder: whose config.json names the model if the block does not.

    Raises:
        ConfigError: the trainer cannot train it, or it has parameters of an unknown kind.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            return of(empty_module(description.base_of(model), folder))
    finally:
        torch.set_default_dtype(before)


def of(model: Decoder) -> shape.Shape:
    """Return the shape of a model in bf16, on the meta device and without adapters.

    Raises:
        ConfigError: it has parameters of an unknown kind.
    """
    model.fill_buffers(torch.device("meta"))
    # A buffer that layers share counts once; of others only tables grow with the context.
    table = sum(b.numel() for b in model.buffers() if b.shape[:1] == (model.max_seq_len,))
    seen = _Pass(model)
    prefix = seen.names[model.blocks]
    blocks = [_Block(model, seen, f"{prefix}.{i}").described() for i in range(len(model.blocks))]
    kinds = [block for i, block in enumerate(blocks) if block not in blocks[:i]]
    config = getattr(model, "config", None)
    made = shape.Shape(
        dim=model.embedding.weight.shape[1],
        vocab=model.vocab_size,
        longest=model.max_seq_len,
        kinds=tuple(kinds),
        order=tuple(kinds.index(block) for block in blocks),
        tied=model.output_head is None,
        wide_norms=_is_wide(model.final_norm),
        table=table,
        sizes=model.sizes(),
        unsplit=tuple(model.split_faults()),
        packs=model.packs,
        model_type=getattr(config, "model_type", ""),
    )
    if (count := sum(p.numel() for p in model.parameters())) != made.parameters:
        raise ConfigError(
            f"model: {count - made.parameters} of its {count} parameters are in no layer that the "
            "estimate knows, such as embeddings of each layer; train the model without an estimate"
        )
    return made


class _Pass:
    """One forward pass: what each module took and gave, and what attention was called with."""

    def __init__(self, model: Decoder) -> None:
        self.names = {module: name for name, module in model.named_modules()}
        self.into: dict[str, tuple[Any, ...]] = {}
        self.out_of: dict[str, Any] = {}
        hooks = [
            module.register_forward_hook(self._keep(name)) for name, module in model.named_modules()
        ]
        tokens = torch.zeros(1, TOKENS, dtype=torch.int64, device="meta")
        positions = torch.arange(TOKENS, device="meta").unsqueeze(0)
        with torch.no_grad():
            model.hidden(Inputs(tokens, positions=positions))
        for hook in hooks:
            hook.remove()

    def _keep(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            self.into[name], self.out_of[name] = args, output

        return hook


class _Block:
    """One block of a model, part by part."""

    def __init__(self, model: Decoder, seen: _Pass, name: str) -> None:
        self.model, self.seen, self.start = model, seen, f"{name}."
        self.block = model.get_submodule(name)
        self.linear = {n for n in model.linear_layers() if n.startswith(self.start)}
        known = model.roles()
        self.roles = {
            name: next((known[p] for p in known if fnmatchcase(name, p)), None)
            for name, _ in self.block.named_modules(prefix=name)
        }
        self.softmax = next(
            (n for n in self.roles if isinstance(model.get_submodule(n), DocumentAttention)), None
        )
        self.delta = next((n for n, _ in delta.layers(model) if n.startswith(self.start)), None)
        self.experts = next((n for n, _ in routed.layers(model) if n.startswith(self.start)), None)
        self.attention = self.softmax.rpartition(".")[0] if self.softmax else self.delta
        self.mixture = self.experts.rpartition(".")[0] if self.experts else None

    def described(self) -> shape.Block:
        """Return all of it.

        Raises:
            ConfigError: what is in place of attention is unknown.
        """
        if self.attention is None:
            raise ConfigError(
                f"model: {self.start[:-1]} has neither softmax attention nor the gated delta rule: "
                "the estimate knows no others; train the model without an estimate"
            )
        self.matrices: dict[str, shape.Matrix] = {}
        vectors = [*self._parameters(), *self._norms_without_scale()]
        return shape.Block(
            matrices=self._in_order(),
            vectors=tuple(vectors),
            attention=self._attention(self.softmax) if self.softmax else None,
            delta=self._delta() if self.delta else None,
            norms_behind=self._has_norms_behind(),
        )

    def _part(self, owner: str) -> shape.Part:
        if self.softmax is not None and self.attention == self.start[:-1]:
            # Attention has no module of its own: it ends at the first matrix behind the kernel.
            order = list(self.seen.out_of)
            rows = [n for n in self.linear if self.roles[n] is Role.ROW]
            after = [order.index(n) for n in rows if order.index(n) > order.index(self.softmax)]
            return "attention" if order.index(owner) <= min(after) else "mlp"
        if f"{owner}.".startswith(f"{self.attention}."):
            return "attention"
        if self.mixture is None or not f"{owner}.".startswith(f"{self.mixture}."):
            return "mlp"
        if owner == self.experts:
            return "experts"
        return "shared" if owner in self.linear else "router"

    def _parameters(self) -> Iterator[shape.Vector]:
        """Collect the matrices; yield what is none."""
        for name, parameter in self.block.named_parameters(prefix=self.start[:-1]):
            owner, _, last = name.rpartition(".")
            is_expert, sizes = owner == self.experts, parameter.shape
            if is_expert and parameter.ndim == 3:
                self._expert(owner, last, sizes)
            elif parameter.ndim == 2 and not is_expert:
                part, role = self._part(owner), self._role(owner)
                has_bias = getattr(self.model.get_submodule(owner), "bias", None) is not None
                matrix = shape.Matrix(part, role, sizes[1], sizes[0], bias=has_bias)
                self.matrices[owner] = matrix
            elif not (owner in self.matrices or is_expert):
                split = self.roles[owner] in (Role.HEADS, Role.SPLIT_NORM)
                features = 0 if last == "bias" else self._features(owner)
                yield shape.Vector(sizes[0], prod(sizes[1:]), split, features)

    def _norms_without_scale(self) -> Iterator[shape.Vector]:
        """Norms of the kinds that others have with one, of what no other takes."""
        modules = {n: self.model.get_submodule(n) for n in self.roles if n in self.seen.into}
        norms = [n for n, module in modules.items() if _is_norm(module)]
        kinds = {type(modules[n]) for n in norms}
        taken = {id(self.seen.into[n][0]) for n in norms}
        for name, module in modules.items():
            is_bare = type(module) in kinds and not list(module.parameters())
            if is_bare and id(value := self.seen.into[name][0]) not in taken:
                yield shape.Vector(0, features=value.numel() // TOKENS)

    def _features(self, name: str) -> int:
        """Numbers per token that a norm takes; 0 for what is none, or has a gate."""
        module = self.model.get_submodule(name)
        if self.roles[name] is Role.WHOLE or not _is_norm(module):
            return 0
        taken, width = self.seen.into[name][0], next(module.parameters()).numel()
        return taken.numel() // TOKENS if taken.shape[-1] == width else 0

    def _role(self, owner: str) -> shape.Role:
        """Of what stands beside experts, and is whole, the last layer counts as split by rows."""
        siblings = [n for n in self.linear if n.rpartition(".")[0] == owner.rpartition(".")[0]]
        if self._part(owner) == "shared" and len(siblings) > 1:
            order = list(self.seen.out_of)
            return "row" if owner == max(siblings, key=order.index) else "column"
        return ROLES.get(self.roles[owner], "replicated")

    def _expert(self, owner: str, last: str, sizes: torch.Size) -> None:
        layer = self.model.get_submodule(owner)
        outputs, inputs = sizes[:0:-1] if layer.transposed else sizes[1:]
        active, bias = self.model.active_experts(owner), f"{last}{routed.BIAS}"
        self.matrices[f"{owner}.{last}"] = shape.Matrix(
            "experts", "expert", inputs, outputs, sizes[0], active, hasattr(layer, bias)
        )

    def _in_order(self) -> dict[str, shape.Matrix]:
        """The matrices by their names in the block, as they are used."""
        order = {name: i for i, name in enumerate(self.seen.out_of)}
        first = sorted(self.matrices, key=lambda n: order.get(n, order.get(self.experts or "", -1)))
        return {name.removeprefix(self.start): self.matrices[name] for name in first}

    def _attention(self, softmax: str) -> shape.Attention:
        query, _, value = self.seen.into[softmax][:3]
        layer = self.model.get_submodule(softmax)
        (heads, width), (kv_heads, values) = query.shape[2:], value.shape[2:]
        own = [m for m in self.matrices.values() if m.part == "attention" and m.role != "row"]
        dim = self.model.embedding.weight.shape[1]
        # Queries and keys come out of smaller vectors (arXiv 2405.04434).
        latent = any(m.inputs != dim for m in own)
        made = sum(m.outputs for m in own if m.role != "replicated")
        more = made - (heads + kv_heads) * width - kv_heads * values
        return shape.Attention(
            heads=heads,
            kv_heads=kv_heads,
            head_dim=width,
            value_dim=values,
            held=value.untyped_storage().nbytes() // value.element_size() // TOKENS,
            window=layer.window,
            gate=0 if latent else max(more, 0),
        )

    def _delta(self) -> shape.GatedDelta:
        layer = self.model.get_submodule(self.delta)
        return shape.GatedDelta(
            key_heads=layer.num_k_heads,
            value_heads=layer.num_v_heads,
            key=layer.head_k_dim,
            value=layer.head_v_dim,
            kernel=layer.conv1d.kernel_size[0],
        )

    def _has_norms_behind(self) -> bool:
        rows = [n for n in self.linear if self.roles[n] is Role.ROW]
        given = {id(self.seen.out_of[name]) for name in rows}
        norms = (n for n in self.roles if _is_norm(self.model.get_submodule(n)))
        return any(id(self.seen.into[name][0]) in given for name in norms if name in self.seen.into)


def _is_norm(module: nn.Module) -> bool:
    own = [parameter.ndim for parameter in module.parameters(recurse=False)]
    return bool(own) and set(own) == {1} and not list(module.children())


def _is_wide(norm: nn.Module) -> bool:
    """Whether a norm multiplies its scale in fp32: not what it gives in bf16 without a scale."""
    names = [name for name, _ in norm.named_parameters()]
    width = next(norm.parameters()).numel()
    with torch.device("cpu"), torch.no_grad():
        x = torch.linspace(-1, 3, 2 * width, dtype=torch.bfloat16).view(2, -1)

        def given(value: torch.Tensor) -> torch.Tensor:
            own = dict.fromkeys(names, torch.zeros(width, dtype=x.dtype)) | {names[0]: value}
            return torch.func.functional_call(norm, own, x)

        scale = torch.linspace(0.5, 2.0, width, dtype=x.dtype)
        plain = given(torch.ones_like(scale)) * scale
        # Some multiply by 1 + their scale.
        offset = given(torch.zeros_like(scale)) * (1 + scale)
        return not any(torch.equal(given(scale), narrow) for narrow in (plain, offset))


# The command -------------------------------------------------------------------------------------


def subjects(given: list[str]) -> Iterator[description.Subject]:
    """What the arguments name; everything that is shipped without one."""
    for name in given:
        path = Path(name)
        if path.suffix == ".yaml":
            content = read_yaml(path)
            folder = (content.get("checkpointer") or {}).get("checkpoint_dir")
            yield description.Subject(content.get("model") or {}, Path(folder) if folder else None)
        elif path.exists():
            folder = path if path.is_dir() else path.with_suffix("")
            yield description.Subject({}, folder)
        else:
            yield description.Subject({"_component_": name}, None)
    if not given:
        for file in sorted(description.PUBLISHED.glob("*.json")):
            yield description.Subject({}, file.with_suffix(""))
        for file in sorted(description.FROM_SCRATCH.glob("*/config.json")):
            yield description.Subject({}, file.parent)


def main(arguments: list[str]) -> int:
    """Describe each model; exit status 1 if one cannot be described."""
    parser = argparse.ArgumentParser(prog="python -m trainer.describe", description=__doc__)
    parser.add_argument("model", nargs="*")
    parser.add_argument("--into", type=Path, metavar="FOLDER")
    chosen = parser.parse_args(arguments)
    place, failed = chosen.into or (None if chosen.model else description.SHIPPED), False
    kept: set[str] = set()
    for subject in subjects(chosen.model):
        try:
            described = of_block(subject.model, subject.folder).as_json()
        except ConfigError as error:
            failed = True
            for fault in error.faults:
                print(f"error: {subject.title}: {fault}", file=sys.stderr)
            continue
        if place is None:
            print(json.dumps(described))
        else:
            version = importlib.metadata.version("transformers")
            subject.keep(place, described, {"transformers": version})
            kept.add(subject.file_name)
    if not (chosen.model or chosen.into or failed):
        # What a config.json was before.
        for file in sorted(description.SHIPPED.glob("*.json")):
            if file.name not in kept:
                file.unlink()
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
