"""Engines: whose a config is, what it starts, and how its run is followed."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from launcher.check import Context, findings
from launcher.do import resume
from launcher.errors import RecipeFault
from launcher.recipe import load as recipes
from launcher.run.directory import Run
from launcher.site import Site
from launcher.slurm import executors
from plugins.engines import schema
from plugins.engines.launcher import check
from plugins.engines.launcher.engines import ENGINES
from plugins.engines.launcher.entries import ENTRIES
from plugins.engines.slurm import engine
from runspec import files
from runspec.engines import Records
from slurm import records
from slurm.watchdog import Watch
from tests.launcher.recipe.test_commands import RESOURCES, planned
from tests.launcher.recipe.test_other_tools import LITGPT, refusal, written

TRL = {"model_name_or_path": "org/m", "dataset_name": "org/d"}
AUTOMODEL = {"model": {}, "step_scheduler": {}, "dataset": {}}
LLAMAFACTORY = {"model_name_or_path": "org/m", "stage": "sft", "dataset": "mine"}
# An engine's entry, what its ranks' command holds, and its own config.
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "trl": ("trl:sft", "hf_trainer", {**TRL, "max_steps": 60}),
    "llamafactory": ("llamafactory:theirs.yaml", "hf_trainer", {**LLAMAFACTORY, "max_steps": 60}),
    "axolotl": (
        "axolotl:theirs.yaml",
        "hf_trainer",
        {"base_model": "org/m", "datasets": [{"path": "org/d"}], "max_steps": 60},
    ),
    "litgpt": ("litgpt:finetune_full", "litgpt", {**LITGPT, "train": {"max_steps": 60}}),
    "deepspeed": ("deepspeed:train.py", "train.py", {"train_micro_batch_size_per_gpu": 8}),
    "automodel": (
        "automodel:theirs.yaml",
        "nemo_automodel",
        {**AUTOMODEL, "step_scheduler": {"max_steps": 60}, "checkpoint": {}},
    ),
    "torchtitan": ("torchtitan:llama3/debug", "torchtitan", {"training": {"steps": 60}}),
}


@pytest.mark.parametrize(
    ("content", "program", "others"),
    [
        (TRL, "trl:dpo", "sft dpo kto reward grpo rloo distillation"),
        (LITGPT, "litgpt:finetune_lora", "finetune_full finetune_lora finetune_adapter pretrain"),
    ],
)
def test_the_program_of_a_config_is_asked_for(tmp_path, content, program, others):
    file, engine = written(tmp_path / "theirs.yaml", content), program.partition(":")[0]
    known = " or ".join(f"entry={engine}:{name}" for name in others.split())
    assert refusal(file).endswith(f": add {known}")
    named = refusal(written(tmp_path / "mine.yaml", {"entry": f"{engine}:{file.name}"}))
    assert named.endswith(", with config: theirs.yaml in the recipe")
    loaded = recipes.load(str(file), [f"entry={program}"])
    assert loaded.entry_name == program
    assert loaded.config["parameters"].items() >= content.items()


def test_a_config_starts_in_the_folder_from_which_its_paths_count(tmp_path, monkeypatch):
    checkout = tmp_path / "LLaMA-Factory"
    deep = {**LLAMAFACTORY, "deepspeed": "examples/deepspeed/ds.json", "output_dir": "saves/x.json"}
    file = written(checkout / "examples" / "train_lora" / "lora.yaml", deep)
    written(checkout / "data" / "dataset_info.json", "{}")

    def found(*overrides: str) -> tuple[Path | None, list[str]]:
        recipe = recipes.load(str(file), overrides)
        context = Context(recipe, Site(shared_root=str(tmp_path)), executor=executors.choose(True))
        lines = [each.line for each in findings(check.SUBJECT, check.config, context)]
        return recipe.work_dir, [line for line in lines if "starts" in line]

    folder, (fault,) = found()
    assert folder == checkout
    assert f"deepspeed: examples/deepspeed/ds.json is not in {checkout}, where" in fault
    assert fault.endswith("work_dir=FOLDER")
    assert len(found(f"work_dir={tmp_path}")[1]) == 2
    written(checkout / "examples" / "deepspeed" / "ds.json", "{}")
    assert found() == (checkout, [])
    # A config elsewhere, and a shell in the checkout; typed, the folder counts from there.
    file = written(tmp_path / "elsewhere" / "lora.yaml", deep)
    monkeypatch.chdir(checkout)
    assert found() == (checkout, [])
    monkeypatch.chdir(tmp_path)
    assert found()[0] == file.parent
    assert found("work_dir=LLaMA-Factory") == (checkout, [])
    # Files of a dataset of the hub, and what is written, are not looked for.
    hub = {"base_model": "a/b", "datasets": [{"path": "c/d", "data_files": "x.json"}]}
    file = written(tmp_path / "ax.yaml", {**hub, "dataset_prepared_path": "./made", "fsdp": None})
    assert recipes.load(str(file)).work_dir == tmp_path
    written_there = {"checkpoint": {"checkpoint_dir": "./made"}, "wandb": {"dir": "./wandb"}}
    file = written(tmp_path / "nemo.yaml", {**AUTOMODEL, **written_there})
    assert found() == (tmp_path, [])


@pytest.mark.parametrize("name", CASES)
def test_each_engine_is_started_with_its_own_config_in_the_runs_folders(tmp_path, name):
    entry, program, parameters = CASES[name]
    prefix, keys = entry.partition(":")[0], {"entry": entry, "parameters": parameters}
    if entry.endswith(".yaml"):
        (tmp_path / "theirs.yaml").write_text(yaml.safe_dump(keys.pop("parameters")))
    made = planned(tmp_path, {**keys, "resources": RESOURCES})
    records = Records.of(json.loads(made.contents[files.ENGINE]))
    assert records and made.recipe.max_retries == 3
    if name != "deepspeed":
        total = ENGINES[f"{prefix}:"].total
        assert records.total_steps == (60 if total else None)
        given = yaml.safe_load(made.contents[files.TRAIN])
        assert str(made.path) in json.dumps(given), "its folders are the run's"
    assert "export STOP_SIGNAL=TERM" in made.script or not records.stop
    assert "slurm/rank.sh" in made.script and program in made.script


def test_an_override_reaches_the_engines_file_and_an_unknown_one_does_not(tmp_path):
    theirs = "model_name_or_path: a\ndataset_name: b\npacking: true\nmax_steps: 5\n"
    (tmp_path / "sft.yaml").write_text(theirs)
    content = {"entry": "trl:sft", "config": "sft.yaml", "resources": RESOURCES}
    made = planned(tmp_path, content, "parameters.max_steps=7")
    assert yaml.safe_load(made.contents[files.TRAIN])["max_steps"] == 7
    with pytest.raises(RecipeFault, match=r"did you mean parameters\.max_steps"):
        planned(tmp_path, content, "parameters.max_step=7")
    # What the run holds is not read again, whatever becomes of the file.
    (tmp_path / "sft.yaml").unlink()
    again = yaml.safe_load(made.contents[files.RECIPE])
    again.pop("output_dir")
    assert planned(tmp_path, again).contents[files.TRAIN].count("max_steps: 7") == 1
    with pytest.raises(RecipeFault, match=r"there is no config file .*sft\.yaml"):
        planned(tmp_path, content)
    # A file whose keys do not say whose it is, with its entry before it.
    (tmp_path / "own.yaml").write_text("max_steps: 5\nbeta: 0.1\n")
    assert recipes.load(f"trl:{tmp_path}/own.yaml", ["entry=trl:dpo"]).entry_name == "trl:dpo"
    with pytest.raises(RecipeFault, match="trl:sft is an entry, and no file"):
        recipes.load("trl:sft")
    with pytest.raises(RecipeFault, match=r"TRL has no 'sfd' \(did you mean sft\?\)"):
        planned(tmp_path, {"entry": "trl:sfd", "resources": RESOURCES})


def test_dependencies_of_a_recipe_are_built_beside_the_engines_own(tmp_path):
    def built(entry, **environment):
        content = {"entry": entry, "resources": RESOURCES, "environment": environment}
        return planned(tmp_path, {**content, "parameters": {}}).recipe.environment

    assert built("trl:sft", dependencies=["peft"]).dependencies == ("trl==1.16.0", "peft")
    named = built("trl:sft", dependencies=["trl[peft]>=1.15"])
    assert named.dependencies == ("trl[peft]>=1.15",) and named.pins
    alone = built("litgpt:pretrain", dependencies=["einops"])
    assert alone.dependencies[::4] == ("litgpt==0.5.13", "einops") and not alone.pins
    assert built("trl:sft", python="/trl/bin/python").dependencies == ()
    # It names no torch and needs older datasets than the kit's; pins alone is no environment.
    for pins in ({}, {"pins": False}):
        titan = built("torchtitan:llama3/llama3_8b", **pins)
        assert titan.dependencies == ("torchtitan==0.3.0", "torch") and not titan.pins


@pytest.mark.parametrize(
    ("ranks", "tensor", "batch", "fault"),
    [
        (1, 1, 64, None),
        (8, 2, 64, None),
        (3, 1, 64, "global_batch_size=64 is no multiple of local_batch_size=8 times 3"),
        (8, 1, 8, "times 8 data-parallel ranks, 64"),
        (6, 4, 64, "6 ranks are no multiple of tp_size * pp_size * cp_size = 4"),
    ],
)
def test_ranks_that_automodel_would_refuse(ranks, tensor, batch, fault):
    scheduler = {"global_batch_size": batch, "local_batch_size": 8}
    given = {"distributed": {"tp_size": tensor}, "step_scheduler": scheduler}
    found = ENGINES["automodel:"].layout_fault({"parameters": given}, ranks)
    assert found is None if fault is None else fault in found


@pytest.mark.parametrize(
    ("stop_asked", "step", "state"),
    [
        (False, 20, "finished"),
        (True, 20, "finished"),
        (False, 12, "stopped"),
        (True, 12, "stopped"),
    ],
)
def test_exit_status_0_is_not_finished(tmp_path, stop_asked, step, state):
    records = ENGINES["automodel:"].recorded({"parameters": {"step_scheduler": {"max_steps": 20}}})
    files.write_json(tmp_path / files.ENGINE, records.as_json())
    folder = tmp_path / files.CHECKPOINTS
    for number, left in ((4, False), (9, True)):
        (folder / f"epoch_0_step_{number}").mkdir(parents=True)
        (folder / f"epoch_0_step_{number}" / "model").touch()
        if left:
            (folder / f"epoch_0_step_{number}" / ".incomplete").touch()
    # Steps 6 to 8 were trained twice; the file has both.
    numbers = [*range(8), *range(5, step)]
    text = "".join(json.dumps({"step": n, "loss": 3 - n / 20}) + "\n" for n in numbers)
    (folder / "training.jsonl").write_text(text)
    engine.settle(tmp_path, 1, 0, stop_asked)
    progress = files.read_json(tmp_path / files.PROGRESS)
    assert (progress["state"], progress["step"], progress["checkpoint_step"]) == (state, step, 5)
    rows = files.read_json_lines(tmp_path / files.METRICS)
    assert [row["step"] for row in rows] == list(range(1, step + 1))
    engine.set_aside(tmp_path)
    assert files.checkpoint_steps(tmp_path) == [5]
    assert not (folder / "epoch_0_step_9").exists()


@pytest.mark.parametrize("name", ["torchtitan", "torchtune"])
def test_a_log_in_text_is_read(tmp_path, name):
    records = ENTRIES[f"{name}:"].records({"parameters": {"training": {"steps": 4}}})
    files.write_json(tmp_path / files.ENGINE, records.as_json())
    for attempt, steps in enumerate(((1, 2, 3), (3, 4))):
        logs = tmp_path / files.LOGS / str(attempt)
        logs.mkdir(parents=True)
        titan = (
            f"[titan] \x1b[31mstep: {n:2}  \x1b[32mloss: {8 - n:8.5f}  \x1b[38mgrad_norm:  1.5  "
            f"\x1b[36mmemory:  1.25GiB(1.57%)  \x1b[34mtps: 1,234  tflops: 1.0\n"
            for n in steps
        )
        # What torchtune's DiskLogger writes, in two files of its own naming.
        tune = (
            f"Step {n} | loss:{8.0 - n} lr:1e-05 tokens_per_second_per_gpu:1234.0 grad_norm:1.5 \n"
            for n in steps
        )
        (logs / "rank_0.log").write_text("".join(titan))
        (tmp_path / files.LOGS / f"log_{attempt}.txt").write_text("".join(tune))
    engine.follow(tmp_path, 1)
    rows = files.read_json_lines(tmp_path / files.METRICS)
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert rows[-1]["loss"] == 4.0 and rows[-1]["tokens_per_second_per_gpu"] == 1234.0
    assert rows[-1]["grad_norm"] == 1.5


def test_wrong_keys_of_blocks_with_targets_are_named():
    """NeMo Automodel's configs; the targets are of the standard library."""
    content = {
        "a": {"_target_": "json.dumps", "obj": 1, "indnt": 2},
        "b": {"_target_": "difflib.SequenceMatcher", "autojnk": 1, "isjunk": {"_target_": "x.y"}},
        "c": {"_target_": "dataclasses.field", "defaul": 1},
        "d": {"_target_": "none.of.these", "any": 1},
        "e": {"any": {"_target_": "difflib.SequenceMatcher.set_seq1", "b": 1}},
    }
    assert schema.unknown(content, schema.of_target(content)) == {
        "a.indnt": "a.indent",
        "b.autojnk": "b.autojunk",
        "c.defaul": "c.default",
        "e.any.b": "",
    }
    with pytest.raises(schema.Absent, match=r"json has no 'dump2' \(did you mean dump\?\)"):
        schema.of_target({"_target_": "json.dump2"})


