"""A slow network: `python -m benchmarks.delay SECONDS HOST:PORT...`.

A proxy in front of each address passes on what it is sent, in order, so many seconds later. It is a
delay line and no throttle: what arrives together leaves together, up to ``_IN_FLIGHT`` bytes of
each connection and direction. The proxies' ports are printed as one line of JSON; the process ends
when its input does.
"""

import asyncio
import contextlib
import json
import sys

_READ = 1 << 18
_IN_FLIGHT = 1 << 26


class _Line:
    """Bytes under way in one direction."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._queue: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
        self._room = asyncio.Condition()
        self._held = 0

    async def take(self, reader: asyncio.StreamReader) -> None:
        """Read until the end, which travels too: an empty piece."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                data = await reader.read(_READ)
            except OSError:
                data = b""
            async with self._room:
                await self._room.wait_for(lambda: self._held < _IN_FLIGHT)
                self._held += len(data)
            self._queue.put_nowait((loop.time() + self._seconds, data))
            if not data:
                return

    async def give(self, writer: asyncio.StreamWriter) -> None:
        """Write each piece when it is due."""
        loop = asyncio.get_running_loop()
        data = b"-"
        while data:
            due, data = await self._queue.get()
            await asyncio.sleep(due - loop.time())
            with contextlib.suppress(OSError):
                writer.write(data)
                await writer.drain()
            async with self._room:
                self._held -= len(data)
                self._room.notify()
        writer.close()


async def _serve(host: str, port: int, seconds: float) -> int:
    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there, away = await asyncio.open_connection(host, port)
        except OSError:
            writer.close()
            return
        out, back = _Line(seconds), _Line(seconds)
        await asyncio.gather(out.take(reader), out.give(away), back.take(there), back.give(writer))

    server = await asyncio.start_server(connect, "127.0.0.1")
    return int(server.sockets[0].getsockname()[1])


async def _main(seconds: float, addresses: list[str]) -> None:
    targets = (address.rpartition(":") for address in addresses)
    ports = [await _serve(host, int(port), seconds) for host, _, port in targets]
    print(json.dumps(ports), flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(_main(float(sys.argv[1]), sys.argv[2:]))
