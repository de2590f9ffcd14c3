"""Run the command without its console script: python -m launcher --help"""

import sys

from launcher.cli import main

# What a run's provenance shows.
sys.argv[0] = "cookbook"
main()
