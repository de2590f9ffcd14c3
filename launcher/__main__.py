"""Run the command without its console script: python -m launcher --help"""

import signal
import sys

from launcher.cli import main

# What a run's provenance shows.
sys.argv[0] = "cookbook"
try:
    # cookbook --host holds Ctrl-C back until there is somebody to handle it.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    main()
except KeyboardInterrupt:
    print("interrupted", file=sys.stderr)
    sys.exit(130)
