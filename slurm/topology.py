"""Puts nodes below the same switch beside each other. Standard library only."""

import re
from itertools import groupby

from slurm import job_log

# Of the plugins topology/tree and topology/block, and of blocks that are made of blocks:
# SwitchName=s1 Level=0 LinkSpeed=1 Nodes=n1,n3
# BlockName=b1 BlockIndex=0 Nodes=n1,n3 BlockSize=2
_NODES = re.compile(r"^\w+=\S+ .*\bNodes=(\S+)", re.MULTILINE)


def by_switch(nodes: list[str], topology: str) -> list[list[str]]:
    """Return the nodes of each leaf switch; [] if the topology has none of them.

    Switches and nodes keep their order: the first node stays the first one, and a node that is
    below no switch is a group of its own.

    Args:
        nodes: the nodes in Slurm's order.
        topology: what `scontrol --oneliner show topology` prints.
    """
    below: list[set[str]] = [set(job_log.hosts(names)) for names in _NODES.findall(topology)]
    # From the top of a tree to its leaves.
    below = sorted((part for part in below if part.intersection(nodes)), key=len, reverse=True)
    if not below:
        return []
    first = [next(place for place, node in enumerate(nodes) if node in part) for part in below]
    paths = {
        node: [place for part, place in zip(below, first, strict=True) if node in part]
        for node in nodes
    }
    # Without a switch it is where it was.
    paths = {node: path or [nodes.index(node)] for node, path in paths.items()}
    order = sorted(nodes, key=lambda node: (paths[node], nodes.index(node)))
    return [list(group) for _, group in groupby(order, paths.__getitem__)]
