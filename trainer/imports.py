"""What ranks import and read when they need it, done before they are forked: trainer/launch.py.

python -m trainer.imports prints the files of what most runs import, in the order of their use.
"""

import importlib
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from runspec import files
from runspec.keys.model import TRANSFORMERS
from trainer.config import COMPONENT_PACKAGES, OWN_COMPONENTS, read_yaml

# The user's own packages may start threads or use a GPU, as bitsandbytes does.
_IMPORTED = set(COMPONENT_PACKAGES) - {"bitsandbytes"}
# torchao asks for the GPU's compute capability while it is imported, which starts CUDA: then no
# process that is forked can use it. transformers' and torchtune's models import torchao.
_WITHOUT_CUDA = ("trainer.storage.sharded", "transformers", "tokenizers")
# What each rank reads in the folder of a model or its tokenizer.
_OF_A_FOLDER = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)
_MOST = (
    "trainer.sft",
    "trainer.storage.sharded",
    "torchtune.models.llama3",
    "trainer.models.torchtune",
    "trainer.models.transformers.source",
    "transformers.models.llama.modeling_llama",
    "torch.utils.tensorboard.writer",
    "tensorboard.compat.proto.summary_pb2",
    "trainer.storage.export",
)


def prepare(path: Path) -> None:
    """Import and read what ranks will need for this train.yaml; its faults are left to them.

    With a build of torch for GPUs, what can be imported without starting CUDA.
    """
    files.keep([path])
    content = read_yaml(path)
    files.keep(folder / name for folder in _folders(content) for name in _OF_A_FOLDER)
    blocks = [block for block in content.values() if isinstance(block, dict)]
    names = [str(block.get("_component_", "")) for block in blocks]
    modules = [OWN_COMPONENTS.get(name, name).rpartition(".")[0] for name in names]
    uses_torchtune = any(module.startswith("torchtune") for module in modules)
    if torch.version.cuda or torch.version.hip:
        modules = ["datasets"] if uses_torchtune else []
    else:
        modules = [name for name in modules if name.partition(".")[0] in _IMPORTED]
        modules += ["trainer.models.torchtune"] if uses_torchtune else []
        if (content.get("model") or {}).get("_component_", TRANSFORMERS) == TRANSFORMERS:
            _import_model(Path((content.get("checkpointer") or {}).get("checkpoint_dir", "")))
    for module in (*_WITHOUT_CUDA, *modules):
        with suppress(ImportError):
            importlib.import_module(module)


def _folders(value: Any) -> set[Path]:
    """The folders of models and tokenizers that a config names."""
    if isinstance(value, dict | list):
        return set().union(*map(_folders, value.values() if isinstance(value, dict) else value))
    is_one = isinstance(value, str) and os.path.isfile(os.path.join(value, "config.json"))
    return {Path(value)} if is_one and "/" in value else set()


def _import_model(folder: Path) -> None:
    """Import transformers' code of the model in a folder."""
    importlib.import_module("trainer.models.transformers.source")
    transformers = importlib.import_module("transformers")
    for name in files.peek(folder / "config.json").get("architectures") or ():
        getattr(transformers, name, None)  # imported when it is asked for


def main() -> int:
    """Print the files."""
    for name in _MOST:
        importlib.import_module(name)
    specs = [getattr(module, "__spec__", None) for module in list(sys.modules.values())]
    for spec in filter(None, specs):
        if place := spec.cached or (spec.origin if spec.has_location else None):
            print(place)
    maps = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    for place in dict.fromkeys(line.split(maxsplit=5)[-1] for line in maps if "/" in line):
        print(place)
    return 0


if __name__ == "__main__":
    sys.exit(main())
