"""What cookbook eval asks: a run's own validation data, or a file in any form that start takes."""

import csv
import json
from pathlib import Path

import pytest

from launcher import site as sites
from launcher import yamlfile
from launcher.do import submit as submission
from launcher.errors import UsageFault
from launcher.run.directory import Run
from launcher.site import Site
from launcher.slurm import executors
from plugins.evaluate import samples as read_samples
from plugins.evaluate.launcher import check, evaluate
from tests.launcher.kit import finished_run

pytestmark = pytest.mark.usefixtures("fast_trainer")

ROWS = [{"Question": f"How deep are roots of plant {n}?", "Answer": f"{n} cm."} for n in range(10)]


def table(path: Path, rows: list[dict]) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0], delimiter="\t" if path.suffix == ".tsv" else ",")
        writer.writeheader()
        writer.writerows(rows)
    return path


@pytest.fixture
def site(tmp_path: Path, monkeypatch) -> Site:
    monkeypatch.setenv("COOKBOOK_ROOT", str(tmp_path))
    monkeypatch.setenv("COOKBOOK_LOCAL", "1")
    monkeypatch.chdir(tmp_path)
    return sites.load(None)


@pytest.fixture
def run(site: Site, tmp_path: Path) -> Run:
    """Trained on nine questions of a table, and validated on the tenth."""
    made = finished_run(tmp_path, 1)
    block = {"source": "csv", "data_files": str(table(tmp_path / "garden.csv", ROWS))}
    block |= {"column_map": {"input": "Question", "output": "Answer"}, "split": "train[:90%]"}
    config = {
        "dataset": {"_component_": "torchtune.datasets.instruct_dataset", "packed": True, **block},
        "dataset_val": {"split": "train[90%:]"},
    }
    (made.path / "recipe.yaml").write_text(yamlfile.dump(config))
    return made


def findings(site: Site, planned: evaluate.Evaluation) -> list:
    executor = executors.choose(local=True)
    run_plan = submission.plan(planned.recipe, site, executor)
    return list(check.samples(submission.context(run_plan)))


def test_a_run_is_asked_its_own_validation_data(site: Site, run: Run):
    planned = evaluate.plan(site, run.name, None, None)
    assert planned.recipe.name == "validation"
    (told,) = planned.notes
    assert f"dataset_val of {run.name}" in told and "garden.csv, split train[90%:]" in told
    assert [each.line for each in findings(site, planned)] == [
        "tasks.likelihood: 1 samples",
        "tasks.answers: 1 samples",
    ]
    (sample,) = read_samples.read("answers", planned.recipe.config["tasks"]["answers"])
    assert (sample.prompt, sample.reference) == (ROWS[9]["Question"], ROWS[9]["Answer"])
    # Of the same file the training set has the other part, which holds none of it.
    found = read_samples.contamination([sample], planned.recipe.config["training_data"])
    assert found["exact"] == 0 and found["files"] == [str(site.root / "garden.csv")]
    held = read_samples.Sample(0, ROWS[0]["Question"], "", "")
    assert read_samples.contamination([held], planned.recipe.config["training_data"])["exact"] == 1


@pytest.mark.parametrize(
    ("changes", "suite"),
    [
        ({}, "validation"),
        ({"entry": "dpo"}, "pairs"),
        ({"entry": "grpo", "rewards": {"right": {"column": "Answer"}}}, "validation"),
        ({"entry": "grpo", "rewards": {"short": {"function": "a.py:b"}}}, "no answers to compare"),
        ({"dataset_val": None}, "was trained without dataset_val: give a file of questions"),
    ],
)
def test_the_suite_follows_from_the_method(site: Site, run: Run, changes: dict, suite: str):
    config = {**yamlfile.load(run.path / "recipe.yaml"), **changes}
    (run.path / "recipe.yaml").write_text(yamlfile.dump(config))
    if " " in suite:
        with pytest.raises(UsageFault, match=suite):
            evaluate.plan(site, run.name, None, None)
    else:
        assert evaluate.plan(site, run.name, None, None).recipe.name == suite


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".json", ".jsonl"])
def test_a_file_of_other_columns_is_read_as_start_reads_it(
    site: Site, run: Run, tmp_path: Path, suffix: str
):
    """The path is whole in the record, as a job and `resume` run in other folders."""
    file = tmp_path / f"test{suffix}"
    if suffix in (".csv", ".tsv"):
        table(file, ROWS[:3])
    else:
        rows = map(json.dumps, ROWS[:3])
        file.write_text(f"[{', '.join(rows)}]" if suffix == ".json" else "\n".join(rows))
    planned = evaluate.plan(site, run.name, None, None, data=file.name)
    assert not planned.notes
    for name, task in planned.recipe.config["tasks"].items():
        assert task["dataset"]["data_files"] == str(file) and not task.get("data")
        assert [each.prompt for each in read_samples.read(name, task)] == [
            row["Question"] for row in ROWS[:3]
        ]


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("Frage,Antwort\na,b\n", ["tasks.answers.prompt=Frage tasks.answers.reference=Antwort"]),
        ("", ["has no record"]),
        (None, ["there is no file "]),
        (
            'question,answer\na,\n"  ",b\n',
            ["line 2: there is no 'answer'", "line 3: the question is empty"],
        ),
    ],
)
def test_what_cannot_be_asked_is_told_before_the_queue(
    site: Site, run: Run, tmp_path: Path, content: str | None, told: list[str]
):
    if content is not None:
        (tmp_path / "test.csv").write_text(content)
    try:
        planned = evaluate.plan(site, run.name, None, None, data="test.csv")
        faults = [each.line for each in findings(site, planned) if each.state == "failed"]
    except UsageFault as error:
        faults = list(error.faults)
    own = [fault for fault in faults if "tasks.answers" in fault]
    assert [words in fault for words, fault in zip(told, own, strict=True)] == [True] * len(told), (
        own
    )


def test_columns_can_be_named(site: Site, run: Run, tmp_path: Path):
    rows = [{"Frage": "a?", "Antwort": "b"}]
    table(tmp_path / "test.csv", rows)
    named = ["tasks.likelihood.data=test.csv", "~tasks.answers"]
    named += ["tasks.likelihood.prompt=Frage", "tasks.likelihood.reference=Antwort"]
    tasks = evaluate.plan(site, run.name, None, None, named).recipe.config["tasks"]
    (sample,) = read_samples.read("likelihood", tasks["likelihood"])
    assert (sample.prompt, sample.reference) == ("a?", "b")


TASKS = {
    "harness": {"kind": "lm_eval", "tasks": ["arc_easy"]},
    "answers": {"kind": "generation"},
}


def test_a_file_that_no_task_reads_is_told_before_the_queue(site: Site, run: Run, tmp_path: Path):
    data, suite = str(table(tmp_path / "test.csv", ROWS[:3])), tmp_path / "own.yaml"
    suite.write_text(yamlfile.dump({"entry": "eval", "candidate": None, "tasks": TASKS}))
    planned = evaluate.plan(site, run.name, str(suite), None, data=data)
    assert planned.notes == ("--data is not read by these tasks: harness (lm_eval)",)
    only = {"harness": TASKS["harness"]}
    suite.write_text(yamlfile.dump({"entry": "eval", "candidate": None, "tasks": only}))
    assert (
        evaluate.plan(site, run.name, str(suite), None).recipe.config["candidate_name"] == run.name
    )
    with pytest.raises(UsageFault, match=r"--data .*: no task of .* reads samples: harness \(lm_e"):
        evaluate.plan(site, run.name, str(suite), None, data=data)
