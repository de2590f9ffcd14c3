"""What trainer.check finds in a config without training: components, arguments, misfits."""

import json

import pytest
import torch
import yaml
from torch.distributed.tensor import Shard, distribute_tensor

from launcher.recipe import load as recipes
from launcher.recipe import torchtune
from runspec.keys.sft import SftConfig
from runspec.layout import NEED_WHOLE_PARAMETERS
from tests.trainer.forks import run
from tests.trainer.runs import lora_model, write_config
from tests.trainer.test_config import STOCK
from trainer import check
from trainer.config import read_yaml
from trainer.methods.base import named
from trainer.methods.sft import SupervisedFineTuning
from trainer.parallel.fake import fake_world


@pytest.fixture
def content(tmp_path, model_folder, dataset):
    return read_yaml(write_config(tmp_path / "run", model_folder, dataset))


# Building these on the meta device takes a second or more.
LARGE = {
    *("deepseek_v3_qlora", "qwen3_5_27b_lora", "qwen3_5_35b_a3b_lora", "gemma4_31b_lora"),
    *("gpt_oss_120b_lora", "llama4_scout_lora", "glm4_5_air_lora", "qwen3_30b_a3b_full"),
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.long] * (n in LARGE)) for n in recipes.names()],
)
def test_every_recipe_of_the_catalogue_is_sound(name, tmp_path):
    """Without the models' files: each component is there, and the model can be built and split."""
    loaded = recipes.load(name)
    content = loaded.train_config(tmp_path, str(tmp_path / "run"))
    assert check.faults(content, named(loaded.entry.method.objective)) == []


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (
            {"optimizer": {"lrr": 1}},
            "optimizer: torch.optim.AdamW does not take this: got",
        ),
        ({"optimizer": {"Lr": 1}}, "got an unexpected keyword argument 'Lr' (did you mean lr?)"),
        ({"optimizer": {"_component_": "torch.optim.AdamWW"}}, "did you mean AdamW?"),
        ({"model": {"num_layers": 3}}, "model.num_layers: is an argument of no model that a"),
        ({"model": {"lora_alpha": 8}}, "model.lora_alpha: needs model.lora_rank"),
        ({"checkpointer": {"model_type": "GEMMA2"}}, "GEMMA2 is not of the folder's llama model"),
        (
            {"model": {"_component_": "torchtune.models.llama3.llama3_8b"}},
            "the kit's trainer has no torchtune.models.llama3.llama3_8b; torchtune's own programs",
        ),
        (
            {"dataset": {"_component_": "torchtune.datasets.chat_datset"}},
            "mean torchtune.datasets.chat_dataset?",
        ),
        ({"tokenizer": {"max_seq_len": 4096}}, "4096 is more than the model's 512; set tokenizer."),
        ({"loss": {"_component_": "torch.nn.MSELoss"}}, "loss: MSELoss is not supported"),
        ({"tensor_parallel_dim": 3}, "tensor_parallel_dim 3 does not divide"),
        ({"lr_scheduler": {"_component_": "trainer.schedule.nothing"}}, "trainer.schedule has no"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_fault_is_found_before_a_rank_starts(content, change, told):
    for key, value in change.items():
        content[key] = {**content.get(key, {}), **value} if isinstance(value, dict) else value
    assert any(told in fault for fault in check.faults(content, SupervisedFineTuning)), (
        check.faults(content, SupervisedFineTuning)
    )


@pytest.mark.parametrize(
    ("optimizer", "shard", "lora", "told"),
    [
        ("Adafactor", 2, False, "Adafactor cannot update parameters that are sharded; use"),
        ("Adafactor", 1, False, None),
        ("Rprop", 2, True, "Rprop cannot update parameters that are sharded; use"),
        ("Muon", 1, False, "optimizer: torch.optim.Muon refused its arguments"),
        ("Muon", 2, True, None),
        ("LBFGS", 1, True, "missing 1 required positional argument: 'closure'"),
    ],
)
def test_an_optimizer_is_tried_in_its_layout(content, optimizer, shard, lora, told):
    content["optimizer"] = {"_component_": f"torch.optim.{optimizer}", "lr": 1e-3}
    content["data_parallel_shard_dim"] = shard
    if lora:
        content["model"] = lora_model()
    found = check.faults(content, SupervisedFineTuning)
    assert found == [] if told is None else told in found[0] and len(found) == 1


def test_the_optimizers_that_need_whole_parameters_are_known():
    """The list of the rules against torch: on a parameter of two ranks, and on a whole one."""
    failing: dict[bool, set[str]] = {True: set(), False: set()}
    with fake_world({}, 2) as world:
        for name in set(torch.optim.__all__) - {"Optimizer", "lr_scheduler", "swa_utils"}:
            for sharded in (True, False):
                weight = torch.zeros(16, 16)
                if sharded:
                    weight = distribute_tensor(weight, world.mesh(True), [Shard(0)])
                parameter = torch.nn.Parameter(weight)
                parameter.grad = torch.zeros_like(parameter)
                try:
                    getattr(torch.optim, name)([parameter], lr=1e-3).step()
                except Exception:
                    failing[sharded].add(f"torch.optim.{name}")
    assert failing[True] - failing[False] == set(NEED_WHOLE_PARAMETERS)


def test_a_sound_config_has_no_fault(content):
    assert check.faults(content, SupervisedFineTuning) == []


def test_a_model_that_is_not_whole_is_told(content, tmp_path):
    content["checkpointer"]["checkpoint_dir"] = str(tmp_path)
    (fault, *_) = check.faults(content, SupervisedFineTuning)
    assert "has neither model.safetensors nor" in fault


def test_the_command_answers_in_json(content, tmp_path):
    path = tmp_path / "train.yaml"
    content["bathc_size"] = 3
    path.write_text(yaml.safe_dump(content))
    done = run("trainer.check", path, "--objective", SftConfig.objective)
    (fault,) = json.loads(done.stdout)["faults"]
    assert "did you mean batch_size" in fault and done.returncode == 0


@pytest.mark.long
def test_the_components_of_every_stock_config_exist():
    """In the kit's spelling; or lack a package, and say which."""
    lacking = []
    for path in STOCK:
        content = read_yaml(path)
        torchtune.normalise(content)
        lacking += check.component_faults(content)
    assert all(fault.endswith("'bitsandbytes'") for fault in lacking), lacking
