"""A Ray cluster on this machine: a head without work and two nodes for agents, as a process that obeys lines on standard input.

In a process of its own: Ray leaves threads, sockets and signal handlers behind. It says its address first; `kill head` ends all
processes of the head at once; the end of the input ends everything.
"""

from __future__ import annotations

import sys


def main() -> None:
    from ray.cluster_utils import Cluster

    small = {"object_store_memory": 80 * 2**20, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, **small})
    nodes = [cluster.add_node(num_cpus=1, resources={"lamina_node": 1}, **small) for _ in range(2)]
    print(cluster.address, flush=True)
    try:
        for line in sys.stdin:
            if line.strip() == "kill head":
                cluster.head_node.kill_all_processes(check_alive=False, allow_graceful=False)
            print("done", flush=True)
    finally:
        for node in (cluster.head_node, *nodes):
            node.kill_all_processes(check_alive=False, allow_graceful=False)


if __name__ == "__main__":
    main()
