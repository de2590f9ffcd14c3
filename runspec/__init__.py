"""What a run is, as data: its files, its keys, its layout and its model's shape.

Standard library only. Launcher, trainer and the scripts on the cluster import it; it imports none
of them.
"""
