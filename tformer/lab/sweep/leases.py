"""Leases: which process of which host does what, told by files in a directory that the hosts share; there is no server.

The lease of a name is its file of the highest generation, NAME.GENERATION. Who takes it creates the next generation,
which the file system lets only one process do. A generation is held until its holder releases it, or is gone: a process
of this host that has ended is gone at once; of another host, one whose file has not changed for `PATIENCE` seconds of
the clock of who looks. Clocks of different hosts are never compared. A file that is cut or empty counts as held, and so
goes by time alone.
"""

import contextlib
import dataclasses
import errno
import fcntl
import json
import os
import pathlib
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

RENEW_SECONDS = 5.0  # between the renewals of a lease by its holder
PATIENCE = 60.0  # seconds without a renewal after which other hosts take a holder for dead
LENGTH = 512  # bytes of a lease; all are of one length, so that none is read as a mixture of two


class Holder(NamedTuple):
    """A process that takes leases."""

    host: str  # what tells hosts, their boots and containers apart
    pid: int
    started: int  # ticks after the boot; another process may have the same number later

    @classmethod
    def here(cls) -> 'Holder':
        """Returns this process; where the system has no /proc, as one that only its silence tells to be gone."""
        try:
            boot = pathlib.Path('/proc/sys/kernel/random/boot_id').read_text().strip()
            host = f'{socket.gethostname()[:64]}/{boot}/{os.readlink("/proc/self/ns/pid")}'
            return cls(host, os.getpid(), _start_of(os.getpid()) or 0)
        except OSError:
            return cls(f'{socket.gethostname()[:64]}/{secrets.token_hex(8)}', os.getpid(), 0)

    def sees_end_of(self, other: 'Holder') -> bool:
        """Returns whether a process is one of this host that has ended."""
        return self.host == other.host and _start_of(other.pid) != other.started


def _start_of(pid: int) -> int | None:
    """Returns when a process of this host began, in ticks; None: there is none, or it has ended."""
    try:
        state, *fields = pathlib.Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()
    except OSError:
        return None
    return None if state in 'ZX' else int(fields[18])


class Found(NamedTuple):
    """What a lease's file says."""

    generation: int  # 0: there is no file
    holder: Holder | None = None  # None: it is free, or cannot be read
    free: bool = True
    deaths: int = 0  # how many processes the job has ended
    text: bytes = b''


@dataclasses.dataclass
class Lease:
    """A lease that this process holds, until it is released."""

    name: str
    file: pathlib.Path
    holder: Holder
    deaths: int
    _descriptor: int
    _beat: int = 0

    def renew(self) -> bool:
        """Tells the others that this process lives; returns whether the lease is still its own."""
        self._beat += 1
        if not self._is_own():
            return False
        try:
            self._write({'beat': self._beat})
        except OSError as error:
            if error.errno == errno.ESTALE:  # of a network's file system: another host has deleted the file
                return False
        return self._is_own()

    def release(self, *, done: bool = False, deaths: int | None = None) -> None:
        """Gives the lease back; `deaths` is what the next holder finds. The file of a job that is `done` goes."""
        if done and self._is_own():
            with contextlib.suppress(OSError):
                self.file.unlink()
        self.deaths = self.deaths if deaths is None else deaths
        try:
            self._write({'free': True})
        except OSError:  # the disk is full, or another host has deleted the file
            self.discard()
        else:
            os.close(self._descriptor)

    def discard(self) -> None:
        """Deletes the file of the lease, as if it had not been taken."""
        with contextlib.suppress(OSError):
            self.file.unlink()
        os.close(self._descriptor)

    def _is_own(self) -> bool:
        """Returns whether nobody else has taken the lease, by creating a later generation, or deleted its file."""
        try:
            return _newest(self.file.parent, self.name) == int(self.file.name.rpartition('.')[2])
        except OSError:  # a file system that does not answer now may do so later
            return True

    def _write(self, state: dict[str, Any]) -> None:
        fields = {**self.holder._asdict(), 'deaths': self.deaths, **state}
        os.pwrite(self._descriptor, json.dumps(fields).encode().ljust(LENGTH - 1) + b'\n', 0)
        os.fsync(self._descriptor)  # a client of NFS may keep it to itself for half a minute


