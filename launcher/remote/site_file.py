"""The first site file of a cluster, from what Slurm says: python -m launcher.remote.site_file"""

import sys
from collections import Counter

from launcher import paths
from launcher.errors import CookbookError, SlurmFault
from launcher.executors import slurm
from launcher.executors.slurm import Partition
from launcher.sizing import gpus


def text(partitions: dict[str, Partition], accounts: list[str]) -> str:
    """Return the file: the partition with GPUs that jobs go to, the account, the kind of GPU.

    What cannot be known is a comment with the choices: an account costs somebody's budget.
    """
    lines = ["# Written by cookbook init from what sinfo and sacctmgr say. Change what is wrong;"]
    lines += ["# configs/clusters/example.yaml has every key.", "#"]
    for each in partitions.values():
        kinds = ", ".join(f"{kind.count} nodes with {_shown(kind.gpus)}" for kind in each.kinds)
        default = " (Slurm's default)" * each.default
        lines.append(f"#   {each.name}{default}: {kinds}; at most {each.time_limit}")
    chosen = _with_gpus(partitions)
    types = _types(chosen) if chosen else Counter()
    lines.append("resources:")
    lines.append(f"  partition: {chosen.name}" if chosen else "  # partition: none has GPUs")
    if len(accounts) == 1:
        lines.append(f"  account: {accounts[0]}")
    elif accounts:
        lines.append(f"  # account: choose one of {', '.join(accounts)}")
    if len(types) > 1:
        lines.append(f"  gpu_type: {types.most_common(1)[0][0]}  # of {', '.join(types)}")
    name = types.most_common(1)[0][0] if types else ""
    if name and (known := gpus.by_label(name)):
        lines.append(f"gpu: {known.name}  # {name}, as sinfo names it: check the memory")
    return "\n".join(lines) + "\n"


def _shown(counts: dict[str, int]) -> str:
    return " and ".join(f"{count} x {kind or 'GPU'}" for kind, count in counts.items()) or "no GPU"


def _types(partition: Partition) -> Counter[str]:
    """Return how many GPUs of each type a partition has; those without a type are not counted."""
    counts: Counter[str] = Counter()
    for kind in partition.kinds:
        counts.update({name: count * kind.count for name, count in kind.gpus.items() if name})
    return counts


def _with_gpus(partitions: dict[str, Partition]) -> Partition | None:
    """Return Slurm's default partition if it has GPUs, else the one with most."""

    def count(each: Partition) -> int:
        return sum(kind.count * sum(kind.gpus.values()) for kind in each.kinds)

    usable = [each for each in partitions.values() if each.up and count(each)]
    return max(usable, key=lambda each: (each.default, count(each)), default=None)


def main() -> int:
    """Write configs/clusters/default.yaml unless it is there."""
    file = paths.CLUSTERS / "default.yaml"
    if file.is_file():
        print(f"{file} is there, and left as it is", file=sys.stderr)
        return 0
    try:
        rights = slurm.rights(slurm.configuration())
        accounts = sorted({each.account for each in rights.mine}) if rights else []
        made = text(slurm.partitions(), accounts)
    except SlurmFault as fault:
        print(f"no site file is written, because {fault}", file=sys.stderr)
        return 0
    except CookbookError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(made, encoding="utf-8")
    print(f"wrote {file}:\n{made}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
