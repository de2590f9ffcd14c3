"""cookbook check --samples: rendered samples with their trained tokens, counts, and faults."""

import json
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from launcher import check as checks
from launcher import paths
from launcher.check import samples as samples_check
from launcher.cli import cookbook
from launcher.cli.samples import lines
from launcher.errors import UsageFault
from launcher.recipe import load as recipes
from launcher.site import Site
from launcher.slurm.executors import choose

pytestmark = pytest.mark.usefixtures("fast_trainer")

QA = paths.REPO_ROOT / "configs/datasets/slurm_qa.jsonl"


@pytest.fixture
def check(model: Path, tmp_path: Path, monkeypatch):
    """Run the command on the demo recipe with its model there; its exit status and output."""
    monkeypatch.setenv("COOKBOOK_ROOT", str(tmp_path / "root"))

    def run(*arguments: str, recipe: str = "demo"):
        given = ["check", recipe, "--local", f"checkpointer.checkpoint_dir={model}", *arguments]
        return CliRunner().invoke(cookbook, given)

    return run


def test_trained_tokens_stand_in_brackets_in_a_pipe(check):
    done = check("--samples", "2", "dataset.packed=true")
    assert done.exit_code == 0, done.output
    first = json.loads(QA.read_text().splitlines()[0])
    shown = done.output[done.output.index("dataset: all 416 samples: ") :].splitlines()
    assert shown[1] == "  0 truncated, 0 dropped (no token to train on)"
    assert shown[2].startswith("  packed into ") and "rows of 512 tokens" in shown[2]
    assert shown[3] == "trained tokens are in [[ ]]"
    assert shown[5].startswith(f"--- dataset 1: {QA}, line 1: ")
    prompt = f"<|endoftext|><|user|>{first['question']}<|end|><|assistant|>"
    assert shown[6] == f"{prompt}[[{first['answer']}<|end|>]]"
    assert shown[8].startswith(f"--- dataset 2: {QA}, line 2: ")
    assert shown[-1] == "no faults: submit would accept this run"


@pytest.mark.long
def test_a_program_gets_the_same_as_json(check):
    done = check("--samples", "1", "--json")
    found = json.loads(done.stdout)
    assert {each["state"] for each in found["findings"]} <= {"ok", "skipped"}
    (dataset,) = found["samples"]
    assert (dataset["key"], dataset["samples"], dataset["read"]) == ("dataset", 416, 416)
    (sample,) = dataset["shown"]
    assert [span["trained"] for span in sample["spans"]] == [False, True]
    assert "samples" not in json.loads(check("--json").stdout)


def test_on_a_terminal_they_have_a_colour():
    counts = dict.fromkeys(("samples", "read", "tokens", "trained_tokens"), 3)
    counts |= dict.fromkeys(("faulty", "truncated", "left_out_tokens", "dropped", "split"), 0)
    spans = [
        {"trained": False, "text": "Why?\n\x1b[2J"},
        {"trained": True, "text": "So.\nAnd so. \u200d"},
    ]
    sample = {"number": 1, "origin": "a.jsonl, line 1", "part": [1, 2], "document": None}
    sample |= {"tokens": 3, "trained_tokens": 2, "left_out_tokens": 4, "spans": spans}
    dataset = counts | {"key": "dataset", "max_seq_len": 3, "rows": None, "notes": []}
    dataset["shown"] = [sample]
    shown = list(lines([dataset], colours=True))
    head = "--- dataset 1: a.jsonl, line 1, part 1 of 2: 3 tokens, 2 trained, 4 more left out"
    green = [click.style(text, fg="black", bg="green") for text in ("So.↵", "And so. \u200d")]
    # What would command the terminal is shown, not done.
    assert shown[-4:] == [head, "Why?", f"\\x1b[2J{green[0]}", green[1]]
    assert list(lines([dataset], colours=False))[-1] == "And so. \u200d]]"


@pytest.mark.long
def test_what_the_run_would_end_with_is_a_fault(check, tmp_path: Path):
    file = tmp_path / "mine.jsonl"
    rows = [{"question": "a", "answer": "b"}, {"question": "a"}, {"question": "c", "answer": None}]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = check("--samples", "1", f"dataset.data_files={file}")
    assert done.exit_code == 1
    for line in (2, 3):
        assert (
            f"failed   samples             dataset: {file}, line {line}: there is no" in done.output
        )
    assert "dataset: all 3 samples, 2 with faults: " in done.output
    assert done.output.endswith("2 faults: submit would refuse this run\n")
    plain = check(f"dataset.data_files={file}")
    assert plain.exit_code == 1 and f"{file}, line 3: there is no 'answer'" in plain.output
    assert "dataset 1" not in plain.output


@pytest.mark.long
def test_a_check_reads_small_files_and_leaves_others(check, tmp_path: Path, monkeypatch):
    file = tmp_path / "mine.jsonl"
    file.write_text('{"question": "a", "answer": "b"}\n{"question": "c", "answer": ""}\n')
    told = "dataset: all 2 samples can be tokenised, 0 truncated, 1 dropped\n"
    noted = "warning  samples             dataset: an answer is empty and not trained in 1 of 2"
    done = check(f"dataset.data_files={file}")
    assert done.exit_code == 0 and told in done.output and noted in done.output
    monkeypatch.setattr(samples_check, "SMALL_BYTES", 10)
    done = check(f"dataset.data_files={file}")
    assert "skipped  samples             the data are 0.0 GiB; their first" in done.output


@pytest.mark.long
def test_what_is_not_here_is_skipped_and_said(model: Path, tmp_path: Path):
    def words(*overrides: str, node_paths: tuple[str, ...] = (), **options) -> str:
        recipe = recipes.load("demo", [f"checkpointer.checkpoint_dir={model}", *overrides])
        site = Site(shared_root=str(tmp_path), node_paths=node_paths)
        context = checks.Context(recipe, site, choose(True), **options)
        (one,), shown = samples_check.read(context, 1)
        assert (one.subject, one.state, shown) == ("samples", "skipped", [])
        return one.line

    assert words(node_paths=(str(model),)) == f"{model} is only on the nodes"
    assert words(prepared=False) == "the model is made at submission, and its tokenizer with it"
    gone = f"dataset.data_files={tmp_path}/no.jsonl"
    missing = f"dataset.data_files {tmp_path}/no.jsonl does not exist"
    assert words(gone) == f"the dataset cannot be read: {missing}"
    assert words(gone, node_paths=(str(tmp_path),)) == f"{tmp_path}/no.jsonl is only on the nodes"
    hub = "{_component_: torchtune.datasets.alpaca_dataset, source: acme/none}"
    told = "dataset: acme/none is not on this machine: cookbook download demo"
    assert words(f"dataset={hub}") == told


def test_data_of_another_trainer_are_not_shown(check):
    fault = check("--samples", "1", recipe="llama3_1/8B_full_dpo").exception
    assert isinstance(fault, UsageFault)
    assert str(fault).startswith("--samples: 8B_full_dpo starts torchtune:full_dpo_distributed")


@pytest.mark.long
def test_splits_that_overlap_are_a_fault_before_the_queue(check):
    """The validation set has the file of the training set, as it names none."""
    done = check("dataset_val.split=train[50%:]")
    assert done.exit_code == 1
    found = f"{'samples':<19} dataset_val: "
    assert f"failed   {found}each of its samples is in dataset too" in done.output
    apart = check("dataset.split=train[:50%]", "dataset_val.split=train[50%:]")
    assert apart.exit_code == 0, apart.output
    assert f"ok       {found}all 208 samples can be tokenised" in apart.output
