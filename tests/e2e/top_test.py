#!/usr/bin/env python3
"""boostctl top: a picture that follows the jobs, in a terminal of ours; the terminal is left as it was found."""
import fcntl, os, pty, select, signal, struct, subprocess, termios, time

from harness import BIN, run, wait_until
from jobs import Shared, endless

shared = Shared(cpu_slots=2)


class Terminal:
    """boostctl in a terminal of so many columns and rows."""

    def __init__(self, c, *args, rows=24, cols=100):
        self.main, self.side = pty.openpty()
        fcntl.ioctl(self.side, termios.TIOCSWINSZ, struct.pack("HHHH", rows, cols, 0, 0))
        self.before = termios.tcgetattr(self.side)
        self.seen = b""
        self.child = subprocess.Popen([BIN / "boostctl", *args], env=c.env, stdin=self.side, stdout=self.side,
                                      stderr=subprocess.PIPE, start_new_session=True,
                                      preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0))

    def read(self, seconds=0.1):
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if select.select([self.main], [], [], 0.02)[0]:
                self.seen += os.read(self.main, 65536)
        return self.seen.decode(errors="replace")

    def last_picture(self):
        return self.read().rpartition("\x1b[H")[2]

    def await_text(self, text, deadline=10):
        wait_until(lambda: text in self.last_picture(), deadline, f"{text!r} on the screen: {self.seen[-2000:]!r}")

    def type(self, keys):
        os.write(self.main, keys)

    def end(self, deadline=10):
        """Exit status; the terminal has to be what it was."""
        end = time.monotonic() + deadline
        while self.child.poll() is None and time.monotonic() < end:
            self.read(0.05)
        status = self.child.poll()
        assert status is not None, "top does not end"
        self.read()
        after = termios.tcgetattr(self.side)
        assert after == self.before, (after, self.before)
        assert self.seen.count(b"\x1b[?1049h") == self.seen.count(b"\x1b[?1049l") == 1, self.seen[-300:]
        assert self.seen.rstrip().endswith(b"\x1b[?25h\x1b[?1049l"), self.seen[-300:]
        os.close(self.main)
        os.close(self.side)
        self.child.stderr.close()
        return status


@shared
def test_a_picture_that_follows(c):
    t = Terminal(c, "top", "-d", "0.2")
    t.await_text("no live jobs")
    assert termios.tcgetattr(t.side)[3] & termios.ECHO == 0, "keys are not shown"
    c.job = c.submit(endless(c, name="watched"))
    t.await_text("watched")
    t.await_text("1 running")
    picture = t.last_picture()
    for part in ("JOB", "NODE", "n1", "UP", "1/2", "q quits"):
        assert part in picture, (part, picture)
    first = picture
    wait_until(lambda: t.last_picture() != first, 10, "another picture")
    t.type(b"xyz")  # nothing happens
    t.type(b"q")
    assert t.end() == 0


@shared
def test_interrupts_leave_the_terminal_as_it_was(c):
    for how in ("key", "TERM"):
        t = Terminal(c, "top")
        t.await_text("watched")
        if how == "key":
            t.type(b"\x03")
        else:
            t.child.send_signal(signal.SIGTERM)
        assert t.end() == 0, how


@shared
def test_a_small_terminal(c):
    t = Terminal(c, "top", "-d", "0.2", rows=5, cols=30)
    t.await_text("1 running")
    lines = t.last_picture().split("\r\n")
    assert len(lines) <= 5, lines
    for line in lines[:-1]:
        plain = line.replace("\x1b[K", "").replace("\x1b[0m", "")
        while "\x1b[" in plain:
            head, _, rest = plain.partition("\x1b[")
            plain = head + rest.partition("m")[2]
        assert len(plain) <= 30, (len(plain), line)
    t.type(b"q")
    assert t.end() == 0


@shared
def test_boostd_away_and_back(c):
    t = Terminal(c, "top", "-d", "0.2")
    t.await_text("watched")
    c.boostd.kill9()
    t.await_text("cannot reach boostd")
    assert "watched" in t.read()
    c.restart_boostd()
    t.await_text("q quits")
    t.type(b"q")
    assert t.end() == 0


@shared
def test_without_a_terminal(c):
    text = c.ok("top")
    assert "watched" in text and "NODE" in text and "\x1b" not in text, text
    r = c.ctl("-o", "json", "top")
    assert r.rc == 2 and "-o json status" in r.err, r
    assert c.ctl("top", "-d", "0").rc == 2 and c.ctl("top", "x").rc == 2
    r = c.ctl("--socket", c.dir / "no-such", "top")
    assert r.rc == 3 and "cannot reach boostd" in r.err, r
    c.ok("cancel", c.job, "--now")
    c.wait_state(c.job, "CANCELLED")


test_nothing_is_left = shared.last

run(globals())
