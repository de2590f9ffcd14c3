"""cookbook report: one self-contained HTML file."""

import json
import math
import re
import xml.dom.minidom
from html.parser import HTMLParser
from pathlib import Path

import pytest

from launcher.errors import RunFault
from launcher.look import curves, report
from launcher.run.directory import Run
from plugins.rl.launcher import rollouts

NAME = "20260102-030405-demo-0a1b"
EVIL = "<script>alert(1)</script>\"'&\x1b[2J"


def made(root: Path, name: str = NAME, steps: int = 60, **more) -> Run:
    run = Run(root / "runs" / name)
    (run.path / "logs").mkdir(parents=True)
    run.write("submission.json", {"recipe": "demo", "jobs": [{"job_id": "7"}]})
    ended = {"attempt": 1, "started": 50.0, "ended": 90.0, "cause": "finished"}
    run.write("status.json", {"job_id": "7", "state": "FAILED", "message": EVIL, **ended})
    first = {"attempt": 0, "started": 0.0, "ended": 40.0, "cause": "killed", "message": EVIL}
    lines = [json.dumps(line) for line in (first, ended)]
    (run.path / "attempts.jsonl").write_text("\n".join(lines) + "\n")
    run.write("provenance.json", {"command": ["cookbook", EVIL], "packages": ["torch==2"]})
    with (run.path / "metrics.jsonl").open("w") as metrics:
        for step in range(1, steps + 1):
            row = {"step": step, "time": float(step), "loss": 5 + math.sin(step), "lr": 1e-3}
            metrics.write(json.dumps({**row, "tokens_per_second_per_gpu": step, **more}) + "\n")
        metrics.write('{"step": 9999, "los')
    return run


