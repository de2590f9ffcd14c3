"""Whether the components of configs exist and fit: python -m trainer.check YAML ...

Prints a JSON object for each file: {"faults": [one line each], "found": the components}. Weights
are not read except those of an adapter to start from, nothing is computed and no rank is started.
Data are read only with --samples=N, which shows N samples: {"samples": see trainer.data.preview,
"sample_faults"}.
"""

import argparse
import inspect
import json
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from runspec.description import config_file
from runspec.hints import nearest
from runspec.keys.model import TRANSFORMERS
from runspec.layout import StepFacts
from runspec.prepared import COMPONENT
from trainer import config as configs
from trainer import groups, optimizers
from trainer.checkpoint import adapter
from trainer.data import tokenizers
from trainer.errors import ConfigError
from trainer.methods.base import Objective, named
from trainer.model import Decoder
from trainer.models import build as models
from trainer.models.builder import frozen_fault, teacher_spec

# Numbers in a parameter on which an optimizer is tried.
LARGEST = 2**10
# The components to which the trainer itself gives their first argument.
HANDED_OVER = ("optimizer", "lr_scheduler", "dataset", "dataset_val")
# torchtune's configs name a component there.
NEVER_CALLED = ("metric_logger", "checkpointer", "profiler", "tensor_parallel_plan")
# Keys of a block that the trainer reads and its component does not take.
OWN_KEYS = {
    **dict.fromkeys(("dataset", "dataset_val"), ("packed", "split_across_pack")),
    "lr_scheduler": tuple(optimizers.SHARES),
    "optimizer": (groups.KEY,),
}


def faults(content: dict[str, Any], objective: type[Objective]) -> list[str]:
    """Everything that would stop a run of `content`, a resolved train.yaml, at its set-up."""
    texts: list[str] = []
    config = _tried(texts, lambda: configs.parse(content, objective.config_class))
    texts += component_faults(content)
    if config is not None and not texts:
        texts += _misfits(config, objective)
    return texts


def component_faults(content: dict[str, Any]) -> list[str]:
    """Components that cannot be imported, or do not take the arguments that are given."""
    texts: list[str] = []
    for key, block in _blocks("", content):
        if key in NEVER_CALLED or configs.refused_path(key, block["_component_"]):
            continue  # `parse` names what is refused
        if key == "model" and block["_component_"] == TRANSFORMERS:
            continue  # the folder names the class
        if block["_component_"] == COMPONENT:
            continue  # the set's format names the component
        factory = _tried(texts, partial(configs.component, key, block["_component_"]))
        if factory is None:
            continue
        ours = OWN_KEYS.get(key, ())
        if key == "model":
            ours = _tried(texts, partial(models.own_keys, block)) or ()
        arguments = {k: v for k, v in block.items() if k not in ("_component_", *ours)}
        handed_over = key in HANDED_OVER
        try:
            if key.startswith("lr_scheduler"):
                if why := optimizers.unusable_schedule(block):
                    texts.append(why)
                    continue
                arguments |= dict.fromkeys(optimizers.schedule_arguments(factory, block))
                given = [n for share, n in optimizers.SHARES.items() if share in block]
                arguments |= dict.fromkeys(given)
                handed_over = "optimizer" not in arguments
            signature = inspect.signature(factory)
            bind = signature.bind if key in HANDED_OVER else signature.bind_partial
            bind(*[None] * handed_over, **arguments)
        except TypeError as error:
            unknown = next((name for name in arguments if name not in signature.parameters), "")
            hint = nearest(unknown, signature.parameters) if unknown in str(error) else ""
            texts.append(f"{key}: {block['_component_']} does not take this: {error}{hint}")
        except ValueError:
            continue  # a component in C has no signature
    return texts


