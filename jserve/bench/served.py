"""A server in a process of its own, for those who judge it from outside. Knows its command and what
its log says: not what it is asked."""

from __future__ import annotations

import asyncio
import re
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from jserve.errors import EngineDead

ROOT = Path(__file__).resolve().parents[2]
START_S = 600.0  # a first start compiles every step
STOP_S = 120.0  # then it is killed
_SERVE = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from jserve.server.main import run; run()"
_READY = re.compile(r"\] ready: .* on (\S+:\d+),")
_URL = re.compile(r"HTTP answers on (\S+)")
_RECORD = re.compile(r"^(?=[A-Z]\d{4} )", re.MULTILINE)  # a log's record, of one line or more


@dataclass
class Served:
    """A server that is ready: its gRPC target and its URL. `errors` and `exit_code` are known when
    it has ended: its log's records of errors, and its process's status."""

    process: asyncio.subprocess.Process
    target: str
    url: str
    errors: list[str] = field(default_factory=list)
    exit_code: int | None = None


@asynccontextmanager
async def served(*flags: str) -> AsyncIterator[Served]:
    """Serves on free ports of this machine, and ends the server as SIGTERM does.

    Raises:
      EngineDead: it ended before it was ready; with its last words.
      TimeoutError: it was not ready after START_S seconds.
    """
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with log.open("wb") as file:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-c", _SERVE, "--port=0", "--http_port=0", *flags), stderr=file
            )
        server = None
        try:
            async with asyncio.timeout(START_S):
                while not (ready := _READY.search(text := log.read_text())):
                    if process.returncode is not None:
                        raise EngineDead(f"the server ended before it was ready:\n{text[-2000:]}")
                    await asyncio.sleep(0.1)
            url = _URL.search(text)
            server = Served(process, ready[1], url[1] if url else "")
            yield server
        finally:
            if process.returncode is None:
                process.terminate()
            try:
                exit_code = await asyncio.wait_for(process.wait(), STOP_S)
            except TimeoutError:
                process.kill()
                exit_code = await process.wait()
            if server:
                records = _RECORD.split(log.read_text(errors="replace"))
                server.errors = [record for record in records if record[:1] in ("E", "F")]
                server.exit_code = exit_code
