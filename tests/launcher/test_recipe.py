"""Recipes: the catalogue loads, overrides do what they say, and every fault is named at once."""

from __future__ import annotations

import collections
import copy
from pathlib import Path

import pytest

from launcher import checks, preflight, render, stock
from launcher import recipe as recipes
from launcher.cluster import Cluster
from launcher.errors import RecipeFault

MODELS = ["llama1b", "llama3b", "llama8b", "llama70b", "qwen7b", "qwen32b", "qwen72b"]
MODELS += ["mistral7b", "gemma9b", "phi4"]
SHIPPED = {f"{model}_{method}" for model in MODELS for method in ("full", "lora", "qlora")} | {
    "demo",
    "qwen0_5b_full",
    "qwen0_5b_lora",
}


def written(
    folder: Path, change: dict | None = None, without: str = "", text: str | None = None
) -> str:
    """A recipe file of our own, made from a shipped one."""
    from launcher import yamlfile

    config = copy.deepcopy(recipes.load("llama1b_lora").config)
    config.update(change or {})
    config.pop(without, None)
    path = folder / "mine.yaml"
    path.write_text(text if text is not None else yamlfile.dump(config))
    return str(path)


def faults_of(*args, **kwargs) -> list[str]:
    with pytest.raises(RecipeFault) as fault:
        recipes.load(*args, **kwargs)
    assert all("\n" not in each for each in fault.value.faults)
    return fault.value.faults


def test_the_catalogue_is_what_is_promised_and_loads():
    assert set(recipes.names()) == SHIPPED
    for name in recipes.names():
        recipe = recipes.load(name)
        assert recipe.description, name
        assert name.endswith(recipe.method) or name == "demo"
        header = recipe.path.read_text().partition("description:")[0]
        assert f"cookbook submit --recipe {name}" in header, "the header tells how to run it"
        assert name == "demo" or f"cookbook download {name}" in header


def test_the_trainers_list_of_keys_is_the_launchers():
    from trainer.config import TOP_LEVEL_KEYS

    assert sorted(recipes.TRAINER_KEYS) == sorted(TOP_LEVEL_KEYS)


def test_overrides_set_add_and_remove():
    recipe = recipes.load(
        "llama8b_lora",
        [
            "optimizer.lr=1e-5",
            "+model.use_dora=true",
            "+model.quantize_base=true",
            "~lr_scheduler",
            "resources.nodes=4",
            "dataset.packed=true",
            "resources.time=90",
        ],
    )
    assert recipe.config["optimizer"]["lr"] == 1e-5
    assert recipe.method == "qdora"
    assert "lr_scheduler" not in recipe.config
    assert recipe.resources.nodes == 4
    assert recipe.resources.time == "90" and recipe.resources.time_s == 5400


def test_options_come_before_overrides_and_the_file():
    recipe = recipes.load("llama8b_lora", ["resources.nodes=4"], {"nodes": 3, "time": None})
    assert (recipe.resources.nodes, recipe.resources.time) == (3, "08:00:00")


def test_interpolations_are_filled_in_and_the_trainer_sees_none_of_our_keys():
    recipe = recipes.load("llama8b_lora")
    config = recipe.train_config(Path("/shared"), "/shared/runs/r")
    assert config["checkpointer"]["checkpoint_dir"] == "/shared/models/Llama-3.1-8B-Instruct"
    assert config["tokenizer"]["path"] == "/shared/models/Llama-3.1-8B-Instruct"
    assert config["output_dir"] == config["checkpointer"]["output_dir"] == "/shared/runs/r"
    assert not set(config) & set(recipes.LAUNCHER_KEYS)


def test_every_config_that_torchtune_ships_is_a_recipe_unchanged():
    """What our trainer does too goes to it, the rest to torchtune's own script."""
    folder = stock.site_packages() / "recipes" / "configs"
    entries = collections.Counter()
    for path in folder.rglob("*.yaml"):
        recipe = recipes.load(str(path), resources={"nodes": 1, "gpus_per_node": 1})
        script = render.job_script(recipe, Cluster(), Path("/shared/runs/r"), "r")
        assert recipe.train_config(Path("/shared"), "/runs/r")["output_dir"] == "/runs/r"
        if recipe.entry == "sft":
            assert "-m trainer.sft" in script
        else:
            name = recipe.entry.removeprefix("torchtune:")
            assert f"/recipes/{name}.py --config" in script
            assert recipe.max_retries == 0, "it would begin again from nothing"
        entries[recipe.entry] += 1
    assert sum(entries.values()) == 156 and entries["sft"] == 105
    assert entries["torchtune:lora_dpo_distributed"] == 2
    assert entries["torchtune:eleuther_eval"] == 10


def test_a_stock_recipe_for_one_gpu_gets_no_more():
    path = stock.site_packages() / "recipes/configs/quantization.yaml"
    recipe = recipes.load(str(path), resources={"nodes": 1, "gpus_per_node": 2})
    with pytest.raises(RecipeFault, match="quantize runs on one GPU, and 1 x 2 are asked for"):
        render.job_script(recipe, Cluster(), Path("/shared/runs/r"), "r")


def test_what_the_environment_lacks_is_found_before_the_queue():
    path = stock.site_packages() / "recipes/configs/eleuther_evaluation.yaml"
    recipe = recipes.load(str(path), resources={"nodes": 1, "gpus_per_node": 1})
    told = "\n".join(preflight.faults(checks.Context(recipe, Cluster(), local=True)))
    assert "imports lm_eval, which the environment lacks" in told
    assert "pip install lm_eval" in told


