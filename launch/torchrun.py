"""torchrun for a job on one host, as the torchx component starts it: `python -m logitmix.launch.torchrun ARGS`.

torchrun's stores listen on all interfaces. Here that of the rendezvous listens on the loopback, and the ranks make
theirs there by themselves. Under torchx's local scheduler the job ends with torchx, even if that is killed: a rank that
trains saves the step.
"""

import ctypes
import os
import signal
import socket
import sys

from torch.distributed import TCPStore, run
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters, rendezvous_handler_registry
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

ADDRESS = "127.0.0.1"


def main() -> None:
    if os.environ.get("TORCHX_JOB_ID", "").startswith("local_cwd:"):
        _end_with_parent()
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    rendezvous_handler_registry.register(Backend.name, _on_loopback)
    # The port is that of no store: without an endpoint, torchrun warns.
    here = [f"--rdzv_backend={Backend.name}", f"--rdzv_endpoint={ADDRESS}:0", f"--local_addr={ADDRESS}"]
    run.main([*here, *sys.argv[1:]])


class Backend(C10dRendezvousBackend):
    """c10d's, which torchrun wants to have the name of what it was told to use."""

    name = "loopback"


def _on_loopback(params: RendezvousParameters) -> RendezvousHandler:
    listener = socket.create_server((ADDRESS, 0))
    port = listener.getsockname()[1]
    store = TCPStore(ADDRESS, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    return create_handler(store, Backend(store, params.run_id), params)


def _end_with_parent() -> None:
    """Has this process told to end (SIGTERM) when its parent process ends; on Linux."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM)


if __name__ == "__main__":
    main()
