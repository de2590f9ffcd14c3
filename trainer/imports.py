"""What ranks import when they need it, imported before they are forked: trainer/launch.py.

python -m trainer.imports prints the files of what most runs import, in the order of their use.
"""

import importlib
import sys
from contextlib import suppress
from pathlib import Path

import torch

from runspec.files import read_json_or_none
from runspec.keys.model import TRANSFORMERS
from trainer.config import COMPONENT_PACKAGES, OWN_COMPONENTS, read_yaml

# The user's own packages may start threads or use a GPU, as bitsandbytes does.
_IMPORTED = set(COMPONENT_PACKAGES) - {"bitsandbytes"}
# torchao asks for the GPU's compute capability while it is imported, which starts CUDA: then no
# process that is forked can use it. transformers' and torchtune's models import torchao.
_WITHOUT_CUDA = ("trainer.storage.sharded", "transformers", "tokenizers")
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
    """Import what a rank will need for this train.yaml; what is wrong in it is left to the rank.

    With a build of torch for GPUs, what can be imported without starting CUDA.
    """
    content = read_yaml(path)
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


def _import_model(folder: Path) -> None:
    """Import transformers' code of the model in a folder."""
    importlib.import_module("trainer.models.transformers.source")
    transformers = importlib.import_module("transformers")
    for name in (read_json_or_none(folder / "config.json") or {}).get("architectures") or ():
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
