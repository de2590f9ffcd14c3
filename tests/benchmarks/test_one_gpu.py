"""benchmarks.one_gpu on a CPU: both calls end in one complete file and its page."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.one_gpu.__main__ import argument_parser
from benchmarks.one_gpu.parts import ROOT, Call


def test_a_part_without_time_is_written_down(tmp_path: Path) -> None:
    for _ in range(2):
        options = argument_parser().parse_args(["correct", "--only", "^case a"])
        call = Call(tmp_path / "one.json", tmp_path, options, budget_s=1e5)
        assert call.starts("case a", 1.0) and not call.starts("case b", 1.0)
        assert not call.starts("case ab", 1e6)
    (part,) = json.loads((tmp_path / "one.json").read_text())["parts"].values()
    assert part["dropped"].startswith("no time")
    assert "- case ab: dropped: no time" in (tmp_path / "one.md").read_text()


@pytest.mark.long
def test_both_calls_end_in_one_complete_page(tmp_path: Path) -> None:
    options = ["--tiny", "--device", "cpu", "--out", str(tmp_path), "--work", str(tmp_path / "w")]
    options += ["--budget-s", "3000", "--only"]
    for what, only in (
        ("correct", "^(case (kto|recompute_2)|resume lora)$"),
        ("speed", "^speed (lora profiled|experts)$"),
    ):
        command = [sys.executable, "-m", "benchmarks.one_gpu", what, *options, only]
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    (path,) = tmp_path.glob("one_gpu_cpu_*.json")
    found, page = json.loads(path.read_text()), path.with_suffix(".md").read_text()
    parts = found["parts"]
    cases = {"case kto bf16", "case recompute_2 bf16"}
    read = {"models", "resume lora", "generate", "export by transformers and PEFT"}
    assert parts.keys() == cases | read | {"speed lora profiled", "speed experts"}
    assert [parts[name]["ok"] for name in cases | read] == [True] * 6
    assert "Failed and dropped" not in page and page.count("| yes |") > len(cases)
    assert parts["case recompute_2 bf16"]["against"] == "packed"
    # A CPU adds in one order.
    assert parts["resume lora"]["same_bits_resumed"]
    (ours, other), (profiled,) = (parts[f"speed {n}"]["rows"] for n in ("experts", "lora profiled"))
    assert ours["status"] == other["status"] == profiled["status"] == "ok"
    assert other["differences"] == [] and other["speedup_of_ours"] > 0
    assert 0 < profiled["estimate"]["peak_gib"] < 1
    assert 0 < parts["speed lora profiled"]["trace"]["busy"] <= 1
    assert "estimate for h100-80" in page and "| `aten::" in page
    assert {"correct", "speed"} == found["calls"].keys() and not list((tmp_path / "w").iterdir())
