"""What Linux is asked to do with a process."""

import ctypes
import os
import signal

_PRCTL = ctypes.CDLL(None).prctl
_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Let the kernel kill this process when the thread that has started it ends.

    Also between fork and exec: subprocess's preexec_fn.
    """
    _PRCTL(_PR_SET_PDEATHSIG, signal.SIGKILL)


def terminate_with_parent() -> None:
    """Let the kernel send a TERM to this process when its parent ends."""
    _PRCTL(_PR_SET_PDEATHSIG, signal.SIGTERM)


def end_with_torchrun() -> None:
    """Let a rank end with the torchrun that has started it, if one has.

    One that is killed cannot end its ranks, whose sessions are their own.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        end_with_parent()
