"""Real training runs for the tests: configs, starts under torchrun, and what they leave."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import yaml
from safetensors import safe_open
from safetensors.torch import load_file

from runspec.keys.key import keys_of
from runspec.keys.model import TRANSFORMERS
from runspec.keys.train import ModelSpec
from tests.trainer.forks import ROOT as ROOT
from tests.trainer.forks import Ranks, environment
from trainer.demo import ARCHITECTURE, VOCAB_SIZE

# Far more than a start takes, as two workers share the cores.
START_LIMIT_S = 300


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a model folder, by name."""
    found = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            found |= {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    return found


def randomise_adapter(module: torch.nn.Module) -> None:
    """Give an adapter weights that do something: LoRA's B, magnitudes and factors."""
    from trainer.checkpoint import weights

    torch.manual_seed(2)
    with torch.no_grad():
        for key, parameter in weights.named_parameters(module):
            if key.endswith("lora_b.weight"):
                parameter.normal_(std=0.05)
            if key.endswith(("magnitude", "ia3_out", "ia3_in")):
                parameter *= 1 + 0.1 * torch.randn_like(parameter)


def write_config(
    folder: Path, model_folder: Path, dataset: Path, row_length: int | None = None, **changes: Any
) -> Path:
    """A small full fine-tune of the demo model in `folder`; returns its train.yaml.

    `row_length` packs the samples into rows of so many tokens.
    """
    config: dict[str, Any] = {
        "output_dir": str(folder),
        "seed": 3,
        "shuffle": True,
        "device": "cpu",
        "dtype": "fp32",
        "model": {},
        "tokenizer": {
            "_component_": "trainer.data.tokenizers.hugging_face_tokenizer",
            "path": str(model_folder),
        },
        "checkpointer": {"checkpoint_dir": str(model_folder)},
        "dataset": {
            "_component_": "torchtune.datasets.instruct_dataset",
            "source": "json",
            "data_files": str(dataset),
            "split": "train",
            "column_map": {"input": "question", "output": "answer"},
        },
        "batch_size": 8,
        "max_steps": 6,
        "epochs": 20,
        "optimizer": {"_component_": "torch.optim.AdamW", "lr": 3e-3},
        "clip_grad_norm": 1.0,
    }
    if row_length is not None:
        config["dataset"]["packed"] = True
        config["tokenizer"]["max_seq_len"] = row_length
    for key, value in changes.items():
        if value is None:
            config.pop(key, None)
        else:
            config[key] = value
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "train.yaml"
    path.write_text(yaml.safe_dump(config, sort_keys=False))
    return path


# The linear layers of a block, by the last part of their names.
LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def lora_model(**changes: Any) -> dict[str, Any]:
    """The model block of `write_config` with LoRA on every kind of layer."""
    return {"lora_rank": 4, "lora_alpha": 8} | changes


def described(folder: Path, **settings: Any) -> Path:
    """Put a config.json into `folder`, of the demo's model but for these settings."""
    folder.mkdir(parents=True, exist_ok=True)
    content = {"model_type": "llama", "vocab_size": VOCAB_SIZE, **ARCHITECTURE, **settings}
    (folder / "config.json").write_text(json.dumps(content))
    return folder


def empty_model(folder: Path, **block: Any) -> Any:
    """The model of a folder's config.json without weights, with the keys of a `model` block."""
    from trainer.models.build import empty_module

    with torch.device("meta"):
        return empty_module({"_component_": TRANSFORMERS, **block}, folder)


def spec_of(model: dict[str, Any], **changes: Any) -> ModelSpec:
    """What a config with this model block says of the model; its other keys have their defaults."""
    keys = {name: key.default for name, key in keys_of(ModelSpec).items() if "." not in name}
    model = {"_component_": TRANSFORMERS, **model}
    return ModelSpec(**keys | {"model": model, "tokenizer": {}, "checkpointer": {}} | changes)


def start(
    config: Path,
    ranks: int = 1,
    attempt: int = 0,
    module: str = "trainer.train sft",
    fresh: bool = False,
) -> Ranks | subprocess.Popen:
    """Start `module`, with its first arguments behind it, on the config, on ranks that are forked.

    `fresh` makes them new processes of Python as a job does: several ranks go through torchrun.
    """
    module, *arguments = [*module.split(), str(config)]
    if not fresh:
        return Ranks(module, arguments, ranks, COOKBOOK_ATTEMPT=str(attempt))
    command = [sys.executable]
    if ranks > 1:
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        command += ["--max-restarts=0", "--monitor-interval=0.2"]
    return subprocess.Popen(
        [*command, "-m", module, *arguments],
        env=environment(COOKBOOK_ATTEMPT=str(attempt)),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(
    process: Ranks | subprocess.Popen, status: int | None = 0, limit_s: float = START_LIMIT_S
) -> str:
    """Wait for a start, check its exit status where one is given, return its output."""
    try:
        output, _ = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        process.terminate()
        raise AssertionError(f"not done in {limit_s} s:\n{process.communicate()[0]}") from None
    if status is not None:
        assert process.returncode == status, output
    return output


def train(
    *configs: Path,
    ranks: int = 1,
    attempt: int = 0,
    status: int | None = 0,
    limit_s: float = START_LIMIT_S,
) -> str:
    """Starts from beginning to end, one after the other; returns what all of them printed."""
    outputs = (finish(start(path, ranks, attempt), status, limit_s) for path in configs)
    return "".join(outputs)


def wait_for_step(config: Path, step: int, process: Ranks | subprocess.Popen) -> None:
    """Return as soon as metrics.jsonl shows `step`."""
    deadline = time.monotonic() + START_LIMIT_S
    while time.monotonic() < deadline:
        if any(line["step"] >= step for line in metrics(config.parent)):
            return
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.01)
    raise AssertionError(f"step {step} was not reached in {START_LIMIT_S} s")


def rank_processes(process: Ranks | subprocess.Popen) -> list[psutil.Process]:
    """The ranks of a start by rank; the process itself if there is no torchrun."""
    if isinstance(process, Ranks):
        return process.ranks
    children = psutil.Process(process.pid).children()
    ranks = [c for c in children if "RANK" in c.environ()]
    return sorted(ranks, key=lambda c: int(c.environ()["RANK"])) or [psutil.Process(process.pid)]


def kill_rank(process: Ranks | subprocess.Popen, rank: int) -> None:
    """kill -9 one rank."""
    rank_processes(process)[rank].send_signal(signal.SIGKILL)


def kill_at(config: Path, step: int, ranks: int = 1, module: str = "trainer.train sft") -> None:
    """Start on the config, and kill the last rank once metrics.jsonl shows `step`."""
    process = start(config, ranks, module=module)
    wait_for_step(config, step, process)
    kill_rank(process, ranks - 1)
    finish(process, status=None)


def metrics(folder: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl; a line that is being written is left out."""
    path = folder / "metrics.jsonl"
    if not path.exists():
        return []
    lines = path.read_text().split("\n")[:-1]
    return [json.loads(line) for line in lines]


def curve(folder: Path) -> list[tuple]:
    """What must be the same in any two runs that are the same, step by step."""
    keys = ("step", "epoch", "loss", "lr", "grad_norm", "tokens")
    return [tuple(line[key] for key in keys) for line in metrics(folder)]


def assert_same_curve(
    own: Path, wanted: Path, loss_tolerance: float, norm_tolerance: float | None = None
) -> None:
    """Two runs took the same steps; the norm's tolerance is relative, without one it is free."""
    for line, own_line in zip(metrics(wanted), metrics(own), strict=True):
        assert own_line["loss"] == pytest.approx(line["loss"], abs=loss_tolerance)
        if norm_tolerance is not None:
            assert own_line["grad_norm"] == pytest.approx(line["grad_norm"], rel=norm_tolerance)
        assert (own_line["lr"], own_line["tokens"]) == (line["lr"], line["tokens"])


def assert_same_tensors(
    own: Path, wanted: Path, tolerance: float, file: str = "export/model.safetensors"
) -> None:
    """Two runs wrote the same names and, within an absolute tolerance, the same numbers."""
    tensors, own_tensors = load_file(wanted / file), load_file(own / file)
    assert tensors.keys() == own_tensors.keys()
    for key, tensor in tensors.items():
        torch.testing.assert_close(own_tensors[key], tensor, rtol=0, atol=tolerance)


class Runs:
    """Runs by name, each trained when it is first asked for: runs["lora-tp2"] is its folder.

    The bases run on one process. A layout, with its number of ranks, is named after the base that
    it must equal, "BASE-LAYOUT", and changes the base's config.
    """

    def __init__(
        self,
        root: Path,
        config: Callable[..., Path],
        bases: Mapping[str, Mapping[str, Any]],
        layouts: Mapping[str, tuple[int, Mapping[str, Any]]],
        method: str = "sft",
    ) -> None:
        """`config` writes the train.yaml of a folder by the changes of a run."""
        self.root, self.config, self.bases, self.layouts = root, config, bases, layouts
        self.module = f"trainer.train {method}"
        # What each has printed.
        self.said: dict[str, str] = {}

    def base(self, name: str) -> str:
        return max((base for base in self.bases if f"{name}-".startswith(f"{base}-")), key=len)

    def __getitem__(self, name: str) -> Path:
        if name not in self.said:
            ranks, changes = self.layouts.get(name, (1, {}))
            path = self.config(self.root / name, **{**self.bases[self.base(name)], **changes})
            with pytest.MonkeyPatch.context() as patch:
                # Not the usual compiler, whose code for CPUs takes long.
                patch.setenv("TORCH_COMPILE_BACKEND", "aot_eager")
                started = start(path, ranks, module=self.module)
                # Some are compiled.
                self.said[name] = finish(started, limit_s=4 * START_LIMIT_S)
        return self.root / name

    def assert_same(
        self, name: str, losses: float = 2e-5, norms: float = 1e-4, weights: float = 2e-4
    ) -> None:
        """A layout has the curve and the exports of its base, and a loss that falls."""
        own, wanted = self[name], self[self.base(name)]
        assert_same_curve(own, wanted, losses, norms)
        assert metrics(own)[-1]["loss"] < metrics(own)[0]["loss"]
        for part in ("export", "export/adapter"):
            found, expected = tensors(own / part), tensors(wanted / part)
            torch.testing.assert_close(found, expected, rtol=0, atol=weights)


def progress(folder: Path) -> dict[str, Any]:
    """The content of progress.json."""
    return json.loads((folder / "progress.json").read_text())


def reopen(folder: Path) -> None:
    """Make a finished run one that was cut off before it said so."""
    (folder / "progress.json").write_text(json.dumps(progress(folder) | {"state": "running"}))


def error_record(folder: Path, rank: int = 0, attempt: int = 0) -> dict[str, Any]:
    """What a rank left when it failed."""
    return json.loads((folder / "logs" / str(attempt) / f"error_rank_{rank}.json").read_text())