def test_speed_and_heartbeat_follow_from_what_is_seen(tmp_path, monkeypatch):
    """LitGPT's figures have no times; its ranks write no heartbeat."""
    content = {"entry": "litgpt:finetune_full", "parameters": {"train": {"max_steps": 6}}}
    parts = {"global_batch_size": 4, "micro_batch_size": 4, **content["parameters"]["train"]}
    records = ENGINES["litgpt:"].recorded({**content, "parameters": {"train": parts}})
    files.write_json(tmp_path / files.ENGINE, records.as_json())
    files.write_json(tmp_path / files.STATUS, {"started": 100.0})
    table = tmp_path / "checkpoints/logs/csv/version_0/metrics.csv"
    table.parent.mkdir(parents=True)
    (tmp_path / files.LOGS / "1").mkdir(parents=True)
    monkeypatch.setenv("NODES", "2")
    beat = engine.Beat(tmp_path, 1)
    beats = []
    for step in range(7):
        monkeypatch.setattr(engine.time, "time", lambda now=100.0 + 2 * step: now)
        lines = (f"{n},{3 - n / 10},{n * 80}\n" for n in range(1, step + 1))
        table.write_text("step,loss,total_tokens\n" + "".join(lines))
        engine.follow(tmp_path, 1)
        beats.append(beat.look(2.0 * step))
    rows = files.read_json_lines(tmp_path / files.METRICS)
    assert [row["time"] for row in rows] == [102.0, 104.0, 106.0, 108.0, 110.0, 112.0]
    assert {row["step_time_s"] for row in rows[1:]} == {2.0}
    assert rows[-1]["tokens_per_second_per_gpu"] == 20.0
    assert files.read_json(tmp_path / files.PROGRESS)["tokens_per_second_per_gpu"] == 20.0
    assert [each["phase"] for each in beats] == ["starting"] * 3 + ["training"] * 3 + ["ending"]
    watch = Watch(timeout_s=5, stop_s=100)
    assert watch.look(beats[4], False, 0) is None
    assert "no step for 10 s after step 4" in str(watch.look(beats[4], False, 10))
    assert beats[4]["median_step_s"] == 2.0
    # Its checkpoint grows: that is a sign of life.
    (tmp_path / files.CHECKPOINTS / "step-000005").mkdir()
    assert beat.look(20.0) != beats[6]


