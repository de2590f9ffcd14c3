"""cookbook doctor --rehearse on the one-host Slurm: each part by itself, and what comes of it."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from launcher import gpus
from launcher.recipe import load as recipes
from plugins.estimate.launcher.rehearsal import Part, Scene, findings
from tests.launcher.kit import Kit, report

GPU = gpus.by_name("h100-80")
WHOLE = recipes.load("llama8b_full").resolved(Path("/root"), "run")
CUT = {**WHOLE, "first_blocks": 4}
SCENE = Scene("llama8b_full", WHOLE, 8, 32, GPU)


@pytest.mark.long
def test_a_rehearsal_runs_each_part_and_says_what_to_change(user: Kit):
    asked = ("first_blocks=1", "resources.gpus_per_node=2", "resources.cpus_per_gpu=1")
    done = user.cookbook("doctor", "--rehearse", "demo", "--json", *asked)
    told = json.loads(done.stdout)
    found = {each["subject"]: each for each in told["findings"]}
    folder = Path(told["folder"])
    assert done.returncode == 0, f"{told}\n{done.stderr}\n{report(folder)}"
    for part in ("uncompiled", "compiled"):
        assert found[part]["message"].startswith("1 block: ")
    assert "without a gap; exported" in found["resume and export"]["message"]
    assert "with 1 of 3 blocks and 2 ranks on one node" in done.stderr
    assert "no nvidia-smi" in found["GPUs"]["message"]


@pytest.fixture
def part(tmp_path: Path) -> Callable[..., Part]:
    def made(name: str, step_s: float, gib: float, status: int = 0, error: str = "") -> Part:
        folder = tmp_path / name
        (folder / "logs" / "0").mkdir(parents=True)
        rows = [
            {"step": n, "step_time_s": step_s, "peak_memory_allocated_gb": gib} for n in (1, 2, 3)
        ]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (folder / "log").write_text("resuming from checkpoints/step_2\n")
        if error:
            record = {"type": "RuntimeError", "message": error}
            (folder / "logs" / "0" / "error_rank_0.json").write_text(json.dumps(record))
        config = {**CUT, "compile": name != "uncompiled"}
        return Part(name, config, 4, folder, folder / "log", status, 30)

    return made


def test_measured_against_predicted_and_a_remedy_for_each_difference(part):
    usual = SCENE.needs(CUT)
    assert usual is not None
    parts = [
        part("uncompiled", 2 * usual.step_s, usual.peak_gib),
        part("compiled", 1.5 * usual.step_s, 1.2 * usual.peak_gib),
        part("resumed", 1.0, 1.0),
    ]
    found = list(findings(SCENE, parts))
    states = [(each.subject, each.state) for each in found]
    assert states == [
        ("uncompiled", "ok"),
        ("compiled", "warning"),
        ("resume and export", "failed"),
        ("whole recipe", "warning"),
    ]
    slow = found[-1]
    assert "32 blocks at this speed: 6,3" in slow.message and "predicted 9,5" in slow.message
    assert slow.remedy.startswith("plan with 1.5 times the hours of cookbook estimate llama8b_full")
    assert found[1].remedy.startswith("the whole recipe")


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        ("CUDA out of memory. Tried to allocate 2 GiB", "batch_size=1"),
        ("torch._inductor.exc.InductorError: gcc failed", "compile=false"),
        ("NCCL error in: ProcessGroupNCCL.cpp", "NCCL_DEBUG=INFO"),
        ("something else", "last lines of its log"),
    ],
)
def test_a_part_that_failed_names_its_remedy_and_the_others_are_told(part, error, remedy):
    parts = [
        part("uncompiled", 0.1, 1.0),
        part("compiled", 0.1, 1.0, 1, error),
        replace(part("resumed", 0.1, 1.0), status=None),
    ]
    found = {each.subject: each for each in findings(SCENE, parts)}
    assert found["compiled"].state == "failed"
    assert remedy in found["compiled"].remedy and error in found["compiled"].message
    assert found["uncompiled"].state == "ok" and found["resume and export"].state == "skipped"
    assert "whole recipe" in found
