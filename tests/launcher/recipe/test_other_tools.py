"""Files of other tools: whose a file is, what it starts, and one line that leads on."""

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from launcher.check import Context, findings
from launcher.check.recipe import script
from launcher.cli import cookbook
from launcher.errors import UsageFault
from launcher.recipe import entries, torchtune
from launcher.recipe import load as recipes
from launcher.site import Site
from launcher.slurm import executors

LITGPT = {"checkpoint_dir": "org/m", "train": {"epochs": 1}}

# Configs of torchtune whose script is none of the kit's: the script, and the kit's own method.
OTHER_SCRIPTS = {
    "llama3_1/8B_full_dpo": ("full_dpo_distributed", "dpo"),
    "llama3_1/8B_lora_dpo": ("lora_dpo_distributed", "dpo"),
    "llama3_2/8B_to_1B_KD_lora_distributed": ("knowledge_distillation_distributed", "distill"),
    "llama3/8B_qat_lora": ("qat_lora_finetune_distributed", ""),
    "mistral/7B_full_ppo_low_memory": ("ppo_full_finetune_single_device", ""),
}


def written(path: Path, content: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    return path


def refusal(file: Path | str, *overrides: str) -> str:
    with pytest.raises(UsageFault) as caught:
        recipes.load(str(file), overrides)
    (fault,) = caught.value.faults
    return fault


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ({"compute_environment": "LOCAL_MACHINE", "num_processes": 8}, "of accelerate launch"),
        ({"model": "org/m", "train_dataset": "x"}, "is no recipe, and not known as a config of "),
    ],
)
def test_a_file_of_nobody_is_told_in_one_line(tmp_path, content, told):
    assert told in refusal(written(tmp_path / "x.yaml", content))


VALUES: tuple[Any, ...] = (None, "text", 3, [None], {})


@pytest.mark.parametrize(
    "base",
    [
        {"extends": "lora"},
        {"entry": "trl:sft"},
        {"entry": "litgpt:finetune_full", "parameters": {}},
        {**LITGPT, "lora_r": 1},
        {"base_model": "a/b", "datasets": [{"path": "c/d"}]},
        {"model": {}, "step_scheduler": {}, "distributed": {}},
    ],
    ids=lambda base: next(iter(base)),
)
def test_no_value_of_the_wrong_kind_is_a_traceback(tmp_path, base):
    """In place of a block, too: model: NAME, or a block without a line."""
    names = {name.partition(".")[0] for name in entries.of({}).keys} | base.keys()
    inner = ("model._component_", "model.adapter") if "extends" in base else ()
    for name in [*sorted(names - {"extends", "entry"}), *inner]:
        for value in VALUES:
            above, _, last = name.rpartition(".")
            given = {above: {last: value}} if above else {name: value}
            with suppress(UsageFault):
                made = recipes.load(str(written(tmp_path / "mine.yaml", {**base, **given})))
                made.train_config(tmp_path, "run")
                assert made.secrets is not made.records and made.environment is not made.notes


# Copies of torchtune's configs, as tune cp makes them --------------------------------------------


@pytest.mark.parametrize("name", ["llama3_1/8B_lora", "llama3_2_vision/11B_full", *OTHER_SCRIPTS])
def test_a_copy_starts_what_the_stock_config_starts(tmp_path, name):
    text = torchtune.configs()[name].read_text(encoding="utf-8")
    one = {"nodes": 1, "gpus_per_node": 1}
    # torchtune's configs have this key since its last release.
    copy = recipes.load(str(written(tmp_path / "my.yaml", f"{text}\nlog_level: INFO\n")), (), one)
    assert copy.entry_name == recipes.load(name, (), one).entry_name
    if name in OTHER_SCRIPTS:
        script, own = OTHER_SCRIPTS[name]
        bare = "".join(line for line in text.splitlines(True) if not line.startswith("#"))
        fault = refusal(written(tmp_path / "bare.yaml", bare))
        assert f"entry=torchtune:{script}" in fault
        assert fault.endswith(f"the kit's own method is entry: {own}") == bool(own)
        assert any(f"entry: {own}" in line for line in copy.notes) == bool(own)