def test_pickled_weights_are_refused(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    overrides = [
        f"checkpointer.checkpoint_dir={tmp_path}",
        "+checkpointer.checkpoint_files=[pytorch_model.bin]",
    ]
    recipe = recipes.load("llama1b_lora", overrides)
    told = "\n".join(preflight.faults(checks.Context(recipe, Cluster(), local=True)))
    assert "names pytorch_model.bin, a pickle" in told


def test_a_recipe_extends_others_block_by_block(tmp_path):
    (tmp_path / "shared.yaml").write_text(
        "extends: llama1b_lora\nepochs: 7\noptimizer: {lr: 1e-3}\nresources: {nodes: 4}\n"
    )
    mine = tmp_path / "mine.yaml"
    mine.write_text(
        "extends: shared.yaml\nresources: {gpus_per_node: 2}\nlr_scheduler: null\n"
        "loss: {_component_: torchtune.modules.loss.ForwardKLLoss}\n"
    )
    shipped = recipes.load("llama1b_lora").config
    recipe = recipes.load(str(mine), ["optimizer.weight_decay=0.5"])
    assert recipe.config["model"] == shipped["model"]
    assert recipe.config["optimizer"] == shipped["optimizer"] | {"lr": 1e-3, "weight_decay": 0.5}
    assert recipe.config["epochs"] == 7 and recipe.config["lr_scheduler"] is None
    assert (recipe.resources.nodes, recipe.resources.gpus_per_node) == (4, 2)
    assert recipe.config["loss"] == {"_component_": "torchtune.modules.loss.ForwardKLLoss"}
    assert "extends" not in recipe.config


@pytest.mark.parametrize(
    ("extends", "told"),
    [
        ("llama1b_lroa", "did you mean llama1b_lora?"),
        ("mine.yaml", "leads back to itself"),
        ("../nowhere.yaml", "there is no '../nowhere.yaml'"),
        ("../../etc/passwd", "there is no"),
        ("[7]", "there is no 7"),
    ],
)
def test_a_wrong_extends_is_one_fault(tmp_path, extends, told):
    mine = tmp_path / "mine.yaml"
    mine.write_text(f"extends: {extends}\nepochs: 1\n")
    (fault,) = faults_of(str(mine))
    assert told in fault


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("llama70b_lroa", "did you mean llama70b_lora?"),
        ("../../etc/passwd", "may hold only letters"),
        ("-rf", "may hold only letters"),
        ("a\nb", "may hold only letters"),
        ("$(id)", "may hold only letters"),
        ('x"y', "may hold only letters"),
        ("x" * 10_000, "may hold only letters"),
        ("nowhere/mine.yaml", "there is no recipe file"),
    ],
)
def test_a_wrong_name_is_one_fault(name, told):
    (fault,) = faults_of(name)
    assert told in fault


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("optimzer.lr=1", "did you mean optimizer?"),
        ("optimizer.lrr=1", "did you mean lr?"),
        ("~optimizer.lrr", "no key 'optimizer.lrr' (did you mean lr?) to remove"),
        ("~max_steps", "no key 'max_steps'"),
        ("resources.node=2", "did you mean nodes?"),
        ("optimizer.lr=fast", "must be a number"),
        ("dataset.packed=7", "must be true or false"),
        ("resources.nodes=two", "must be a number"),
        ("resources.nodes=0", "a whole number, 1 or more"),
        ("resources.time=soon", "a limit such as"),
        ("resources.mem=lots", "a size such as"),
        ("resources.partition=a b", "a partition's name"),
        ("+resources.account=$(id)", "letters, digits"),
        ("resources.account=x\n#SBATCH --uid=0", "more than one line"),
        ("resources.constraint=--uid=0", "node features"),
        ("model=llama", "a mapping"),
        ("justakey", "cannot read the override"),
        ("=5", "cannot read the override"),
        ("~optimizer.lr=5", "cannot read the override"),
        ("optimizer.lr=[1,", "broken YAML"),
        ("entry=os.system", "is not known"),
        ("batch_size=1.5", "a whole number, 1 or more"),
        ("tokenizer.path=${nowhere.path}", "leads nowhere"),
        ("tokenizer.path=${tokenizer.path}", "refers to itself"),
    ],
)
def test_a_wrong_override_is_one_fault(override, told):
    (fault,) = faults_of("llama1b_lora", [override])
    assert told in fault


def test_all_faults_come_at_once(tmp_path):
    mine = written(
        tmp_path, {"bathc_size": 4, "epochs": "many", "resources": {"nodes": -1, "gpu": 8}}, "loss"
    )
    told = "\n".join(faults_of(mine, ["optimizer.lrr=1"]))
    for part in (
        "bathc_size",
        "did you mean batch_size",
        "epochs must be",
        "resources.nodes must be",
        "resources.gpu'",
        "lacks loss",
        "optimizer.lrr",
    ):
        assert part in told


def test_a_recipe_of_ones_own_may_not_carry_a_hostile_file_name(tmp_path):
    path = tmp_path / "$(id).yaml"
    path.write_text("a: 1")
    (fault,) = faults_of(str(path))
    assert "rename it" in fault


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 5400),
        ("10:30", 630),
        ("04:00:00", 14400),
        ("2-00", 172800),
        ("1-12:30", 131400),
        ("0-0:0:5", 5),
    ],
)
def test_time_limits_are_read_as_slurm_reads_them(text, seconds):
    assert recipes.time_limit_s(text) == seconds
