"""cookbook --host NAME: every command from a laptop, over the user's own OpenSSH.

The laptop's side: hosts, ssh, tree, client, fetch, install. It needs click and yaml, and runs on
Linux, macOS and Windows. The cluster's side: far, runner, store. One ssh call starts far, which
runs the cluster's own cookbook command; wire is what both sides say.
"""
