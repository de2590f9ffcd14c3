"""How busy a run's GPUs are: sampled by a stand-in nvidia-smi, shown by watch and report."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from launcher.look import gpu_use, report, results
from launcher.look.live import View
from launcher.run.directory import Run
from launcher.run.states import State
from slurm.gpu_use import line_of, samples
from tests.launcher.kit import Kit, until
from tests.launcher.test_script import project

# As nvidia-smi answers: a GPU of somebody else's comes first, and one without a power sensor.
TOOL = """#!/bin/bash
echo "$@" >"$0.arguments"
while sleep 0.1; do
  echo "0, GPU-a, 3, 100, 81559, 60.10"
  echo "1, GPU-b, 98, 62668, 81559, 402.50"
  echo "2, GPU-c, 96, 61440, 81559, [N/A]"
done
"""


def made(root: Path) -> Run:
    run = Run(root / "runs" / "20260102-030405-demo-0a1b")
    (run.path / "logs" / "0").mkdir(parents=True)
    (run.path / "logs" / "latest").symlink_to("0")
    run.write("submission.json", {"recipe": "demo", "jobs": [{"job_id": "7"}]})
    return run


def test_a_node_samples_its_gpus_until_torchrun_ends(tmp_path):
    run, tool = made(tmp_path), tmp_path / "bin" / "nvidia-smi"
    tool.parent.mkdir()
    tool.write_text(TOOL)
    tool.chmod(0o755)
    known = {"RUN_DIR": str(run.path), "LOGS": str(run.logs / "0"), "NODE_RANK": "1"}
    known |= {"NODE_NAME": "n2", "CUDA_VISIBLE_DEVICES": "GPU-b,2"}
    known["PATH"] = f"{tool.parent}:{os.environ['PATH']}"
    with subprocess.Popen(["sleep", "600"]) as torchrun:
        argv = [sys.executable, "-P", "-m", "slurm.gpu_use", str(torchrun.pid)]
        root = str(Path(__file__).parents[2])
        with subprocess.Popen(argv, env={**os.environ, **known, "PYTHONPATH": root}) as sampler:
            (record,) = until(lambda: gpu_use.newest(run), 20)
            torchrun.kill()
            torchrun.wait()
            assert sampler.wait(20) == 0
    assert record["node"] == "n2" and [gpu["index"] for gpu in record["gpus"]] == [1, 2]
    assert record["gpus"][0] | {"memory_total_gib": 0} == {
        "index": 1,
        "busy_percent": 98.0,
        "memory_gib": 61.2,
        "memory_total_gib": 0,
        "watts": 402.5,
    }
    assert "watts" not in record["gpus"][1]
    # One process for the whole attempt, and it is gone.
    assert "--loop=5" in Path(f"{tool}.arguments").read_text()
    assert list(gpu_use.lines(run)) == ["GPU use on n2: 98 96 %, 61.2 GiB"]


@pytest.mark.long
def test_a_job_samples_its_gpus(user: Kit, tmp_path):
    tool = tmp_path / "bin" / "nvidia-smi"
    tool.parent.mkdir()
    tool.write_text(TOOL)
    tool.chmod(0o755)
    here = Kit({**user.env, "PATH": f"{tool.parent}:{user.env['PATH']}"}, user.root)
    one = {"nodes": 1, "gpus_per_node": 1}
    path = project(tmp_path, "import time; time.sleep(3)\n", node_check=False, resources=one)
    _, run = here.submit("--recipe", str(path), "--local")
    here.wait(run, "COMPLETED", "FAILED")
    (record,) = gpu_use.newest(Run(run))
    assert [gpu["busy_percent"] for gpu in record["gpus"]] == [3.0, 98.0, 96.0]


def test_means_and_the_most_memory_make_a_line():
    seen = samples(["0, GPU-a, 90, 1024, 2048, 100", "0, GPU-a, 70, 2048, 2048, 300"], "")
    seen += samples(["no devices were found", "1, x"], "")
    assert line_of(seen, 5.0, "n1") == {
        "time": 5.0,
        "node": "n1",
        "gpus": [
            {
                "index": 0,
                "busy_percent": 80.0,
                "memory_gib": 2.0,
                "memory_total_gib": 2.0,
                "watts": 200.0,
            }
        ],
    }


def test_watch_results_and_report_show_it(tmp_path):
    run = made(tmp_path)
    with (run.path / "metrics.jsonl").open("w") as metrics:
        for step in range(1, 101):
            metrics.write(json.dumps({"step": step, "time": 100.0 + step, "loss": 2.0}) + "\n")
    for node in range(6):
        lines = [
            {"time": 100.0 + step, "node": f"n{node}", "gpus": [{"busy_percent": 90.0 + node}]}
            for step in range(0, 100, 30)
        ]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (run.logs / "0" / f"gpus_node_{node}.jsonl").write_text(text + '{"time": 9, "gp')
    console = Console(width=100, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(View(run).panel(State("RUNNING", "the job"), 100, 20))
    shown = console.export_text()
    assert "GPU use on n0: 90 %" in shown and "GPU use on n4" not in shown
    assert "the least busy of 6 nodes; the mean of all is 92 %" in shown
    (row,), keys = results.compare([run])
    assert row["gpu_use"] == 0.925
    assert "GPU USE" in results.shown([row], keys, "table")
    report.write([run], tmp_path / "r.html")
    assert "GPU utilisation, mean of all GPUs (%)" in (tmp_path / "r.html").read_text()
