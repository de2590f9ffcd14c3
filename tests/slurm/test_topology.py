"""slurm/topology.py: the order in which nodes get ranks, by what scontrol prints."""

import pytest

from slurm.topology import by_switch

TREE = """SwitchName=s1 Level=0 LinkSpeed=1 Nodes=n1,n3
SwitchName=s2 Level=0 LinkSpeed=1 Nodes=n[2,4]
SwitchName=top Level=1 LinkSpeed=1 Nodes=n[1-4] Switches=s[1-2]
"""
# Three levels.
DEEP = """SwitchName=a Level=0 LinkSpeed=1 Nodes=n[1,5]
SwitchName=b Level=0 LinkSpeed=1 Nodes=n[2,6]
SwitchName=c Level=0 LinkSpeed=1 Nodes=n[3,7]
SwitchName=d Level=0 LinkSpeed=1 Nodes=n[4,8]
SwitchName=left Level=1 LinkSpeed=1 Nodes=n[1,3,5,7] Switches=a,c
SwitchName=right Level=1 LinkSpeed=1 Nodes=n[2,4,6,8] Switches=b,d
SwitchName=top Level=2 LinkSpeed=1 Nodes=n[1-8] Switches=left,right
"""
BLOCKS = """BlockName=s1 BlockIndex=0 Nodes=n1,n3 BlockSize=1
BlockName=s2 BlockIndex=1 Nodes=n[2,4] BlockSize=1
"""
# Two lists of numbers in a name.
RACKS = """SwitchName=s1 Level=0 LinkSpeed=1 Nodes=r[1-2]n1
SwitchName=s2 Level=0 LinkSpeed=1 Nodes=r[1-2]n[2-3]
"""


@pytest.mark.parametrize(
    ("nodes", "topology", "groups"),
    [
        ("n1 n2 n3 n4", TREE, ["n1 n3", "n2 n4"]),
        ("n1 n2 n3 n4", BLOCKS, ["n1 n3", "n2 n4"]),
        ("r1n1 r1n2 r2n1 r2n2", RACKS, ["r1n1 r2n1", "r1n2 r2n2"]),
        # The first node stays first.
        ("n2 n3 n4", TREE, ["n2 n4", "n3"]),
        ("n1 n2 n3 n4 n5 n6 n7 n8", DEEP, ["n1 n5", "n3 n7", "n2 n6", "n4 n8"]),
        ("n1 other n3", TREE, ["n1 n3", "other"]),
        ("m1 m2", TREE, []),
        ("n1 n2", "", []),
    ],
)
def test_nodes_below_one_switch_are_together(nodes: str, topology: str, groups: list[str]) -> None:
    assert by_switch(nodes.split(), topology) == [group.split() for group in groups]
