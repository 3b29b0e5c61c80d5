"""What a power cut leaves of a cluster's files: tests/fakes/faulty.so writes down what was made durable and when, and
restore() puts the files as they would be had the power gone at any moment of it."""
import ctypes, hashlib, os, shutil, struct
from pathlib import Path

from harness import BIN

FAULTY = BIN.parent / "tests" / "fakes" / "faulty.so"
PRELOAD = ("LD_PRELOAD", "BOOST_TEST_FAULT", "BOOST_TEST_FAULT_LOG", "BOOST_TEST_DISK")


def content(path):
    """{name: digest} of a directory's files."""
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(Path(path).glob("*"))}


def key_of(path):
    """Inode and time of birth, as faulty.so tells them; the latter is 0 where a file system does not have it."""
    buf = ctypes.create_string_buffer(256)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.statx(-100, os.fsencode(path), 0x100, 0xFFF, buf) < 0:  # AT_FDCWD, AT_SYMLINK_NOFOLLOW
        raise OSError(ctypes.get_errno(), path)
    inode, = struct.unpack_from("<Q", buf, 32)
    s, ns = struct.unpack_from("<qI", buf, 80)
    return f"{inode}-{s}.{ns:09d}"


class Disk:
    """The journal of everything below `root`; what lies there already is taken to be durable.

    `env` is for the processes that write to it. Moments are numbers: now() is that of the newest entry.
    """

    def __init__(self, root):
        self.root, self.journal = Path(root), Path(f"{root}.journal")
        self.journal.mkdir()
        self.env = {"LD_PRELOAD": str(FAULTY), "BOOST_TEST_DISK": f"{self.journal} {root}"}
        self.key, self.known = key_of(root), {}
        self._take(self.root, self.key)

    def _take(self, path, key):
        entries = []
        for e in os.scandir(path):
            if e.is_dir(follow_symlinks=False) or e.is_file(follow_symlinks=False):
                k = key_of(e.path)
                entries.append(("d" if e.is_dir(follow_symlinks=False) else "f", k, e.stat().st_mode & 0o7777, e.name))
                if e.is_dir(follow_symlinks=False):
                    self._take(e.path, k)
                else:
                    self.known[k] = Path(e.path).read_bytes()
        self.known[key] = entries

    def now(self):
        try:
            return int((self.journal / "next").read_text())
        except (FileNotFoundError, ValueError):
            return 0

    def entries(self):
        """(moment, fsync|change, f|d, key, path), oldest first."""
        try:
            lines = (self.journal / "list").read_text().splitlines()
        except FileNotFoundError:
            return []
        return [(int(n), what, kind, key, path) for n, what, kind, key, path in (x.split(" ", 4) for x in lines)]

    def _listing(self, moment):
        lines = (self.journal / str(moment)).read_text().splitlines()
        return [(kind, key, int(mode, 8), name) for kind, key, mode, name in (x.split(" ", 3) for x in lines)]

    def at(self, moment, eager=False, without=()):
        """{path below root: bytes, or None of a directory} as of that moment.

        What was not synced is lost. With `eager` the disk has kept every change of a directory at once, and of files
        what was synced only: names without bytes. `without`: moments whose fsync lied.
        """
        state = dict(self.known)
        for n, what, kind, key, _ in self.entries():
            if n <= moment and n not in without and (what == "fsync" or eager):
                state[key] = n
        found, modes = {}, {}

        def walk(key, path):
            inside = state.get(key, [])
            for kind, k, mode, name in self._listing(inside) if isinstance(inside, int) else inside:
                at = path / name
                modes[at] = mode
                if kind == "d":
                    found[at] = None
                    walk(k, at)
                else:
                    data = state.get(k, b"")
                    found[at] = (self.journal / str(data)).read_bytes() if isinstance(data, int) else data
        walk(self.key, Path())
        self.modes = modes
        return found

    def restore(self, names, moment, **how):
        """Puts the named things below root as they were durable at that moment."""
        for name in names:
            shutil.rmtree(self.root / name, ignore_errors=True)
        for path, data in self.at(moment, **how).items():
            if path.parts[0] not in names:
                continue
            if data is None:
                (self.root / path).mkdir()
            else:
                (self.root / path).write_bytes(data)
            os.chmod(self.root / path, self.modes[path])

    def close(self):
        shutil.rmtree(self.journal, ignore_errors=True)
