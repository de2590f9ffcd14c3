"""benchmarks.levers: every variant is measured, and a wrong result is reported."""

import json
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.metadata import version
from typing import Any

import pytest
import torch

from benchmarks import levers
from benchmarks.parts import attention, measure
from benchmarks.parts.measure import SIZES, Case, Runnable, Setting, Variant

TINY = Setting(
    torch.device("cpu"),
    torch.float32,
    SIZES["tiny"],
    compiled=False,
    rounds=measure.MIN_ROUNDS,
    timed_s=0.0,
)
# Variants that need a GPU, an optional package or a compiler; all others must run everywhere.
MAY_BE_SKIPPED = (
    "compiled",
    "FlexAttention",
    "varlen",
    "torchao Adam",
    "bitsandbytes",
    "Liger",
    "PEFT",
)


@pytest.fixture(autouse=True)
def one_thread():
    """One thread: with shapes this small, several threads mostly wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def results_of(parts: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    return {
        "date": "now",
        "commit": None,
        "hardware": levers.hardware(torch.device("cpu")),
        "versions": levers.versions(),
        "device": "cpu",
        "dtype": "float32",
        "size": "tiny",
        "parts": {name: {"cases": cases} for name, cases in parts.items()},
    }


@pytest.mark.parametrize(
    "part",
    [
        pytest.param(p, marks=[pytest.mark.long] if p in ("block", "fp8", "loading") else [])
        for p in levers.PARTS
    ],
)
def test_every_variant_of_a_part_is_measured_and_matches_its_reference(part):
    records = list(levers.run_part(part, TINY))
    results = results_of({part: records})
    assert levers.faults(results) == []
    page = levers.markdown(results)
    for record in records:
        assert f"### {part}: {record['case']}" in page
        for variant in record["variants"]:
            assert f"\n| {variant['name']} |" in page
            if "skipped" in variant:
                older_torch = variant["skipped"].startswith(("this torch has no", "torch 2.11"))
                assert older_torch or any(w in variant["name"] for w in MAY_BE_SKIPPED), variant
                continue
            assert variant["equal"] and variant["errors"], variant
            assert variant["seconds"]["rounds"] == measure.MIN_ROUNDS
            assert 0 < variant["seconds"]["low"] <= variant["seconds"]["high"]
            assert variant["peak_bytes"] >= 0 and variant["rate"] > 0
        assert record["variants"][0]["ratio"] == 1
    assert json.loads(json.dumps(results)) == results


def with_wrong_result(runnable: Runnable, name: str) -> Runnable:
    """The same variant, with the result `name` 1 % too large."""
    if runnable.results is not None:
        results = runnable.results

        def wrong() -> dict[str, torch.Tensor]:
            return {key: value * (1.01 if key == name else 1) for key, value in results().items()}

        return replace(runnable, results=wrong)
    if name == "output":
        return replace(runnable, run=lambda: TooLarge.apply(runnable.run()))

    @contextmanager
    def hooked() -> Iterator[None]:
        handle = runnable.leaves[name].register_hook(lambda gradient: gradient * 1.01)
        yield
        handle.remove()

    return replace(runnable, context=hooked)


class TooLarge(torch.autograd.Function):
    """The value is 1 % too large, the gradient is correct."""

    @staticmethod
    def forward(ctx, value):
        return value * 1.01

    @staticmethod
    def backward(ctx, gradient):
        return gradient


@pytest.mark.parametrize("part", ["attention", "loss", "lora", "nf4", "optimizer"])
def test_each_wrong_result_is_reported(part):
    case = next(iter(levers.module_of(part).cases(TINY)))
    first, names = case.variants[0], list(case.reference())
    wrong = [
        Variant(f"wrong {n}", lambda n=n: with_wrong_result(first.prepare(), n)) for n in names
    ]
    record = measure.run_case(replace(case, variants=[first, *wrong]), TINY)
    assert [variant["equal"] for variant in record["variants"]] == [True] + [False] * len(names)
    results = results_of({part: [record]})
    faults = levers.faults(results)
    assert [line.partition(":")[0] for line in faults] == [
        f"{part}, {case.name}, wrong {name}" for name in names
    ]
    page = levers.markdown(results)
    assert page.count("WRONG RESULT") == len(names) and all(line in page for line in faults)


def test_attention_across_documents_is_reported():
    case = next(iter(attention.cases(TINY)))
    leaves = case.variants[0].prepare().leaves
    leaking = Variant("leaking", lambda: attention.causal(leaves))
    record = measure.run_case(replace(case, variants=[leaking]), TINY)
    [variant] = record["variants"]
    assert not variant["equal"] and variant["errors"]["output"] > 0.1


def test_a_failing_variant_is_a_fault_and_a_skipped_one_is_not():
    def absent() -> Runnable:
        import no_such_package  # noqa: F401

        return Runnable(lambda: None)

    def breaks() -> Runnable:
        raise ValueError("no kernel\nfor this shape")

    case = Case(
        "a case",
        "nothing",
        [Variant("absent", absent), Variant("breaking", breaks)],
        reference=dict,
        tolerance=0.0,
    )
    record = measure.run_case(case, TINY)
    assert record["variants"] == [
        {"name": "absent", "skipped": "no_such_package is not installed"},
        {"name": "breaking", "failed": "ValueError: no kernel"},
    ]
    assert levers.faults(results_of({"x": [record]})) == [
        "x, a case, breaking: ValueError: no kernel"
    ]
    late = measure.run_case(case, replace(TINY, deadline=time.monotonic()))
    assert {variant["skipped"] for variant in late["variants"]} == {"no time left"}


def test_relative_error_sees_one_wrong_row_among_many():
    exact = torch.randn(1000, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    exact[:500] *= 1e-9
    value = exact.clone()
    value[700] *= 1.1
    assert measure.relative_error(value, exact) == pytest.approx(0.1, rel=0.1)
    # An error in a row close to zero is measured relative to all rows.
    value = exact.clone()
    value[3] *= 2
    assert measure.relative_error(value, exact) < 1e-6
    value[3] = torch.nan
    assert measure.relative_error(value, exact) == math.inf
    assert measure.relative_error(exact[1:], exact) == math.inf


def test_peak_memory_counts_what_is_allocated_at_the_same_time():
    def call() -> torch.Tensor:
        first = torch.zeros(2**18)
        second = first + 1
        del first
        return second * 2

    assert measure.peak_bytes(call, torch.device("cpu")) == pytest.approx(2 * 2**20, rel=1e-4)


@pytest.mark.long
def test_the_command_writes_what_it_prints(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    arguments = ["optimizer", "--device", "cpu", "--size", "tiny", "--no-compile"]
    assert levers.main([*arguments, "--out", str(tmp_path)]) == 0
    assert capsys.readouterr().out == (tmp_path / "levers.md").read_text()
    results = json.loads((tmp_path / "levers.json").read_text())
    names = [case["case"] for case in results["parts"]["optimizer"]["cases"]]
    assert names == ["full fine-tuning", "LoRA"]
    assert results["versions"]["torch"] == version("torch")

    with pytest.raises(SystemExit, match="2"):
        levers.main(["no_part"])
    assert "no part no_part; known: attention, block" in capsys.readouterr().err


@pytest.mark.named
@pytest.mark.parametrize("part", levers.PARTS)
def test_compiled_variants_match_the_reference(part):
    torch._dynamo.reset()
    records = list(levers.run_part(part, replace(TINY, compiled=True)))
    assert levers.faults(results_of({part: records})) == []
    skipped = [v["name"] for r in records for v in r["variants"] if "skipped" in v]
    assert not [name for name in skipped if "compiled" in name and "fp8 rowwise" not in name]
