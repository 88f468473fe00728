"""What the tests of limited processes run in them: the well-behaved and the others."""

from __future__ import annotations

import os
import signal
import sys
import time


def do(task: str) -> str:
    """Behave as the task says: ``answer``, or one of the ways not to."""
    if task == "hang":
        time.sleep(3600)
    elif task == "exit":
        os._exit(3)
    elif task == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    elif task == "raise":
        raise ValueError("no good\nat all")
    elif task == "eat":
        eaten = []
        while True:
            eaten.append(bytearray(os.urandom(1 << 20)) * 32)
            time.sleep(0.02)
    elif task == "shout":
        print("out of turn", flush=True)
        print("and louder", file=sys.stderr, flush=True)
    return f"{task} done"


def collect_as_told(task: str, fresh: bool = False) -> str:
    """Stand in for what collects a family."""
    return do(task)
