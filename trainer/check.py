"""Whether the components of configs exist and fit: python -m trainer.check YAML ...

Prints a JSON object for each file: {"faults": [one line each], "found": the components}. Weights
and data are not read, nothing is computed and no rank is started. With --stock only the components
themselves are checked, because torchtune's own recipes give them further arguments.
"""

import inspect
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from runspec.keys.sft import TRANSFORMERS
from runspec.model_config import config_file
from trainer import config as configs
from trainer import optimizers
from trainer.data import tokenizers
from trainer.errors import ConfigError
from trainer.layers.loss import LATER_NAMES, TokenLoss
from trainer.models import build as models

# The components to which the trainer itself gives their first argument.
HANDED_OVER = ("optimizer", "lr_scheduler", "dataset", "dataset_val")
# Keys of a block that the trainer reads and its component does not take.
OWN_KEYS = dict.fromkeys(("dataset", "dataset_val"), ("packed", "split_across_pack"))


def faults(content: dict[str, Any]) -> list[str]:
    """Everything that would stop a run of `content`, a resolved train.yaml, at its set-up."""
    found: list[str] = []
    config = _tried(found, lambda: configs.parse(content))
    found += component_faults(content, complete=True)
    if config is not None and not found:
        found += _misfits(config)
    return found


def component_faults(content: dict[str, Any], complete: bool) -> list[str]:
    """Components that cannot be imported, or do not take the arguments that are given.

    Args:
        complete: also name arguments that are missing.
    """
    found: list[str] = []
    for key, block in _blocks("", content):
        # Loggers are ignored, and losses by torchtune's later names are ours.
        if key == "metric_logger" or block["_component_"] in LATER_NAMES:
            continue
        if key == "model" and block["_component_"] == TRANSFORMERS:
            continue  # the folder names the class
        factory = _tried(found, lambda k=key, b=block: configs.component(k, b["_component_"]))
        if factory is None:
            continue
        ours = models.own_keys(block) if key == "model" else OWN_KEYS.get(key, ())
        arguments = {k: v for k, v in block.items() if k not in ("_component_", *ours)}
        if key == "lr_scheduler":
            arguments["num_training_steps"] = None
        try:
            signature = inspect.signature(factory)
            bind = signature.bind if complete and key in HANDED_OVER else signature.bind_partial
            bind(*[None] * (key in HANDED_OVER), **arguments)
        except TypeError as error:
            found.append(f"{key}: {block['_component_']} does not take this: {error}")
        except ValueError:
            continue  # a component in C has no signature
    return found


def _blocks(key: str, value: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    if isinstance(value, dict):
        if isinstance(value.get("_component_"), str):
            yield key, value
        for name, inner in value.items():
            yield from _blocks(f"{key}.{name}".lstrip("."), inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _blocks(key, inner)


def _misfits(config: configs.TrainConfig) -> list[str]:
    """Why model, tokenizer, loss and optimizer do not fit together, or not the model's folder."""
    found: list[str] = []
    _tried(found, lambda: TokenLoss(config))
    trained = [nn.Parameter(torch.zeros(1))]
    optimizer = _tried(found, lambda: optimizers.build(config.optimizer, trained))
    if optimizer is not None:
        _tried(found, lambda: optimizers.schedule(config.lr_scheduler, optimizer, 10))
    if config.model_folder.is_dir():
        model = _tried(found, lambda: models.fitting(config)[1])
        tokenizer = _tried(found, lambda: configs.instantiate("tokenizer", config.tokenizer))
        if tokenizer is not None:
            found += tokenizers.faults(tokenizer, config.model_folder)
    elif config.model["_component_"] == TRANSFORMERS and not config_file(config.model_folder):
        model = None  # nothing is known of it before it is downloaded
    else:
        model = _tried(found, lambda: models.empty(config))
        if model is not None:
            found += models.layout_faults(model, config)
    length = config.tokenizer.get("max_seq_len")
    if model is not None and isinstance(length, int) and length > model.max_seq_len:
        found.append(
            f"tokenizer.max_seq_len: {length} is more than the model's {model.max_seq_len}; "
            f"set tokenizer.max_seq_len={model.max_seq_len}"
        )
    return found


def _tried(found: list[str], task: Callable[[], Any]) -> Any:
    """What `task` returns; None if it fails, with its faults added to `found`."""
    try:
        return task()
    except ConfigError as error:
        found += error.faults
    except Exception as error:
        found.append(f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
    return None


def main(arguments: list[str]) -> int:
    """Print the verdict on each given file, a line each; exit status 0, or 2 for wrong usage."""
    stock, paths = "--stock" in arguments, [word for word in arguments if word != "--stock"]
    if not paths:
        print("usage: python -m trainer.check [--stock] <run>/train.yaml ...", file=sys.stderr)
        return 2
    for path in paths:
        print(json.dumps(_verdict(Path(path), stock)))
    return 0


def _verdict(path: Path, stock: bool) -> dict[str, Any]:
    found: list[str] = []
    content = _tried(found, lambda: configs.read_yaml(path))
    if content is not None:
        found += component_faults(content, complete=False) if stock else faults(content)
    names = [block["_component_"].rpartition(".")[2] for _, block in _blocks("", content or {})]
    return {"faults": found, "found": ", ".join(dict.fromkeys(names))}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
