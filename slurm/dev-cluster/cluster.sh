#!/usr/bin/env bash
# The command by its older name: cluster.py has the code.
exec python3 -P "$(dirname "${BASH_SOURCE[0]}")/cluster.py" "$@"
