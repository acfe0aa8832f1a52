"""Owns where files are, on a disk or an object store, and their durability; knows not what they hold."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, NamedTuple
from urllib.parse import urlparse

import pyarrow as pa
import pyarrow.fs as pafs

from trajstore.errors import InputError, StorageError
from trajstore.store.disk import sync

LOG = "_delta_log"
ANSWER_SECONDS = 60.0
"""How long a bucket may be silent; the client's own 3 s are too few for a server under load."""

_COPIED = 8 << 20


class Entry(NamedTuple):
    """A file below a place: its path from there, its size, and when it was last written (seconds)."""

    name: str
    bytes: int
    modified: float


class Place:
    """A folder on disk or a prefix of a bucket; names of files are relative to it."""

    def __init__(
        self, given: str, uri: str, filesystem: pafs.FileSystem, root: str, options: Mapping[str, str]
    ) -> None:
        self._given = given
        self.uri = uri
        self.filesystem = filesystem
        self.root = root
        self.options = dict(options)

    @classmethod
    def of(cls, where: str | Path | Place, options: Mapping[str, str] | None = None) -> Place:
        """The place that a path or an `s3://` URI names.

        Args:
            where: a path, or `s3://bucket/prefix`.
            options: for S3, the usual names (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN,
                AWS_REGION, AWS_ENDPOINT_URL, AWS_ALLOW_HTTP); what is not there comes from the environment.
                An endpoint that begins with http:// is taken at its word unless AWS_ALLOW_HTTP says no.

        Raises:
            InputError: the URI has another scheme.
        """
        if isinstance(where, Place):
            return where
        scheme = urlparse(str(where)).scheme if "://" in str(where) else ""
        if scheme == "s3":
            found = {**{k: v for k, v in os.environ.items() if k.startswith("AWS_")}, **(options or {})}
            if found.get("AWS_S3_ALLOW_UNSAFE_RENAME", "").lower() in ("1", "true", "yes"):
                raise InputError(
                    "AWS_S3_ALLOW_UNSAFE_RENAME lets two writers overwrite each other's commits",
                    hint="unset it: commits here are conditional puts",
                )
            if found.get("AWS_ENDPOINT_URL", "").startswith("http://"):
                found.setdefault("AWS_ALLOW_HTTP", "true")
            root = str(where).removeprefix("s3://").rstrip("/")
            return cls(str(where), f"s3://{root}", _s3(found), root, found)
        if scheme:
            raise InputError(
                f"{where} has the scheme {scheme!r}", hint="a store is a local path or s3://bucket/prefix"
            )
        folder = Path(where).absolute()
        if re.search("%[0-9A-Fa-f]{2}", str(folder)):
            raise InputError(
                f"{where} has a per cent sign and two hex digits in it, which Delta misreads",
                hint="choose another name",
            )
        return cls(str(where), folder.as_uri(), pafs.LocalFileSystem(), str(folder), options or {})

    @property
    def folder(self) -> Path | None:
        """The folder, None on an object store."""
        return Path(self.root) if isinstance(self.filesystem, pafs.LocalFileSystem) else None

    def __str__(self) -> str:
        return self._given

    def child(self, name: str) -> Place:
        """The place below this one."""
        uri = f"{self.uri}/{name}" if self.folder is None else (self.folder / name).as_uri()
        return Place(f"{self}/{name}", uri, self.filesystem, self.path(name), self.options)

    def path(self, name: str) -> str:
        """What the filesystem calls a file."""
        return f"{self.root}/{name}"

    def url(self, name: str) -> str:
        """What other programs call a file: an absolute path, or an URI."""
        return self.path(name) if self.folder is not None else f"{self.uri}/{name}"

    def exists(self, name: str) -> bool:
        """Whether there is a file of that name."""
        return bool(self.filesystem.get_file_info(self.path(name)).type == pafs.FileType.File)

    def is_table(self) -> bool:
        """Whether a commit log is here."""
        return bool(self.entries(LOG))

    def is_free(self) -> bool:
        """Whether nothing is here yet: no file, and no folder with anything in it."""
        if self.folder is not None:
            return not self.folder.exists() or (self.folder.is_dir() and not any(self.folder.iterdir()))
        return not self.entries()

    def entries(self, below: str = "") -> list[Entry]:
        """All files below a name, at any depth."""
        base = self.path(below) if below else self.root
        everything = pafs.FileSelector(base, allow_not_found=True, recursive=True)
        try:
            found = self.filesystem.get_file_info(everything)
        except OSError as error:
            hint = (
                "check the endpoint, the credentials and the rights: AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID, ..."
            )
            raise StorageError(
                f"{self} cannot be listed: {error}", hint=hint if self.folder is None else None
            ) from error
        cut = len(self.root) + 1
        return [
            Entry(info.path[cut:], info.size, (info.mtime_ns or 0) / 1e9)
            for info in found
            if info.type == pafs.FileType.File
        ]

    def open(self, name: str) -> pa.NativeFile:
        """A file for random reading."""
        return self.filesystem.open_input_file(self.path(name))

    def read(self, name: str) -> bytes:
        """All bytes of a file."""
        with self.filesystem.open_input_stream(self.path(name), compression=None) as stream:
            return bytes(stream.read())

    def delete(self, name: str) -> None:
        """Removes a file that is there."""
        self.filesystem.delete_file(self.path(name))

    def move(self, name: str, to: str) -> None:
        """Gives a file on disk another name, which survives a power cut."""
        if self.folder is None:
            raise InputError(f"{self} is not on a disk", hint="copy the object with another program")
        (self.folder / to).parent.mkdir(parents=True, exist_ok=True)
        (self.folder / name).rename(self.folder / to)
        for changed in (to, name):
            sync((self.folder / changed).parent)

    def discard(self, name: str) -> None:
        """Removes a file if it is there."""
        with suppress(FileNotFoundError):
            self.filesystem.delete_file(self.path(name))

    def aside(self, name: str) -> BinaryIO:
        """A file to write before it is published: of this name on the same disk, of none in the temp folder.

        A file without a name goes with its process, however that ends.
        """
        return tempfile.TemporaryFile() if self.folder is None else (self.folder / name).open("w+b")

    def drop(self, aside: str) -> None:
        """Removes a file that will not be published."""
        if self.folder is not None:
            (self.folder / aside).unlink(missing_ok=True)

    def publish(self, source: BinaryIO, aside: str, name: str) -> None:
        """Gives a finished, durable file its name; it appears whole or not at all."""
        if self.folder is not None:
            (self.folder / aside).rename(self.folder / name)
            self.sync("")
            return
        source.seek(0)
        try:
            with self.filesystem.open_output_stream(self.path(name)) as sink:
                shutil.copyfileobj(source, sink, _COPIED)
        except BaseException:
            self.discard(name)
            raise

    def sync(self, name: str) -> None:
        """Makes the bytes of a file, or the names in a folder, survive a power cut; buckets do so at once."""
        if self.folder is not None:
            sync(self.folder / name)

    def sync_entry(self, number: int) -> None:
        """Makes a snapshot's entry survive a power cut, which delta-rs does not."""
        self.sync(entry(number))
        self.sync(LOG)


def entry(number: int) -> str:
    """The log's entry of a snapshot."""
    return f"{LOG}/{number:020d}.json"


def _s3(options: Mapping[str, str]) -> pafs.S3FileSystem:
    endpoint = options.get("AWS_ENDPOINT_URL", "")
    scheme, _, host = endpoint.rpartition("://")
    return pafs.S3FileSystem(
        access_key=options.get("AWS_ACCESS_KEY_ID"),
        secret_key=options.get("AWS_SECRET_ACCESS_KEY"),
        session_token=options.get("AWS_SESSION_TOKEN"),
        region=options.get("AWS_REGION") or options.get("AWS_DEFAULT_REGION"),
        endpoint_override=host or None,
        scheme=scheme or None,
        connect_timeout=ANSWER_SECONDS,
        request_timeout=ANSWER_SECONDS,
    )
