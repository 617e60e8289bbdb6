"""Serve a model as vLLM does, with sleep: ``python sleeping_server.py MODEL --port PORT``.

It prints its process, its GPUs and its port, and then every request to sleep or to wake up.
"""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.helpers.servers import StandIn


class PrintedNaps(list[str]):
    def append(self, nap: str) -> None:
        print(nap, flush=True)
        super().append(nap)


if __name__ == "__main__":
    port = int(sys.argv[sys.argv.index("--port") + 1])
    print("process", os.getpid(), "GPU", os.environ.get("CUDA_VISIBLE_DEVICES"), "port", port, flush=True)
    server = StandIn(sys.argv[1], port=port)
    server.naps = PrintedNaps()
    server.thread.join()
