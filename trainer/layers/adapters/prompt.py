"""Prompt tuning: learnt embeddings before those of each document.

Lester et al. 2021, arXiv 2104.08691. The model gets its tokens, documents and positions with the
virtual tokens among them, and its final norm gives back the real ones: objectives and losses see
the shapes that they know. Packed rows become one row, whose length follows from the number of
documents, so that nothing waits for the device.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from runspec import adapters
from trainer.errors import ConfigError
from trainer.layers.adapters import virtual
from trainer.model import Decoder, Documents, Hub, Inputs
from trainer.sharded import full_tensor, local

NAME = "prompt_embeddings"


class Prompt(virtual.VirtualTokens):
    """Embeddings of virtual tokens, [tokens, dim]."""

    declared: ClassVar[adapters.Adapter] = adapters.PROMPT

    def __init__(self, settings: Mapping[str, Any]) -> None:
        super().__init__(settings)
        # Of the pass that runs: the tokens with virtual ones, where the real ones are in the
        # flattened batch, and their shape; None while it is off.
        self._ids: torch.Tensor | None = None
        self._real: torch.Tensor | slice | None = None
        self._shape: tuple[int, int] = (0, 0)

    def add(self, model: Decoder) -> None:
        """To the model; its embedding and its final norm get hooks."""
        if sum(isinstance(module, nn.Embedding) for module in model.modules()) > 1:
            raise ConfigError(
                "model.adapter: prompt is not possible with this model, whose layers have "
                "embeddings of their own; use lora, ia3 or prefix"
            )
        weight = model.embedding.weight
        prompt = nn.Parameter(weight.new_empty(self.virtual_tokens, weight.shape[1]))
        model.register_parameter(NAME, prompt)
        model.adapter_enabled, self._vocabulary = True, weight.shape[0]
        # Virtual tokens have the numbers behind the vocabulary's.
        model.register_forward_pre_hook(self._lengthen, with_kwargs=True)
        model.embedding.register_forward_pre_hook(self._look_up)

        def put_in(embedding: nn.Module, args: Any, out: torch.Tensor) -> torch.Tensor:
            return self._put_in(embedding, local(getattr(model, NAME), partial_gradient=True), out)

        model.embedding.register_forward_hook(put_in)
        model.final_norm.register_forward_hook(self._take_out)

    def _lengthen(self, model: nn.Module, args: tuple[Inputs, ...], kwargs: dict[str, Any]) -> Any:
        if not model.adapter_enabled:
            self._ids = self._real = None
            return None
        tokens, documents = args[0].tokens, args[0].documents
        self._shape = tuple(tokens.shape)
        own = torch.arange(self.virtual_tokens, device=tokens.device)
        if documents is None:
            ids = (own + self._vocabulary).expand(tokens.shape[0], -1)
            self._ids = F.pad(torch.cat([ids, tokens], 1), (0, self._filling(tokens.shape[1])))
            self._real = slice(self.virtual_tokens, self.virtual_tokens + tokens.shape[1])
            return (args[0]._replace(tokens=self._ids),), kwargs
        places = virtual.Places.of(documents.cu_seqlens, tokens.numel(), self.virtual_tokens)
        filling = -(places.virtual.numel() + tokens.numel()) % self.row_multiple
        ids = F.pad(places.joined(own + self._vocabulary, tokens.flatten()), (0, filling))
        self._ids, self._real, bounds = ids[None], places.real, places.bounds
        if filling:
            # The filling is a document, too.
            bounds = torch.cat([bounds, bounds[-1:] + filling])
        return (self._placed(args[0], self._ids, bounds),), kwargs

    def _filling(self, length: int) -> int:
        return -(length + self.virtual_tokens) % self.row_multiple

    @staticmethod
    def _placed(inputs: Inputs, tokens: torch.Tensor, bounds: torch.Tensor) -> Inputs:
        place = torch.arange(tokens.shape[1], device=bounds.device)
        document = torch.bucketize(place, bounds[1:], right=True)
        documents = Documents(document.int()[None], bounds)
        positions = (place - bounds[document])[None]
        return inputs._replace(tokens=tokens, documents=documents, positions=positions)

    def _look_up(self, embedding: nn.Module, args: tuple[torch.Tensor, ...]) -> Any:
        if self._ids is None:
            return None
        return (args[0].masked_fill(args[0] >= self._vocabulary, 0),)

    def _put_in(
        self, embedding: nn.Module, prompt: torch.Tensor, out: torch.Tensor
    ) -> torch.Tensor:
        if self._ids is None:
            return out
        ids = self._ids
        if out.shape[1] != ids.shape[1]:
            # Under tensor parallelism a rank has its own part of the sequence.
            mesh = embedding.tensor_parallel_mesh
            ids = ids.chunk(mesh.size(), 1)[mesh.get_local_rank()]
        rows = F.embedding((ids - self._vocabulary).clamp(min=0), prompt).to(out.dtype)
        return torch.where((ids >= self._vocabulary).unsqueeze(-1), rows, out)

    def _take_out(self, norm: nn.Module, args: Any, out: torch.Tensor) -> torch.Tensor:
        if self._real is None:
            return out
        if isinstance(self._real, slice):
            return out[:, self._real]
        return out[0].index_select(0, self._real).unflatten(0, self._shape)

    @torch.no_grad()
    def first_value(
        self, model: Decoder, name: str, shape: torch.Size, generator: torch.Generator
    ) -> torch.Tensor:
        """The embeddings of the text."""
        rows = torch.tensor(self._text)
        table = full_tensor(model.embedding.weight.detach())
        embedded = table[rows.to(table.device)].cpu()
        scale = getattr(model.embedding, "output_scale", None)
        return embedded if scale is None else embedded * torch.tensor(scale, dtype=embedded.dtype)

    def to_peft(
        self, model: Decoder, hub: Hub, dtype: torch.dtype
    ) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """PEFT's one tensor; all ranks call this together."""
        whole = full_tensor(getattr(model, NAME).detach()).to(dtype).cpu()
        sizes = model.sizes()
        count, width = whole.shape
        settings = virtual.fields(count, width, len(model.blocks), sizes["num_heads"])
        # What it began as is no part of what it is: PEFT would tokenise a text when it loads it.
        return {virtual.PEFT_NAME: whole}, settings | {"prompt_tuning_init": "RANDOM"}

    def from_peft(
        self,
        model: Decoder,
        hub: Hub,
        tensors: dict[str, torch.Tensor],
        settings: Mapping[str, Any] | None,
        faults: list[str],
    ) -> dict[str, torch.Tensor]:
        """The inverse: PEFT's name is the model's own."""
        self.check_type(settings, faults)
        return tensors
