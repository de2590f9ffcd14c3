"""What Linux is asked to do with a process."""

import ctypes
import signal

_PRCTL = ctypes.CDLL(None).prctl
_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Let the kernel kill this process when the thread that has started it ends.

    Also between fork and exec: subprocess's preexec_fn.
    """
    _PRCTL(_PR_SET_PDEATHSIG, signal.SIGKILL)
