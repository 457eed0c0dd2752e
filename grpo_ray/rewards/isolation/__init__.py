"""Isolation: rewards that may run away are computed in worker processes that can be killed.

Start with pool.py. `fork_server.py` is a program of its own: it imports what grades once, and forks workers
from it in milliseconds. `worker.py` grades answers, `processes.py` has the pool's ends of the sockets, and
`messages.py` reads what comes through them. `confinement.py` takes from a worker what it does not need, and
says what a kernel lacks: landlock.py and readable.py for files, seccomp.py and system_calls.py for the rest.
"""
