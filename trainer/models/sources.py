"""Sources of models: from a `model` block to an empty `Decoder`."""

import importlib
import inspect
from typing import Any

from trainer.config import component, instantiate
from trainer.errors import ConfigError
from trainer.layers import lora, nf4
from trainer.models.decoder import Decoder

# By the prefix of model._component_: the module whose `adopt` makes a Decoder from what such a
# component returns. Any other component must return a Decoder itself.
SOURCES = {"torchtune.": "trainer.models.torchtune.decoder"}
# Keys of a `model` block for a component that returns a Decoder; torchtune's builders add adapters
# themselves.
ADAPTER_KEYS = ("lora_rank", "lora_alpha", "lora_dropout", "lora_modules", "use_dora")


def own_keys(block: dict[str, Any]) -> set[str]:
    """The keys of a `model` block that the trainer reads and does not pass to the component."""
    return {"quantize_base"} if _source(block) else {"quantize_base", *ADAPTER_KEYS}


def _source(block: dict[str, Any]) -> str | None:
    name = block["_component_"]
    return next((SOURCES[prefix] for prefix in SOURCES if name.startswith(prefix)), None)


def empty_module(block: dict[str, Any]) -> Decoder:
    """Return the model that a `model` block names, without weights; call it on the meta device.

    With `quantize_base` the weights of its blocks are NF4. torchtune's own quantised weights cannot
    be sharded over two mesh dimensions; ours are put into what a builder makes without them, which
    also serves the builders that have no `quantize_base`.

    Raises:
        ConfigError: the component returns no decoder, or one that cannot be quantised.
    """
    builder = component("model", block["_component_"])
    # A qlora_* builder is the lora_* one with this keyword set.
    preset = getattr(builder, "keywords", {}).get("quantize_base", False)
    quantised = block.get("quantize_base", preset)
    ours = own_keys(block)
    plain = {key: value for key, value in block.items() if key not in ours}
    if "quantize_base" in inspect.signature(builder).parameters:
        plain["quantize_base"] = False
    model = instantiate("model", plain)
    if source := _source(block):
        model = importlib.import_module(source).adopt(model)
    if not isinstance(model, Decoder):
        raise ConfigError(
            f"model: {block['_component_']} returns a {type(model).__name__}, not a "
            "trainer.models.decoder.Decoder"
        )
    if not source:
        _add_adapters(model, block)
    if quantised:
        _quantise(model)
    return model


def _add_adapters(model: Decoder, block: dict[str, Any]) -> None:
    """Add adapters to the linear layers of the blocks, or to those that `lora_modules` names."""
    rank = block.get("lora_rank")
    if rank is None:
        if given := [key for key in ADAPTER_KEYS if key in block]:
            raise ConfigError(f"model.{given[0]}: needs model.lora_rank")
        return
    layers = {name: name.rpartition(".")[2] for name in model.linear_layers()}
    wanted = set(block.get("lora_modules") or layers.values())
    if unknown := wanted - set(layers.values()):
        known = ", ".join(sorted(set(layers.values())))
        raise ConfigError(f"model.lora_modules: no layer {', '.join(sorted(unknown))}; has {known}")
    lora.add_adapters(
        model,
        [name for name, last in layers.items() if last in wanted],
        rank,
        block.get("lora_alpha", 2 * rank),
        dropout=block.get("lora_dropout", 0.0),
        use_dora=block.get("use_dora", False),
    )


def _quantise(model: Decoder) -> None:
    if lora.method(model) == "full":
        raise ConfigError(
            "model.quantize_base: only adapters can be trained over a quantised base; "
            "use a lora_* builder, or set model.quantize_base=False"
        )
    names = model.linear_layers()
    if faults := nf4.faults(names, model):
        raise ConfigError(*faults)
    lora.quantise(model, names)