def _blocks(key: str, value: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    if isinstance(value, dict):
        if isinstance(value.get("_component_"), str):
            yield key, value
        for name, inner in value.items():
            yield from _blocks(f"{key}.{name}".lstrip("."), inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _blocks(key, inner)


def _misfits(config: configs.TrainConfig, objective: type[Objective]) -> list[str]:
    """Why method, model, tokenizer and optimizer do not fit together, or not the model's folder."""
    texts: list[str] = []
    texts += objective.faults(config)
    if config.model_folder.is_dir():
        model = _tried(texts, lambda: models.fitting(config)[1])
        # From scratch it may come from another folder, which is not downloaded yet.
        apart = Path(str(config.tokenizer.get("path") or config.model_folder))
        tokenizer = None
        if config.reads_weights or apart.exists():
            tokenizer = _tried(texts, lambda: tokenizers.of_block(config.tokenizer))
        if tokenizer is not None:
            texts += tokenizers.faults(tokenizer, config.model_folder)
    elif config.model["_component_"] == TRANSFORMERS and not config_file(config.model_folder):
        model = None  # nothing is known of it before it is downloaded
    else:
        model = _tried(texts, lambda: models.empty(config))
        if model is not None:
            texts += models.layout_faults(model, config)
    if config.teacher_key and (folder := Path(getattr(config, config.teacher_key))).is_dir():
        of_teacher: list[str] = []
        _tried(of_teacher, lambda: models.fitting(teacher_spec(config, str(folder))))
        texts += [frozen_fault(config.teacher_key, fault) for fault in of_teacher]
    if model is not None and config.checkpointer.get("adapter_checkpoint") is not None:
        _tried(texts, lambda: adapter.read(model, config))
    # A layout that is not possible has been reported.
    optimizer = _tried(texts, lambda: _optimizer(config, None if texts else model))
    if optimizer is not None:
        # How many steps the run has is not known yet.
        _tried(texts, lambda: optimizers.schedule(config.lr_scheduler, optimizer, 1))
    length = config.tokenizer.get("max_seq_len")
    if model is not None and isinstance(length, int):
        virtual = model.max_seq_len - model.longest_document
        texts += StepFacts(length=length, longest=model.max_seq_len, virtual=virtual).faults()
    return texts


def _optimizer(config: configs.TrainConfig, model: Decoder | None) -> torch.optim.Optimizer:
    """The config's optimizer for small parameters that are laid out as those of `model` will be.

    Raises:
        ConfigError: it does not take its arguments, or cannot update such parameters.
    """
    name = config.optimizer["_component_"]
    # These work in every layout; torchao's compile their step, which takes long.
    anywhere = name in optimizers.FUSED or name.startswith("torchao.")
    if model is None or (anywhere and not config.optimizer.get("no_weight_decay")):
        return optimizers.build(config.optimizer, [nn.Parameter(torch.zeros(2, 2))])
    # Imported late, as hardly any recipe needs it.
    from trainer.parallel.fake import fake_world

    copies = (config.data_parallel_shard_dim, config.data_parallel_replicate_dim)
    ranks = math.prod(max(1, count) for count in copies) * config.tensor_parallel_dim
    with fake_world(vars(config), ranks) as world:
        models.lay_out(model, replace(config, compile=False), world)
        trained = groups.trained_of(model)
        small = [each._replace(parameter=_small(each.parameter)) for each in trained]
        return optimizers.build(config.optimizer, small)


def _small(parameter: nn.Parameter) -> nn.Parameter:
    """Zeros on the CPU in few rows and columns, on the same mesh in the same way."""
    largest = round(LARGEST ** (1 / parameter.ndim))
    small = torch.zeros([min(size, largest) for size in parameter.shape], dtype=parameter.dtype)
    if isinstance(parameter, DTensor):
        mesh, placements = parameter.device_mesh, parameter.placements
        small = distribute_tensor(small, mesh, placements, src_data_rank=None)
    return nn.Parameter(small)


def _tried(texts: list[str], task: Callable[[], Any]) -> Any:
    """What `task` returns; None if it fails, with its faults added to `found`."""
    try:
        return task()
    except ConfigError as error:
        texts += error.faults
    except Exception as error:
        texts.append(f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
    return None


def main(arguments: list[str]) -> int:
    """Print the verdict on each given file, a line each; exit status 0, or 2 for wrong usage."""
    parser = argparse.ArgumentParser(prog="python -m trainer.check")
    parser.add_argument("paths", nargs="+", metavar="<run>/train.yaml", type=Path)
    parser.add_argument("--samples", type=int, metavar="N")
    parser.add_argument("--objective", required=True, help="dotted path of the training method")
    given = parser.parse_args(arguments)
    for path in given.paths:
        print(json.dumps(_verdict(path, given.objective, given.samples)))
    return 0


def _verdict(path: Path, method: str, samples: int | None) -> dict[str, Any]:
    texts: list[str] = []
    objective = _tried(texts, lambda: named(method))
    content = _tried(texts, lambda: configs.read_yaml(path))
    if content is not None and objective is not None:
        texts += faults(content, objective)
    names = [block["_component_"].rpartition(".")[2] for _, block in _blocks("", content or {})]
    verdict = {"faults": texts, "found": ", ".join(dict.fromkeys(names))}
    if samples is not None and content and objective is not None:
        verdict |= _samples(content, objective, samples)
    return verdict


def _samples(content: dict[str, Any], method: type[Objective], count: int) -> dict[str, Any]:
    from trainer.data.preview import previews  # a check without samples does not pay for it

    texts: list[str] = []
    config = _tried(texts, lambda: configs.parse(content, method.config_class))
    shown, faults = previews(config, count, method.form) if config is not None else ([], [])
    if config is not None and not faults:
        faults = method.sample_faults(config)
    return {"samples": shown, "sample_faults": texts + faults}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
