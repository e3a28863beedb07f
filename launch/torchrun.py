"""torchrun for a job on one host, as the torchx component starts it: `python -m logitmix.launch.torchrun ARGS`.

torchrun's stores listen on all interfaces. Here that of the rendezvous listens on the loopback, and the ranks make
theirs there by themselves. Under torchx's local scheduler the job ends with torchx, even if that is killed: a rank that
trains saves the step.
"""

import os
import signal
import socket
import sys
import threading
import time
from contextlib import suppress

from torch.distributed import TCPStore, run
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters, rendezvous_handler_registry
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

ADDRESS = "127.0.0.1"


def main() -> None:
    if os.environ.get("TORCHX_JOB_ID", "").startswith("local_cwd:"):
        _end_with_parent()
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    # By itself it kills ranks 30 seconds after a signal; they end by themselves, once their checkpoint is written.
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "630")
    rendezvous_handler_registry.register(Backend.name, _on_loopback)
    # The port is that of no store: without an endpoint, torchrun warns.
    here = [f"--rdzv_backend={Backend.name}", f"--rdzv_endpoint={ADDRESS}:0", f"--local_addr={ADDRESS}"]
    try:
        run.main([*here, *sys.argv[1:]])
    except SignalException:
        # A second signal, while torchrun waits for its ranks, leaves threads that would keep this process for ever.
        with suppress(OSError):
            sys.stdout.flush()
        os._exit(1)


class Backend(C10dRendezvousBackend):
    """c10d's, which torchrun wants to have the name of what it was told to use."""

    name = "loopback"


def _on_loopback(params: RendezvousParameters) -> RendezvousHandler:
    listener = socket.create_server((ADDRESS, 0))
    port = listener.getsockname()[1]
    store = TCPStore(ADDRESS, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    return create_handler(store, Backend(store, params.run_id), params)


def _end_with_parent() -> None:
    """Has this process told to end (SIGTERM) when its parent process has ended."""
    parent, main_thread = os.getppid(), threading.get_ident()

    # Not by PR_SET_PDEATHSIG, which sends the signal again for each of the parent's threads.
    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        signal.pthread_kill(main_thread, signal.SIGTERM)  # interrupts its sleep

    threading.Thread(target=watch, name="parent", daemon=True).start()


if __name__ == "__main__":
    main()
