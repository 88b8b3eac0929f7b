"""Stores and tables behind URLs: servers that fail for a moment, or serve whole files only."""

import asyncio
import contextlib
import re
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any

from cme_dask.errors import ResourceError, remedy, without_secrets

_BUSY = {408, 425, 429, 500, 502, 503, 504}
_PAUSES = (0.5, 1.0, 2.0, 4.0)  # seconds before a server is asked again
_LONGEST = 30.0  # seconds that a server may ask for by Retry-After
_RANGE_FROM = re.compile(r"bytes=(\d+)-")


class WholeFilesOnly(ResourceError):
    """A server was asked for a part of a file, and sent all of it."""


async def persistent(request: Any, handler: Callable[[Any], Awaitable[Any]]) -> Any:
    """A middleware of aiohttp's clients: ask a server again that fails for a moment.

    Raises
    ------
    WholeFilesOnly
        If it answers another part of a file than the one it was asked for.
    """
    import aiohttp

    for pause in (*_PAUSES, None):
        try:
            response = await handler(request)
        except (aiohttp.ServerDisconnectedError, ConnectionResetError, TimeoutError):
            if pause is None:
                raise
        else:
            first = _RANGE_FROM.match(request.headers.get("Range", ""))
            if response.status == 200 and first is not None and int(first[1]):
                response.close()
                raise WholeFilesOnly(
                    f"the server of {request.url} serves whole files only (it ignores Range): "
                    "download the file, or use another server"
                )
            if pause is None or response.status not in _BUSY:
                return response
            with contextlib.suppress(ValueError):
                pause = max(pause, float(response.headers.get("Retry-After", 0.0)))
            response.close()
        await asyncio.sleep(min(pause, _LONGEST))


_MARKS = "mtime", "ETag", "etag", "LastModified", "Last-Modified", "updated", "created"


def time_mark(about: Mapping[str, Any]) -> str | None:
    """Size and time of change, or ETag, as a file system of fsspec tells them; None if it doesn't.

    Parameters
    ----------
    about
        What its ``info`` says of a file.
    """
    mark = next((about[key] for key in _MARKS if about.get(key) is not None), None)
    return None if mark is None else f"{about.get('size')} {mark}"


def is_http(url: str) -> bool:
    """Whether a URL is one of HTTP."""
    return url.startswith(("http://", "https://"))


def with_persistence(url: str, options: Mapping[str, Any] | None) -> dict[str, Any]:
    """Options of the file system of a URL, of HTTP with requests that are repeated."""
    result = dict(options or {})
    if is_http(url):
        client = dict(result.get("client_kwargs") or {})
        client["middlewares"] = (persistent, *client.get("middlewares", ()))
        result["client_kwargs"] = client
    return result


def whole_files_only(files: Any, path: str) -> bool:
    """Whether a file is behind an HTTP server that does not serve parts of it."""
    if not is_http(path):
        return False
    try:
        return len(files.cat_file(path, 1, 2)) > 1
    except WholeFilesOnly:
        return True
    except Exception as error:
        if isinstance(error, (OSError, ValueError)) or _of_client(error):
            return False  # those who read it say why
        raise


_CLIENTS = {"adlfs", "aiobotocore", "aiohttp", "azure", "botocore", "gcsfs", "google"}


def _of_client(error: BaseException) -> bool:
    """Whether an error is one of the clients behind fsspec, which are not imported for this."""
    return type(error).__module__.partition(".")[0] in _CLIENTS


@contextlib.contextmanager
def explained(name: str) -> Iterator[None]:
    """One sentence on what servers answer, in place of the errors of their clients."""
    try:
        yield
    except Exception as error:
        if not _of_client(error):
            raise
        status = getattr(error, "status", None)
        reason = f"HTTP {status} {getattr(error, 'message', '')}" if status else str(error)
        reason = reason.strip() or type(error).__name__
        advice = "check the address and your rights, or try again later"
        if "credential" in f"{type(error).__name__} {reason}".lower():
            advice = "give credentials in the environment or the files of the service"
            if name.startswith("s3"):
                advice += ", or read public data with " + remedy(
                    "storage_options={'anon': True}",
                    "--storage-options anon=true (FSSPEC_S3_ANON=true in the environment of "
                    "commands without this option)",
                )
        raise ResourceError(
            f"{without_secrets(name)} can't be read from its server ({reason}): {advice}"
        ) from error