@pytest.mark.parametrize(
    ("header", "told"),
    [
        ("qat_single_device", "add entry=torchtune:qat_distributed or entry=torchtune:qat_lora"),
        ("dev/grpo_full_finetune_distributed", "the kit's own method is entry: grpo"),
        ("no_such_script", "does not have: tune ls shows what it has"),
    ],
)
def test_a_config_of_a_later_torchtune_leads_on(tmp_path, header, told):
    text = f"# tune run {header} --config x\nmodel: {{_component_: torchtune.models.a.b}}\n"
    assert told in refusal(written(tmp_path / "my.yaml", f"{text}batch_size: 1\n"))


def test_a_family_that_the_installed_torchtune_lacks_is_the_kits_with_a_model_of_the_hub(tmp_path):
    text = torchtune.configs()["llama3_1/8B_lora"].read_text(encoding="utf-8")
    later = text.replace("torchtune.models.llama3_1.lora_llama3_1_8b", "torchtune.models.new4.x")
    file = str(written(tmp_path / "my.yaml", later))
    loaded = recipes.load(file, (), {"nodes": 1}, model="Qwen/Qwen3-8B")
    assert loaded.entry_name == "sft" and loaded.config["model"]["_component_"] == "transformers"


# Batch scripts of the user's own -----------------------------------------------------------------

PASTED = """\
#!/bin/bash
#SBATCH -N 2   # two
srun -n 16 --cpus-per-task=4 \\
  python train.py --lr 1
"""


def told(folder: Path, **content: Any) -> list[str]:
    """The faults at load, else those of the check of the script."""
    file = written(folder / "mine.yaml", {"resources": {"nodes": 2}, **content})
    try:
        recipe = recipes.load(str(file))
    except UsageFault as error:
        return error.faults
    context = Context(recipe, Site(shared_root=str(folder)), executor=executors.choose(True))
    look = findings("script", script, context)
    return [each.line for each in look if each.state == "failed"]


@pytest.mark.parametrize(
    "content",
    [
        {"entry": "command", "command": PASTED},
        {"entry": "command:bash job.slurm"},
        {"entry": "command", "command": "cd x; ./job.slurm"},
        {"entry": "script:job.slurm"},
    ],
)
def test_what_a_batch_script_would_do_inside_the_job_is_told_before_the_queue(tmp_path, content):
    written(tmp_path / "job.slurm", PASTED)
    faults = "; ".join(told(tmp_path, **content))
    assert "its #SBATCH lines are not read: write them as resources: in the recipe" in faults
    assert "srun inside the job's own step waits without end: leave srun and its" in faults
    if content["entry"].startswith("script:"):
        assert "job.slurm is a shell script, and script:job.slurm starts Python: write" in faults


@pytest.mark.parametrize(
    ("lines", "fault"),
    [
        ("srun --overlap -n 1 nvidia-smi &\npython train.py", ""),
        ("# srun is the kit's\necho srun", ""),
        ("torchrun --nnodes=2 train.py", ""),
        ("set -e; exec srun ./a.out 3", "leave srun and its options out"),
        ("if true; then sbatch next.sh; fi", "sbatch would start another job"),
    ],
)
def test_only_what_cannot_run_inside_the_job_is_refused(tmp_path, lines, fault):
    faults = told(tmp_path, entry="command", command=lines)
    assert [fault in each for each in faults] == [True] * bool(fault), faults


# Files in place of a recipe ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("typed", "line"),
    [
        ("submit job.slurm", "job.slurm is a batch script: write a recipe in its place (docs"),
        ("submit train.py", "train.py is started by a recipe: echo 'entry: script:train.py'"),
        ("check --recipe src/train.py", "echo 'entry: script:src/train.py' > my_train.yaml"),
        ("submit my.jsonl", "cookbook start my.jsonl MODEL"),
    ],
)
def test_a_file_that_is_no_recipe_gets_one_line_that_leads_on(tmp_path, monkeypatch, typed, line):
    monkeypatch.chdir(tmp_path)
    written(tmp_path / "job.slurm", PASTED)
    done = CliRunner().invoke(cookbook, typed.split())
    assert isinstance(done.exception, UsageFault) and done.exception.exit_code == 2, done
    (fault,) = done.exception.faults
    assert line in fault
