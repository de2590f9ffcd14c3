"""cookbook --host NAME: every command from a laptop, by the user's own ssh and rsync.

The laptop's side: hosts, ssh, tree, client, install; it needs click and yaml. On the cluster far
runs the cookbook command there.
"""