def test_a_resumed_run_counts_paths_from_the_recipe_it_was_made_of(tmp_path):
    made = planned(tmp_path, {"entry": "trl:sft", "parameters": {}, "resources": RESOURCES})
    run = Run(tmp_path / "run")
    run.path.mkdir()
    (run.path / files.RECIPE).write_text(made.contents[files.RECIPE])
    run.write(files.SUBMISSION, {"recipe": "mine", "recipe_file": str(tmp_path / "mine.yaml")})
    changes = resume.Changes(Site(shared_root=str(tmp_path)))
    again = resume._recipe(run, changes, executors.choose(local=True))
    assert again.work_dir == made.recipe.work_dir == tmp_path


def test_a_file_that_cannot_be_read_does_not_keep_the_end_from_its_record(
    tmp_path, monkeypatch, capsys
):
    """slurm/records.py asks again, and Slurm may give the job only seconds."""
    monkeypatch.setattr(engine, "WAIT_S", 0.1)
    monkeypatch.setenv("RUN_DIR", str(tmp_path))
    monkeypatch.setenv("STORAGE_WAIT_S", "5")
    (tmp_path / files.ENGINE).symlink_to(files.ENGINE)
    with pytest.raises(OSError):
        engine.settle(tmp_path, 0, 1, False)
    assert "trying again for 0 s" in capsys.readouterr().err


