"""The whole model, its adapter merged, in transformers' own class, whose `generate` answers."""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from runspec.description import config_file
from trainer.checkpoint import export, weights
from trainer.config import TrainConfig
from trainer.errors import ConfigError
from trainer.model import Decoder
from trainer.models import build
from trainer.models.build import Model
from trainer.models.folder_class import load_class, load_config
from trainer.parallel.world import World
from trainer.sharded import reshard


def faults(config: TrainConfig, on_hub: bool = False) -> list[str]:
    """Why transformers' class cannot take the trained weights, as the model's folder shows.

    Args:
        on_hub: they are sent as on the Hub, whatever that class calls them.
    """
    if not config.model_folder.is_dir():
        return []
    try:
        _, module = build.fitting(config)
    except ConfigError:
        return []  # other checks say what is wrong with the folder
    if module.adapter is not None and not module.adapter.declared.merges:
        title = module.adapter.declared.title
        return [f"model.adapter: answers cannot be generated over {title}; choose another adapter"]
    if on_hub:
        return []
    own = {key for key in weights.hub_tensors(module) if key is not None}
    own |= {name for name, _ in _stacked(module)}
    with torch.device("meta"):
        other = transformers_model(config.model_folder, torch.float32)
    names = {name for name, _ in other.named_parameters()}
    if own == names:
        return []
    return [
        f"checkpointer.checkpoint_dir: transformers' {type(other).__name__} cannot generate "
        "answers: it holds other tensors than the trainer's model, such as parts for images or "
        "biases of routers; choose another model"
    ]


def _stacked(module: Decoder) -> list[tuple[str, torch.Tensor]]:
    """The parameters that the hub has in pieces, such as experts, by their names in the class."""
    return [each for each in weights.named_parameters(module) if module.hub_pieces(each[0])]


def transformers_model(folder: Path, dtype: torch.dtype, layers: int | None = None) -> Any:
    """Return transformers' class of a model folder, with first values that are not used."""
    if (file := config_file(folder)) is None:
        raise ConfigError(
            f"{folder}/config.json is missing, which names the class that generates answers; "
            "run cookbook download"
        )
    config = load_config(file)
    if layers is not None:
        config.num_hidden_layers = layers
        if kinds := getattr(config, "layer_types", None):
            config.layer_types = kinds[:layers]
    return load_class(config).from_config(config, dtype=dtype)


def _joined(
    parts: Iterable[torch.Tensor],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    """A tensor of this shape whose rows, or matrices one by one, these are in their order."""
    whole, begin = torch.empty(shape, dtype=dtype, device=device), 0
    rows = whole.flatten(0, -2) if len(shape) > 2 else whole
    for part in parts:
        rows[begin : begin + len(part)] = part
        begin += len(part)
    return whole


class Ends(NamedTuple):
    """The tokens that end an answer, and the one that fills rows up."""

    tokens: list[int]
    pad_id: int

    @classmethod
    def of(cls, tokenizer: Any) -> "Ends":
        """Return those of a tokenizer."""
        return cls(sorted({*tokenizer.ends, tokenizer.eos_id} - {None}), tokenizer.pad_id)


def _parts(model: Model) -> dict[str, weights.Parts]:
    """By name in the class, the parameters (plain name, parameter) in a tensor's rows."""
    tensors = weights.hub_tensors(model.module)
    by_name = {key: parts for key, parts in tensors.items() if key is not None}
    return by_name | {name: [(name, parameter)] for name, parameter in _stacked(model.module)}


def shapes(model: Model) -> dict[str, tuple[int, ...]]:
    """Of the whole weights, by their names in the class."""
    return {name: weights.hub_shape(parts) for name, parts in _parts(model).items()}


def tensors(model: Model, wanted: bool, device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the whole weights by their names in the class, in the model's dtype.

    All ranks go through it together; only those that want them get some.
    """
    reshard(model.module)
    layers = export.layers_of(model)
    for name, parts in _parts(model).items():
        rows = (
            export.gather(model, layers, step)
            for plain, parameter in parts
            for step in export.steps_of(model, plain, parameter)
        )
        if wanted:
            yield name, _joined(rows, weights.hub_shape(parts), model.dtype, device)
        else:
            deque(rows, 0)


class Generator:
    """transformers' own class on one device; model: None before it has weights."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.model: Any = None

    @torch.no_grad()
    def generate(
        self, prompts: Sequence[Sequence[int]], room: int, draw: Any, ends: Ends
    ) -> list[list[int]]:
        """Up to `room` tokens after each prompt, those behind an ending token included.

        Args:
            draw: a logits processor that leaves one token of each row possible.
        """
        from transformers import GenerationConfig, LogitsProcessorList

        longest = max(map(len, prompts))
        # Made here and copied at once: the host waits for each copy.
        ids = torch.full((len(prompts), longest), ends.pad_id)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):  # padded on the left
            ids[row, longest - len(prompt) :] = torch.tensor(prompt)
            mask[row, longest - len(prompt) :] = 1
        settings = GenerationConfig(
            max_new_tokens=room,
            eos_token_id=ends.tokens,
            pad_token_id=ends.pad_id,
            do_sample=False,
        )
        both = self.model.generate(
            ids.to(self.device),
            attention_mask=mask.to(self.device),
            generation_config=settings,
            logits_processor=LogitsProcessorList([draw]),
        )
        answers: list[list[int]] = both[:, longest:].tolist()
        return answers


class Copy(Generator):
    """The copy of one rank, with weights from `gather` to `free`; all ranks call both together.

    Args:
        folder: whose config.json names the class.
        layers: how many blocks it has, if not as many as there.

    model: None on the ranks of a tensor-parallel group that do not answer.
    """

    def __init__(self, folder: Path, world: World, layers: int | None = None) -> None:
        super().__init__(world.device)
        self._folder, self._world, self._layers = folder, world, layers

    def gather(self, model: Model) -> None:
        """Bring the whole weights here, on the ranks that answer."""
        world = self._world
        answers = bool(world.data_weight)
        if answers and self.model is None:
            devices = [world.device] if world.device.type == "cuda" else []
            # First values that are not used are drawn here.
            with torch.random.fork_rng(devices), world.device:
                made = transformers_model(self._folder, model.dtype, self._layers)
            self.model = made.eval()
        own = dict(self.model.named_parameters()) if answers else {}
        for name, whole in tensors(model, answers, world.device):
            own[name].data = whole

    def free(self) -> None:
        """Give the weights up again."""
        for parameter in self.model.parameters() if self.model is not None else ():
            parameter.data = parameter.new_empty(0)

    @torch.no_grad()
    def one_token(self, rows: int, length: int) -> torch.Tensor:
        """Scores [rows, vocabulary] of the token after this many, for `plugins.estimate.trace`."""
        ids = torch.zeros(rows, length, dtype=torch.int64, device=self._world.device)
        mask = torch.ones_like(ids)
        output = self.model(ids, attention_mask=mask, use_cache=True, logits_to_keep=1)
        cache, last = output.past_key_values, ids[:, :1]
        mask = torch.cat([mask, torch.ones_like(last)], 1)
        del output
        output = self.model(last, attention_mask=mask, past_key_values=cache, use_cache=True)
        scores: torch.Tensor = output.logits[:, -1]
        return scores