class Reader(HTMLParser):
    """The tags of a page that are open at its end, and what it would load or run."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.wrong: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        names = {name for name, _ in attrs}
        if tag in ("script", "iframe", "object", "img", "link") or names & {"src", "href"}:
            self.wrong.append(tag)
        if tag not in ("meta", "line", "polyline") and not tag.startswith("!"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag in ("line", "polyline"):
            return
        assert self.open.pop() == tag


def page(path: Path) -> tuple[str, Reader]:
    text, reader = path.read_text(), Reader()
    reader.feed(text)
    assert reader.open == [] and reader.wrong == []
    for drawing in re.findall(r"<svg.*?</svg>", text, re.DOTALL):
        xml.dom.minidom.parseString(drawing)
    return text, reader


def test_a_report_needs_nothing_else_and_runs_nothing(tmp_path):
    runs = [made(tmp_path), made(tmp_path, "20260102-030405-other-0a1b", mfu=0.5)]
    report.write(runs, tmp_path / "r.html")
    text, reader = page(tmp_path / "r.html")
    assert "<script" not in text and "&lt;script&gt;" in text and "\x1b" not in text
    # Loss, tokens/s, learning rate, and the MFU that one of them has; two runs in most of them.
    assert reader.tags.count("svg") == 4 and reader.tags.count("polyline") == 7
    assert "prefers-color-scheme: dark" in text and "default-src 'none'" in text
    for run in runs:
        assert run.name in text


def test_a_long_run_makes_a_small_page_that_keeps_every_peak(tmp_path):
    run = made(tmp_path, steps=20_000)
    rows = run.path / "metrics.jsonl"
    lines = rows.read_text().splitlines()
    lines[12_345] = lines[12_345].replace('"loss": ', '"loss": 77')
    rows.write_text("\n".join(lines) + "\n")
    report.write([run], tmp_path / "r.html")
    assert (tmp_path / "r.html").stat().st_size < 3e6
    loss = re.search(r'polyline class="curve s0" points="([^"]*)"', page(tmp_path / "r.html")[0])
    heights = [float(point.partition(",")[2]) for point in loss[1].split()]
    # The one peak is at the top of the chart, and everything else far below it.
    assert len(heights) <= curves.MOST_POINTS and min(heights) == 16.0
    assert sorted(heights)[1] > 150


@pytest.mark.parametrize(
    ("low", "high", "found"),
    [(0, 100, [0, 50, 100]), (0.1, 0.5, [0.1, 0.2, 0.3, 0.4, 0.5]), (3, 3, [3])],
)
def test_ticks_are_round(low, high, found):
    assert curves.ticks(low, high) == pytest.approx(found)


def test_evaluations_are_in_it(tmp_path):
    run = made(tmp_path)
    (run.path / "evals").mkdir()
    figures = {"candidate": {"value": 0.5, "low": 0.4, "high": 0.6}, "samples": 8}
    sample = {"prompt": EVIL, "reference": "r", "candidate": "a", "against": "b"}
    block = {"kind": "generation", "metrics": {"f1": {"all": figures}}}
    block["differing"] = {"count": 1, "first": [sample]}
    result = {"suite": "support", "candidate": {"name": "tuned v2"}, "tasks": {"answers": block}}
    (run.path / "evals" / "support--a.json").write_text(json.dumps(result))
    report.write([run], tmp_path / "r.html")
    text, _ = page(tmp_path / "r.html")
    for words in ("support: tuned v2", "0.5 [0.4, 0.6]", "1 answers differ"):
        assert words in text
    assert "<script" not in text


def test_rewards_and_sampled_answers_are_in_it(tmp_path):
    figures = {"reward": 0.5, "rewards/right": 0.25, "rewards/short": 1.0, "entropy": 0.7}
    figures |= {"answers/tokens": 12.5, "answers/cut": 0.125, "kl/sampler": 1e-7}
    figures |= {"staleness": 1.5, "staleness/most": 2}
    run = made(tmp_path, **figures)
    (run.path / "recipe.yaml").write_text("rewards: {right: {}, short: {}}\n")
    answers = [
        {"reward": n / 9, "scores": {"right": n, "short": None}, "tokens": n, "answer": f"so {n}"}
        for n in range(10)
    ]
    group = {"step": 9, "prompt": EVIL, "answers": [*answers, "no answer"]}
    (run.path / "rollouts.jsonl").write_text(json.dumps(group) + "\n")
    report.write([run], tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    for text in (
        "Sampled answers",
        "Reward by short",
        "Share of answers that max_new_tokens",
        "were behind, at most",
    ):
        assert text in page
    assert "answer, reward 1, right 9, short none, 9 tokens:" in page and EVIL not in page
    assert "so 8" in page and "so 5" not in page and "and 6 answers between them" in page
    assert rollouts.figures(figures) == [
        "reward 0.500, right 0.250, short 1.000",
        "tokens per answer 12.5, cut 12.5%",
        "entropy 0.7, KL to the sampler 1e-07, staleness 1.50, at most 2",
    ]
    assert rollouts.figures({"loss": 1.0}) == []


def test_what_cannot_be_shown_is_named(tmp_path):
    run = made(tmp_path)
    (run.path / "metrics.jsonl").unlink()
    report.write([run], tmp_path / "r.html")
    assert "No step is logged yet" in page(tmp_path / "r.html")[0]
    with pytest.raises(RunFault, match="choose another file with --output"):
        report.write([run], tmp_path / "nowhere" / "r.html")


def test_the_compiled_step_sets_no_scale(tmp_path):
    run = made(tmp_path, steps=40)
    rows = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()[:-1]]
    for row in rows:
        row["step_time_s"] = 60.0 if row["step"] == 1 else 1.0 + row["step"] / 100
    (run.path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    report.write([run], tmp_path / "r.html")
    text = page(tmp_path / "r.html")[0]
    drawn = text.partition('aria-label="Step time (s)"')[2].partition("</svg>")[0]
    labels = [float(label) for label in re.findall(r'baseline="middle">([\d.]+)</text>', drawn)]
    assert max(labels) < 2, labels
    line = re.search(r'points="([^"]*)"', drawn)[1].split()
    assert len(line) == 40 and line[0].endswith(",16.0")


def test_a_single_point_is_drawn_and_data_files_are_named(tmp_path):
    run = made(tmp_path, steps=1)
    provenance = run.path / "provenance.json"
    data = {"file": "/shared/my.jsonl", "bytes": 12345, "sha256": "ab" * 32}
    content = json.loads(provenance.read_text()) if provenance.exists() else {}
    provenance.write_text(json.dumps({**content, "data": [data]}))
    report.write([run], tmp_path / "r.html")
    text, reader = page(tmp_path / "r.html")
    assert reader.tags.count("circle") >= 3 and "polyline" not in reader.tags
    assert "/shared/my.jsonl, 12,345 bytes, sha256 abababababab" in text