class Leases:
    """The leases in a directory, as one process sees them."""

    def __init__(
        self,
        directory: pathlib.Path,
        holder: Holder | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.directory, self.holder, self._clock = directory, holder or Holder.here(), clock
        self._listed: dict[str, int] = {}  # name -> the highest generation
        self._seen: dict[str, tuple[int, bytes, float]] = {}  # name -> (generation, text, since when it stands so)
        self._first_look: float | None = None  # when it ended
        directory.mkdir(parents=True, exist_ok=True)

    def look(self) -> None:
        """Reads which leases there are. Every other method goes by the latest look."""
        found: dict[str, int] = {}
        for entry in os.listdir(self.directory):
            name, _, generation = entry.rpartition('.')
            if generation.isdecimal():
                found[_name(name)] = max(found.get(_name(name), 0), int(generation))
        self._listed = found
        for name in found:
            self._watch(name)
        self._first_look = self._clock() if self._first_look is None else self._first_look

    def take(self, name: str) -> Lease | None:
        """Takes a lease; None: another process holds it, or is quicker."""
        found = self.read(name)
        if not self._is_open(name, found):
            return None
        file = self.directory / _file_name(name, found.generation + 1)
        try:
            descriptor = os.open(file, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o666)
        except FileExistsError:
            return None
        lease = Lease(name, file, self.holder, found.deaths, descriptor)
        try:
            lease._write({'beat': 0})
        except OSError:  # the disk is full
            lease.discard()
            raise
        if _newest(self.directory, name) != found.generation + 1:  # this process was slow, and others have been here
            lease.discard()
            return None
        if found.generation:
            with contextlib.suppress(OSError):
                (self.directory / _file_name(name, found.generation)).unlink()
        self._listed[name] = found.generation + 1
        return lease

    def is_held(self, name: str) -> bool:
        """Returns whether a process holds a lease, this one or another that is not known to be gone."""
        return name in self._listed and not self._is_open(name, self.read(name))

    def is_near(self, name: str) -> bool:
        """Returns whether the holder of a lease is of this host, so that it is known at once whether it lives."""
        found = self.read(name)
        return found.holder is not None and found.holder.host == self.holder.host

    def is_alive(self, name: str) -> bool:
        """Returns whether the holder of a lease that is held is of this host, or has written since the first look."""
        return self.is_near(name) or (self._first_look is not None and self._watch(name) > self._first_look)

    def names(self) -> list[str]:
        """Returns the names of all leases, held or free."""
        return list(self._listed)

    def read(self, name: str) -> Found:
        """Returns what the file of a lease says."""
        generation = self._listed.get(name, 0)
        if not generation:
            return Found(0)
        try:
            text = (self.directory / _file_name(name, generation)).read_bytes()
        except OSError:
            text = b''
        try:
            fields = json.loads(text)
            holder = Holder(str(fields['host']), int(fields['pid']), int(fields['started']))
            free, deaths = fields.get('free') is True, int(fields['deaths'])
        except (ValueError, KeyError, TypeError):
            return Found(generation, None, False, 0, text)
        return Found(generation, holder, free, deaths, text)

    def _is_open(self, name: str, found: Found) -> bool:
        """Returns whether the lease can be taken."""
        if found.free or (found.holder not in (None, self.holder) and self.holder.sees_end_of(found.holder)):
            return True
        if found.holder is not None and found.holder.host == self.holder.host and found.holder.started:
            return False  # it lives, however busy it is
        return self._clock() - self._watch(name, found) > PATIENCE

    def _watch(self, name: str, found: Found | None = None) -> float:
        """Returns since when a lease is known to stand as it does."""
        found = found or self.read(name)
        seen = self._seen.get(name)
        if seen is None or seen[:2] != (found.generation, found.text):
            seen = self._seen[name] = found.generation, found.text, self._clock()
        return seen[2]


def _newest(directory: pathlib.Path, name: str) -> int:
    """Returns the highest generation of a lease; 0: there is none."""
    start = _file_name(name, 0)[:-1]
    ends = (entry.removeprefix(start) for entry in os.listdir(directory) if entry.startswith(start))
    return max((int(end) for end in ends if end.isdecimal()), default=0)


def _file_name(name: str, generation: int) -> str:
    return f'{name.replace("/", "@")}.{generation}'


def _name(file_name: str) -> str:
    return file_name.replace('@', '/')


@contextlib.contextmanager
def deciding(directory: pathlib.Path, patience: float = PATIENCE) -> Iterator[bool]:
    """Lets one process at a time decide in its block, of all hosts that share the directory, where it has locks.

    Gives whether this is the one; if not, others have been for `patience` seconds, as one that is halted in its block.
    Nothing is done twice without it: leases see to that. The system ends the lock with the process.
    """
    directory.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + patience
    with (directory / 'lock').open('a') as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() < end:
                    time.sleep(0.01)
                    continue
                yield False
                return
            except OSError:  # the file system has no locks
                pass
            yield True
            return
