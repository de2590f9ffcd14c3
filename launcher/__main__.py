"""Run the command without its console script: python -m launcher --help"""

from launcher.cli import main

main()