def test_a_damaged_engine_json_ends_the_run_with_its_name(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "11")
    (tmp_path / "logs").mkdir()
    (tmp_path / files.ENGINE).write_text("{")
    with pytest.raises(records.Follows, match=r"engine.json does not hold JSON"):
        records.begin(tmp_path, ["n1"], prepare=engine.Follower(tmp_path).prepare)
    assert files.read_object(tmp_path / files.STATUS)["state"] == "FAILED"


@pytest.mark.long
@pytest.mark.parametrize("kind", ["apptainer", "venv"])
def test_an_engine_is_asked_for_its_keys_in_it(kind, injected, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if kind == "apptainer" and (os.geteuid() or not shutil.which("gcc")):
        pytest.skip("the tests' Apptainer needs root and gcc")
    own = {
        "apptainer": "image: PLACE/image, python: PREFIX/bin/python, "
        "setup: ['PATH=PLACE/bin:$PATH'], binds: ['/usr:/usr:ro', OWN, PREFIX, REPO]",
        "venv": "setup: ['module() { export LOADEDMODULES=own PATH=PREFIX/bin:$PATH; }'], "
        "modules: [own], python: python",
    }
    block = f"{{kind: {kind}, {own[kind]}, "
    # TRL's script alone is a stand-in.
    block += "prefix: [env, 'PYTHONPATH=REPO/tests/faults/standins:REPO']}"
    for name, value in injected.items():
        block = block.replace(name, value)
    path = tmp_path / "mine.yaml"
    path.write_text("model_name_or_path: m\ndataset_name: d\nlearning_rte: 1\n")
    asked = recipes.load(f"trl:{path}", ["entry=trl:sft", f"+environment={block}"])
    context = Context(asked, Site(shared_root=str(tmp_path)), executors.choose(True))
    *_, found = findings(check.SUBJECT, check.config, context)
    assert found.state == "failed", found.line
    assert "TRL has no key 'learning_rte' (did you mean learning_rate?)" in found.line
