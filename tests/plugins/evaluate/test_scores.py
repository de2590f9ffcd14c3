"""Scores and statistics against what others wrote: scikit-learn, scipy, rouge_score."""

import numpy as np
import pytest

from plugins.evaluate import scores, statistics

PAIRS = [
    ("The job is pending.", "the job is  pending"),
    ("a queue of jobs, and one more", "one queue of many jobs"),
    ("", "nothing"),
    ("it runs on two nodes and then stops", "on two nodes it runs, then it stops"),
]


@pytest.mark.parametrize(("answer", "reference"), PAIRS)
def test_rouge_is_that_of_rouge_score(answer, reference):
    rouge = pytest.importorskip("rouge_score.rouge_scorer", reason="it comes with --with lm-eval")
    theirs = rouge.RougeScorer(["rouge1", "rouge2", "rougeL"]).score(reference, answer)
    for n in (1, 2):
        assert scores.rouge_n(answer, reference, n) == pytest.approx(theirs[f"rouge{n}"].fmeasure)
    assert scores.rouge_l(answer, reference) == pytest.approx(theirs["rougeL"].fmeasure)


def test_exact_match_and_f1_are_squads():
    assert scores.exact_match("The  Queue!", "queue") == 1
    assert scores.exact_match("queues", "queue") == 0
    # Two words in common: precision 2/3, recall 2/4.
    assert scores.f1("red big dog", "the big dog runs fast") == pytest.approx(2 * 2 / 7)
    assert scores.f1("", "") == 1


def test_a_label_is_the_answer_or_comes_first_in_it():
    labels = ["refund", "order status", "status"]
    assert scores.label_of("Order status.", labels) == "order status"
    assert scores.label_of("The intent is: refund, not status", labels) == "refund"
    assert scores.label_of("refunds", labels) is None


def test_regex_and_schema():
    schema = '{"type": "object", "properties": {"intent": {"type": "string"}}}'
    strict = '{"type": "object", "required": ["intent"]}'
    assert scores.matches("job 4711", r"\d{4}") == 1
    assert scores.fits_schema('```json\n{"intent": "x"}\n```', schema) == 1
    assert scores.fits_schema('{"intent": 1}', schema) == 0
    assert scores.fits_schema('{"intent": 1', schema) == 0
    assert scores.fits_schema("{}", strict) == 0


def test_mcnemar_is_scipys_binomial_test():
    from scipy.stats import binomtest

    for wins, losses in ((0, 0), (5, 1), (12, 30), (1500, 1400), (40_000, 39_000)):
        theirs = binomtest(wins, wins + losses).pvalue if wins + losses else 1.0
        assert statistics.sign_test(wins, losses) == pytest.approx(theirs, rel=1e-9)


def test_the_interval_and_the_permutation_test_agree_with_scipy():
    from scipy.stats import bootstrap, permutation_test

    generator = np.random.default_rng(1)
    ours, theirs = generator.normal(0.55, 0.2, 80), generator.normal(0.5, 0.2, 80)
    low, high = statistics.interval(ours, np.ones(80), 0, 4000, 0.95)
    known = bootstrap((ours,), np.mean, n_resamples=4000, method="percentile", rng=0)
    assert low == pytest.approx(known.confidence_interval.low, abs=0.004)
    assert high == pytest.approx(known.confidence_interval.high, abs=0.004)
    found = statistics.difference(ours, theirs, np.ones(80), 0, 4000, 0.95)
    reference = permutation_test(
        (ours, theirs),
        lambda a, b: np.mean(a - b),
        permutation_type="samples",
        n_resamples=4000,
        rng=0,
    )
    assert found["p"] == pytest.approx(reference.pvalue, abs=0.03)
    assert found["value"] == pytest.approx(np.mean(ours - theirs))
    assert found["low"] < found["value"] < found["high"]


def test_a_ratio_of_sums_weighs_samples_by_their_tokens():
    sums, weights = np.array([10.0, 1.0]), np.array([10.0, 100.0])
    low, high = statistics.interval(sums, weights, 0, 500, 0.9)
    assert low == pytest.approx(0.01) and high == pytest.approx(1.0)
