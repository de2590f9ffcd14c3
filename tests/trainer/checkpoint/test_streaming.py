"""Loading and exporting a model take the memory of a rank's shard and of a few tensors."""

import importlib
import json
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from tests.trainer.runs import finish, start, write_config
from trainer import config, demo
from trainer.checkpoint.export import export
from trainer.models import build as models
from trainer.parallel import world as distributed

ROOT = Path(__file__).parents[3]
LAYERS, WIDTH, HIDDEN = 6, 1024, 4096
MIB = 2**20


def anonymous_mib() -> float:
    """This process's own memory, without the pages of mapped files, which the kernel may drop."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon:")) / 1024


class Peak:
    """The most memory that the block takes beyond what was taken before."""

    def __enter__(self) -> "Peak":
        self.mib, self._before, self._going = 0.0, anonymous_mib(), True
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._going = False
        self._thread.join()

    def _watch(self) -> None:
        while self._going:
            self.mib = max(self.mib, anonymous_mib() - self._before)
            time.sleep(0.002)


def measure(path: Path) -> None:
    """What each rank runs: load, export, and a file of figures in MiB."""
    settings = config.load(path)
    world = distributed.start("cpu")
    for name in ("trainer.models.transformers.source", "transformers.models.llama.modeling_llama"):
        importlib.import_module(name)  # not a part of loading the weights
    with Peak() as loading:
        model = models.build(settings, world)
    with Peak() as exporting:
        export(model, settings, world)
    parameters = list(model.module.parameters())
    figures = {
        "model": sum(p.numel() * p.element_size() for p in parameters) / MIB,
        "shard": sum(p.to_local().numel() * p.element_size() for p in parameters) / MIB,
        "loading": loading.mib,
        "exporting": exporting.mib,
    }
    (path.parent / f"figures_{world.rank}.json").write_text(json.dumps(figures))
    distributed.stop()


def write_model(folder: Path) -> None:
    """A demo model of 370 MiB in files of 64 MB."""
    demo.make(folder, ROOT / "configs/datasets/slurm_qa.jsonl")
    sizes = {"hidden_size": WIDTH, "intermediate_size": HIDDEN, "num_hidden_layers": LAYERS}
    settings = LlamaConfig.from_pretrained(folder, head_dim=WIDTH // 4, **sizes)
    (folder / "model.safetensors").unlink()
    LlamaForCausalLM(settings).save_pretrained(folder, max_shard_size="64MB")


@pytest.mark.long
def test_no_rank_holds_the_whole_model(tmp_path, dataset):
    folder = tmp_path / "model"
    write_model(folder)
    path = write_config(tmp_path / "run", folder, dataset)
    finish(start(path, ranks=2, module="tests.trainer.checkpoint.test_streaming", fresh=True))
    for rank in (0, 1):
        figures = json.loads((path.parent / f"figures_{rank}.json").read_text())
        print(f"rank {rank}: { {name: round(mib) for name, mib in figures.items()} } MiB")
        assert figures["model"] > 360 and figures["shard"] == figures["model"] / 2
        # The largest tensors have 16 MiB; glibc gives memory of that size back late.
        assert figures["loading"] < figures["shard"] + 64
        assert figures["exporting"] < 192
    exported = load_file(path.parent / "export/model.safetensors")
    for file in folder.glob("*.safetensors"):
        for name, tensor in load_file(file).items():
            assert torch.equal(exported[name], tensor)


if __name__ == "__main__":
    measure(Path(sys.argv[1]))
