"""Bootstrap intervals and paired tests of scores per sample; one seed gives one answer."""

import numpy as np

# Resampled values in memory at once.
_CELLS = 4_000_000


def interval(
    sums: np.ndarray, weights: np.ndarray, seed: int, resamples: int, confidence: float
) -> tuple[float, float]:
    """Return the percentile bootstrap interval of sum(sums) / sum(weights) over samples.

    Efron and Tibshirani, An Introduction to the Bootstrap, chapter 13.

    Args:
        sums: (samples,) what each sample adds, such as its score or its negative log likelihood.
        weights: (samples,) what it counts for, such as 1 or its number of tokens.
        resamples: how many sets of samples are drawn with replacement.
        confidence: share of the draws inside the interval, such as 0.95.
    """
    values = np.sort(_draws(sums, weights, seed, resamples))
    tail = (1 - confidence) / 2
    low, high = np.quantile(values, [tail, 1 - tail])
    return float(low), float(high)


def difference(
    ours: np.ndarray,
    theirs: np.ndarray,
    weights: np.ndarray,
    seed: int,
    resamples: int,
    confidence: float,
) -> dict[str, float | str]:
    """Return the difference of two models on the same samples, its interval and a paired p-value.

    Scores of 0 and 1 get the exact McNemar test (a binomial test of the samples on which the models
    differ), others a sign-flip permutation test of the mean difference; both are two-sided.

    Args:
        ours, theirs: (samples,) what each sample adds for each model.
        weights: (samples,) what a sample counts for, in both.
    """
    change = ours - theirs
    low, high = interval(change, weights, seed, resamples, confidence)
    result: dict[str, float | str] = {"value": float(change.sum() / weights.sum())}
    result |= {"low": low, "high": high}
    if set(np.unique(np.concatenate([ours, theirs]))) <= {0.0, 1.0}:
        wins, losses = int((change > 0).sum()), int((change < 0).sum())
        return result | {"p": sign_test(wins, losses), "test": "exact McNemar"}
    return result | {"p": sign_flip(change, seed, resamples), "test": "sign-flip permutation"}


def sign_test(wins: int, losses: int) -> float:
    """Return the two-sided p-value of the exact binomial test that both are equally likely."""
    total = wins + losses
    tail = combinations = 1
    for k in range(min(wins, losses)):
        combinations = combinations * (total - k) // (k + 1)
        tail += combinations
    return min(1.0, 2 * tail / 2**total)


def sign_flip(change: np.ndarray, seed: int, resamples: int) -> float:
    """Return the two-sided p-value of a sign-flip permutation test of the mean.

    The observed signs count as one of the permutations (Phipson and Smyth, 2010).

    Args:
        change: (samples,) differences of the paired scores.
    """
    generator = np.random.default_rng(seed)
    observed = abs(change.sum())
    extreme = 0
    for count in _parts(resamples, len(change)):
        signs = generator.integers(0, 2, size=(count, len(change)), dtype=np.int8) * 2 - 1
        extreme += int((np.abs(signs @ change) >= observed - 1e-12).sum())
    return (extreme + 1) / (resamples + 1)


def _draws(sums: np.ndarray, weights: np.ndarray, seed: int, resamples: int) -> np.ndarray:
    """(resamples,) the ratio in each set of samples drawn with replacement."""
    generator = np.random.default_rng(seed)
    draws = []
    for count in _parts(resamples, len(sums)):
        index = generator.integers(0, len(sums), size=(count, len(sums)))
        draws.append(sums[index].sum(1) / np.maximum(weights[index].sum(1), 1e-12))
    return np.concatenate(draws)


def _parts(resamples: int, samples: int) -> list[int]:
    """Split the resamples so that one part fits into memory."""
    size = max(1, min(resamples, _CELLS // max(1, samples)))
    whole, rest = divmod(resamples, size)
    return [size] * whole + ([rest] if rest else [])
