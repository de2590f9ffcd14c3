"""The releases of torch and transformers that the trainer runs with, as pyproject.toml says them.

Standard library only, for Python 3.9 and later.
"""

from __future__ import annotations

# The oldest release, and the first that is too new: tests/test_versions.py runs the oldest pair.
SUPPORTED: dict[str, tuple[tuple[int, int], tuple[int, int]]] = {
    "torch": ((2, 11), (2, 16)),
    "transformers": ((5, 17), (6, 0)),
}

# The first torch whose FSDP2 shards integers; earlier ones let each parameter require a gradient.
SHARDS_INTEGERS = (2, 12)


def fault(package: str, version: str) -> str | None:
    """Return why a release of a package is not supported, None if it is or is not known."""
    if package not in SUPPORTED:
        return None
    oldest, too_new = SUPPORTED[package]
    numbers = version.split(".")[:2]
    if all(part.isdigit() for part in numbers) and oldest <= tuple(map(int, numbers)) < too_new:
        return None
    first, last = (".".join(map(str, pair)) for pair in (oldest, too_new))
    return f"{package} {version} is not supported: the trainer needs {first} or newer, below {last}"


def sharding_fault(torch: str) -> str | None:
    """Return why a release of torch cannot shard a base model in NF4, None if it can."""
    numbers = torch.split(".")[:2]
    if not all(part.isdigit() for part in numbers) or tuple(map(int, numbers)) >= SHARDS_INTEGERS:
        return None
    first = ".".join(map(str, SHARDS_INTEGERS))
    return f"torch {torch} cannot shard a quantized base model over GPUs: it needs torch {first}"
