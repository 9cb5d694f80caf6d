"""Cleans a node up after a death that leaves nobody to do it: a process of its own that outlives Ray.

It waits for the end of the node's Ray (its raylet), or for being told that all is done. If Ray ends first, because the
machine's owner, the kernel or `kill -9` ended whatever had started it, then every worker process that is still there is
killed, and the session's files and shared memory are removed.
"""

import os
import select
import shutil
import subprocess
import sys

from backends.ray_gpu.places import Places
from backends.ray_gpu.processes import Processes


def start(session: str) -> subprocess.Popen[bytes]:
    """Start one for this session on this node, called from a Ray worker. A byte on its standard input ends it; it is
    over when its standard output closes: what is returned is only the process that started it."""
    command = [sys.executable, "-m", "backends.ray_gpu.janitor", session, str(os.getppid())]
    # A session of its own: nothing that ends Ray's process group ends it too.
    started = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
    )
    started.wait()
    return started


def clean(session: str) -> None:
    """Kill what still runs of a session on this node, and remove what it left."""
    places = Places(session)
    processes = Processes(places.processes)
    for owner in processes.owners():
        processes.kill(owner)
    for directory in (places.memory, places.disk):
        shutil.rmtree(directory, ignore_errors=True)
    try:
        places.disk.parent.rmdir()
    except OSError:
        return  # another session is there


def main(session: str, raylet: int) -> None:
    if os.fork():
        os._exit(0)  # a Ray worker that ends kills its children: from now on this is nobody's child
    try:
        watched = os.pidfd_open(raylet)
    except ProcessLookupError:
        clean(session)
        return
    told = sys.stdin.fileno()
    # The pipe closes when its other end dies, too: that alone says nothing, for an agent may be started again.
    waiting = [watched, told]
    while True:
        ready, _, _ = select.select(waiting, [], [])
        if watched in ready:
            clean(session)
            return
        if os.read(told, 1):
            return
        waiting = [watched]


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
