"""Workers that only wait, many in one process: a real scheduler of Dask meets a thousand of them.

``python -m cme_dask.passes.stub_workers ADDRESS COUNT LEAF MERGE LATENCY`` connects COUNT workers
of one thread to a scheduler. Each speaks the protocol of ``distributed.Worker``: it fetches what a
task depends on (which takes the latency), holds its thread for LEAF or MERGE seconds in the order
of the scheduler's priorities, and reports the task. It computes nothing, so that the processor is
left to the scheduler, whose service time is what is measured.
"""

import asyncio
import heapq
import os
import sys
import time
from itertools import count
from typing import Any

from distributed.batched import BatchedSend
from distributed.comm import Comm, connect
from distributed.core import rpc
from distributed.protocol.pickle import dumps
from distributed.versions import get_versions
from distributed.worker import Worker

Message = dict[str, Any]

_KIND = dumps(float)
_METRICS: Message = {
    "task_counts": {},
    "bandwidth": {"total": 1e8, "workers": {}, "types": {}},
    "digests_total_since_heartbeat": {},
    "managed_bytes": 0,
    "spilled_bytes": {"memory": 0, "disk": 0},
    "transfer": {
        "incoming_bytes": 0,
        "incoming_count": 0,
        "incoming_count_total": 0,
        "outgoing_bytes": 0,
        "outgoing_count": 0,
        "outgoing_count_total": 0,
    },
    "event_loop_interval": 0.02,
    "cpu": 0.0,
    "memory": 1 << 27,
    "time": 0.0,
    "host_net_io": {"read_bps": 0.0, "write_bps": 0.0},
    "host_disk_io": {"read_bps": 0.0, "write_bps": 0.0},
    "num_fds": 10,
}


class StubWorker:
    """A worker of one thread that waits in place of computing.

    Parameters
    ----------
    scheduler
        Address.
    number
        Of the worker; it makes up an address at which nobody listens.
    leaf, merge
        Seconds that tasks of these kinds hold the thread.
    latency
        Seconds until what a task depends on has come from another worker.
    """

    def __init__(
        self, scheduler: str, number: int, leaf: float, merge: float, latency: float
    ) -> None:
        self._scheduler, self._number = scheduler, number
        self._address = f"tcp://127.0.0.1:{1024 + number}"
        self._leaf, self._merge, self._latency = leaf, merge, latency
        self._held: set[Any] = set()
        self._lacking: dict[Any, set[Any]] = {}  # of tasks that wait for parts
        self._coming: set[Any] = set()
        self._messages: dict[Any, Message] = {}
        self._ready: list[tuple[Any, int, Any]] = []
        self._running: Any = None
        self._order = count()
        self._stream = BatchedSend(interval="2ms")
        self._comm: Comm

    async def start(self) -> None:
        """Register with the scheduler."""
        self._comm = await connect(self._scheduler, deserialize=False)
        await self._comm.write(
            {
                "op": "register-worker",
                "reply": False,
                "address": self._address,
                "status": "running",
                "nthreads": 1,
                "name": f"stub-{self._number}",
                "now": time.time(),
                "resources": {},
                "memory_limit": 1 << 32,
                "local_directory": "",
                "services": {},
                "nanny": None,
                "pid": os.getpid(),
                "versions": get_versions(),
                "metrics": {**_METRICS, "time": time.time()},
                "extra": {},
                "stimulus_id": f"stub-{self._number}",
                "server_id": f"{Worker.__name__}-stub-{self._number}",
            },
            serializers=["msgpack"],
        )
        answer = await self._comm.read(deserializers=["msgpack"])
        if answer["status"] != "OK":
            raise RuntimeError(answer["message"])
        self._stream.start(self._comm)

    async def listen(self) -> None:
        """Do what the scheduler says until it closes the connection."""
        while True:
            try:
                messages = await self._comm.read()
            except OSError:
                return
            for message in messages if isinstance(messages, (tuple, list)) else (messages,):
                self._handle(message)

    async def beat(self, scheduler: Any) -> None:
        """Send heartbeats as often as the scheduler asks for them."""
        pause = 0.5
        while True:
            await asyncio.sleep(pause)
            answer = await scheduler.heartbeat_worker(
                address=self._address,
                now=time.time(),
                metrics={**_METRICS, "time": time.time()},
                executing={},
                extensions={},
            )
            pause = answer.get("heartbeat-interval", pause)

    def _send(self, op: str, **fields: Any) -> None:
        self._stream.send({"stimulus_id": f"{op}-{time.time()}", "op": op, **fields})

    def _handle(self, message: Message) -> None:
        op = message.get("op")
        if op == "compute-task":
            key = message["key"]
            self._messages[key] = message
            lacking = {part for part in message["who_has"] if part not in self._held}
            self._lacking[key] = lacking
            for part in lacking - self._coming:
                self._coming.add(part)
                asyncio.get_running_loop().call_later(self._latency, self._came, part)
            if not lacking:
                self._make_ready(key)
        elif op in ("free-keys", "remove-replicas"):
            for key in message["keys"]:
                self._held.discard(key)
                if key != self._running:
                    self._messages.pop(key, None)
                    self._lacking.pop(key, None)
        elif op == "steal-request":
            key = message["key"]
            state = "executing" if key == self._running else None
            state = "memory" if key in self._held else state
            if state is None and self._messages.pop(key, None) is not None:
                self._lacking.pop(key, None)
                state = "ready"
            # The scheduler ignores answers under another name than that of its question.
            asked = message["stimulus_id"]
            self._send("steal-response", key=key, state=state, stimulus_id=asked)

    def _came(self, part: Any) -> None:
        self._coming.discard(part)
        self._held.add(part)
        self._send("add-keys", keys=[part])
        for key, lacking in list(self._lacking.items()):
            if part in lacking:
                lacking.discard(part)
                if not lacking:
                    self._make_ready(key)

    def _make_ready(self, key: Any) -> None:
        self._lacking.pop(key, None)
        heapq.heappush(self._ready, (self._messages[key]["priority"], next(self._order), key))
        self._run_next()

    def _run_next(self) -> None:
        while self._running is None and self._ready:
            _, _, key = heapq.heappop(self._ready)
            if key not in self._messages:  # it was stolen or released
                continue
            self._running = key
            seconds = self._merge if "-merge-" in key else 0.0 if "-plan-" in key else self._leaf
            asyncio.get_running_loop().call_later(seconds, self._ended, key, time.time())

    def _ended(self, key: Any, begin: float) -> None:
        message = self._messages.pop(key)
        self._held.add(key)
        self._running = None
        self._send(
            "task-finished",
            status="OK",
            key=key,
            run_id=message["run_id"],
            nbytes=1000,
            type=_KIND,
            typename="float",
            metadata={},
            thread=1,
            startstops=[{"action": "compute", "start": begin, "stop": time.time()}],
        )
        self._run_next()


async def serve(address: str, number: int, leaf: float, merge: float, latency: float) -> None:
    """Run so many workers until the scheduler ends."""
    stubs = [StubWorker(address, i, leaf, merge, latency) for i in range(number)]
    async with rpc(address) as scheduler:
        for stub in stubs:
            await stub.start()
        print("ready", flush=True)
        beats = [asyncio.create_task(stub.beat(scheduler)) for stub in stubs]
        await asyncio.gather(*(stub.listen() for stub in stubs))
        for beat in beats:
            beat.cancel()


if __name__ == "__main__":
    ADDRESS, COUNT, *SECONDS = sys.argv[1:]
    asyncio.run(serve(ADDRESS, int(COUNT), *map(float, SECONDS)))
