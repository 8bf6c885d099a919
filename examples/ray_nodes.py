"""Start one SMC server over the machines of a Ray cluster, whose ranks need all of them.

    python examples/ray_nodes.py --nodes 2 --gpus 8 -- --model-path /models/target --tp-size 16 \
        --speculative-algorithm SMC --speculative-draft-model-path /models/draft

Ray chooses the machines and passes on what they print. The server listens on the first one's own
address in the cluster, without a key. If one process ends, so do the others. (The actors of
SGLang's own `--use-ray` load no plugins.)
"""

import argparse
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from typing import Any

import ray  # pyright: ignore[reportMissingImports]
from ray.util.placement_group import placement_group  # pyright: ignore[reportMissingImports]
from ray.util.scheduling_strategies import (  # pyright: ignore[reportMissingImports]
    PlacementGroupSchedulingStrategy,
)


def free_address() -> str:
    """Return this machine's address in the cluster, with a free port."""
    host = ray.util.get_node_ip_address()
    with socket.socket() as any_free:
        any_free.bind((host, 0))
        return f"{host}:{any_free.getsockname()[1]}"


def serve(words: list[str], grace: float) -> int:
    """Run a process of the server; where Ray cancels it, its requests have ``grace`` seconds."""
    host = f"--host={ray.util.get_node_ip_address()}"
    command = [sys.executable, "-m", "sglang.launch_server", host, *words]
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where Ray was started with &
    with subprocess.Popen(command) as server:
        try:
            while server.poll() is None:
                time.sleep(1)  # Ray interrupts no call that waits for a process
        finally:
            server.terminate()
            with suppress(subprocess.TimeoutExpired):
                server.wait(grace)
            server.kill()  # ranks whose first one has gone would wait for it
    return server.returncode


def start(nodes: int, gpus: int, words: list[str], grace: float) -> list[Any]:
    """Return Ray's references to the processes, one on each of ``nodes`` machines."""
    bundle = {"CPU": 1, "GPU": gpus} if gpus else {"CPU": 1}
    group = placement_group([bundle] * nodes, strategy="STRICT_SPREAD")
    ray.get(group.ready())

    def on(rank: int, function: Any, *arguments: Any) -> Any:
        place = PlacementGroupSchedulingStrategy(group, rank)
        return ray.remote(function).options(
            num_cpus=1, num_gpus=gpus, max_retries=0, scheduling_strategy=place
        ).remote(*arguments)  # fmt: skip

    address = ray.get(on(0, free_address))
    print(f"Requests go to {address.rsplit(':', 1)[0]}, at the server's port.", flush=True)
    shared = [*words, f"--nnodes={nodes}", f"--dist-init-addr={address}"]
    return [on(rank, serve, [*shared, f"--node-rank={rank}"], grace) for rank in range(nodes)]


def main() -> None:
    """Start the processes, and end all of them with the first that ends."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--gpus", type=int, default=8, help="of each machine (default: 8)")
    parser.add_argument("--grace", type=float, default=600, help="seconds to end in (default: 600)")
    parser.add_argument("words", nargs="+", help="what sglang.launch_server takes, behind --")
    given = parser.parse_args()
    ray.init()
    for end in (signal.SIGINT, signal.SIGTERM):
        signal.signal(end, signal.default_int_handler)
    running = start(given.nodes, given.gpus, given.words, given.grace)
    with suppress(KeyboardInterrupt):
        ray.wait(running, num_returns=1)
    for process in running:
        ray.cancel(process)
    ray.wait(running, num_returns=len(running))


if __name__ == "__main__":
    main()
