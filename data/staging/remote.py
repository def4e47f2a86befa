"""Objects in a bucket or on a web server: s3://, gs://, az:// and https:// addresses in place of paths.

obstore makes the requests. It finds credentials as its stores do: in environment variables such as AWS_ACCESS_KEY_ID
and AWS_ENDPOINT_URL, and in the machine's role.
"""
import contextlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path, PurePosixPath
from types import SimpleNamespace

from common.errors import UserError, complain, one_line

SCHEMES = ("s3://", "s3a://", "gs://", "az://", "http://", "https://")
PATIENCE = (0.5, 1, 2, 4, 8, 16)  # seconds from one attempt to the next
TIMEOUT = "60s"  # of one request
ROLE = "/latest/"  # part of the addresses of AWS's metadata service, which gives a machine the credentials of its role


class RemoteError(OSError):
    """An object cannot be read."""


class Missing(RemoteError):
    """There is no such object."""


@dataclass(frozen=True)
class RemotePath:
    """The address of an object, or of a folder of objects, with those methods of pathlib.Path that datasets need."""

    url: str
    size: int | None = None  # bytes of the object, if `inspected` has asked for them
    tag: str | None = None  # a text that changes with the object's content, if `inspected` has asked for it

    def __str__(self):
        return self.url

    def __truediv__(self, name) -> "RemotePath":
        return RemotePath(f"{self.url.rstrip('/')}/{name}")

    @property
    def name(self) -> str:
        return PurePosixPath(self.url).name

    def with_name(self, name: str) -> "RemotePath":
        return RemotePath(f"{self.url.rpartition('/')[0]}/{name}")

    def with_suffix(self, suffix: str) -> "RemotePath":
        return self.with_name(PurePosixPath(self.name).with_suffix(suffix).name)

    def relative_to(self, folder: "RemotePath") -> PurePosixPath:
        return PurePosixPath(self.url.removeprefix(f"{folder.url.rstrip('/')}/"))

    def stat(self) -> SimpleNamespace:
        """Returns its size in bytes as st_size, and its tag as st_mtime_ns."""
        found = self if self.tag else self.inspected()
        return SimpleNamespace(st_size=found.size, st_mtime_ns=found.tag)

    def inspected(self) -> "RemotePath":
        """Returns this address with the object's size and tag. Raises RemoteError."""
        meta = _with_patience(self.url, lambda store, key: store.head(key))
        return replace(self, size=meta["size"], tag=_tag(meta))

    def read_bytes(self) -> bytes:
        """Returns the content. Raises RemoteError."""
        return _with_patience(self.url, lambda store, key: bytes(store.get(key).bytes()))

    def read_text(self) -> str:
        return self.read_bytes().decode()

    def read_range(self, start: int, end: int) -> bytes:
        """Returns the bytes from `start` to `end` (exclusive). Raises RemoteError, also if the object has changed."""
        def read(store, key):
            got = store.get(key, options={"range": (start, end)})
            if (got.meta["size"], _tag(got.meta)) != (self.size, self.tag) and self.tag:
                raise UserError(f"{self.url} has changed since training started; start again")
            content = bytes(got.bytes())
            if len(content) != end - start:
                raise RemoteError(f"{self.url}: {len(content)} of {end - start} bytes came")
            return content

        return _with_patience(self.url, read)


def _tag(meta) -> str:
    return meta["e_tag"] or str(meta["last_modified"])


def located(place) -> Path | RemotePath:
    """Returns a RemotePath for an address and a Path for any other text."""
    if isinstance(place, RemotePath):
        return place
    return RemotePath(str(place)) if is_remote(place) else Path(place)


def is_remote(place) -> bool:
    return str(place).startswith(SCHEMES)


@contextlib.contextmanager
def ranges(path: Path | RemotePath) -> Iterator[Callable[[int, int], bytes]]:
    """Yields a function that returns the bytes from a start to an end (exclusive) of a file or an object."""
    if isinstance(path, RemotePath):
        yield path.read_range
        return
    with open(path, "rb") as file:
        def read(start: int, end: int) -> bytes:
            file.seek(start)
            return file.read(end - start)

        yield read


@cache
def _store(root: str):
    """Returns obstore's store of a scheme and a host or bucket."""
    from obstore.store import from_url

    options = {"timeout": TIMEOUT, "allow_http": True}
    store = from_url(root, client_options=options, retry_config={"max_retries": 0})
    if root.startswith("s3") and "AWS_ACCESS_KEY_ID" not in os.environ:
        _check_role(root, store)
    return store


def _check_role(root: str, store) -> None:
    """Raises RemoteError if no credentials are set and AWS's metadata service gives none."""
    from obstore.exceptions import BaseError

    try:
        store.head("dataset.json")
    except (BaseError, OSError) as error:
        if ROLE in reason(error):
            raise RemoteError(f"{root}: there are no credentials; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or "
                              "give the machine a role") from None


def _with_patience(url: str, action: Callable):
    """Returns the result of a request, which is tried again with growing pauses. Raises RemoteError.

    action: a function of obstore's store of the address and the object's key in it.
    """
    from obstore import exceptions

    scheme, _, rest = url.partition("://")
    host, _, key = rest.partition("/")
    store = _store(f"{scheme}://{host}")
    final = (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError, exceptions.PreconditionError,
             exceptions.InvalidPathError, exceptions.NotSupportedError)
    for pause in (*PATIENCE, None):
        try:
            return action(store, key)
        except (FileNotFoundError, exceptions.NotFoundError):
            raise Missing(f"{url} does not exist") from None
        except final as error:
            raise RemoteError(f"{url}: {reason(error)}") from None
        except (exceptions.BaseError, OSError) as error:
            if pause is None:
                raise RemoteError(f"{url}: {reason(error)}") from None
            complain(f"{url}: {reason(error)}; trying again in {pause:g} s", "data")
            time.sleep(pause)


def reason(error) -> str:
    """Returns an error of obstore in one line, without the debugging text that follows it."""
    return one_line(str(error).partition("\n\nDebug")[0])[:300]
