#!/usr/bin/env python3
"""Runs every test program, each alone in a private directory under a time limit.

A test program prints TAP (cmocka does with CMOCKA_MESSAGE_OUTPUT=TAP; the Python
ones through tests/e2e/harness.py). Output is shown only for what failed. The last
line is "N passed, N failed, N skipped"; the exit status is 0 only without failures
and with at least one test run.

Programs: <build>/tests/<room>/*_test, tests/e2e/*_test.py, tests/issues/*_test.py, tests/sim/*_test.py;
with --full also tests/full/*_test.py; with --folder F instead tests/F/*_test.py; with --gpu instead
<build>/gpu/*_test and tests/gpu/*_test.py, which want a GPU. A first comment line "# time limit: N" in a
Python test, or a file name in LIMITS, raises the limit of 120 s.
"""
import argparse, os, re, shutil, signal, subprocess, sys, tempfile, time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DEFAULT_LIMIT = 120

def limit_of(program):
    if program.suffix == ".py":
        m = re.search(r"^# time limit: (\d+)", program.read_text(), re.M)
    else:
        room = program.parent.name
        source = ROOT / "tests" / (room if room == "gpu" else f"unit/{room}") / (program.name + ".c")
        m = re.search(r"time limit: (\d+) s", source.read_text()[:2000]) if source.exists() else None
    return int(m.group(1)) if m else DEFAULT_LIMIT

def left_running(directory):
    """Pids of processes started on the test's private directory: daemons have sessions of their own."""
    pids = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            command = (entry / "cmdline").read_bytes()
        except OSError:
            continue  # gone meanwhile
        if os.fsencode(directory) in command:
            pids.append(int(entry.name))
    return pids

def kill_all(directory):
    """SIGKILL until none is left: a keeper may be starting a rank just now."""
    found = pids = left_running(directory)
    while pids:
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        pids = left_running(directory)
    return found

def run_one(program, build, verbose):
    tmp = Path(tempfile.mkdtemp(prefix=f"boost-{program.stem}-"))
    tmp.chmod(0o711)  # some tests run parts of themselves as another user
    env = dict(os.environ, CMOCKA_MESSAGE_OUTPUT="TAP", BOOST_BIN=str(build / "bin"), BOOST_ROOT=str(ROOT),
               TMPDIR=str(tmp), BOOST_TEST_DIR=str(tmp), DNNL_VERBOSE="0", PYTHONDONTWRITEBYTECODE="1")
    for name in ("BOOST_SOCKET", "XDG_RUNTIME_DIR", "NO_COLOR"):
        env.pop(name, None)
    argv = [sys.executable, str(program)] if program.suffix == ".py" else [str(program)]
    start = time.monotonic()
    limit = limit_of(program)
    child = subprocess.Popen(argv, cwd=tmp, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                             start_new_session=True, text=True, errors="replace")
    try:
        out, _ = child.communicate(timeout=limit)
        note = ""
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        kill_all(tmp)  # or a daemon of the test would hold the pipe open
        out, _ = child.communicate()
        note = f"ran past its limit of {limit} s"
    try:  # nothing of a test may outlive it
        os.killpg(child.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    found = kill_all(tmp)
    if found and not note:
        note = f"left {len(found)} processes running"
    took = time.monotonic() - start
    ok = re.findall(r"^\s*ok \d+.*$", out, re.M)
    bad = re.findall(r"^\s*not ok \d+.*$", out, re.M)
    # cmocka 1.1.5 prints a skipped test as "not ok N # SKIP name"
    skipped = [line for line in ok + bad if re.search(r"# skip", line, re.I)]
    ok, bad = ([line for line in lines if line not in skipped] for lines in (ok, bad))
    passed, failed = len(ok), len(bad)
    if note or (child.returncode != 0 and not bad) or not (ok or bad or skipped):
        failed += 1
        note = note or f"exit status {child.returncode} after {len(ok)} tests"
    name = program.relative_to(build if build in program.parents else ROOT)
    print(f"{'FAIL' if failed else 'ok  '} {name}  {passed} passed, {failed} failed, {len(skipped)} skipped  ({took:.1f} s)"
          + (f"  {note}" if note else ""), flush=True)
    if failed:
        print("  | " + "\n  | ".join(out.splitlines()[-200:]))
        print(f"  files kept in {tmp}", flush=True)
    else:
        for line in out.splitlines() if verbose else skipped:
            print("     " + line.strip(), flush=True)
        shutil.rmtree(tmp, ignore_errors=True)
    return passed, failed, len(skipped)

def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--build", default="build")
    p.add_argument("--full", action="store_true")
    p.add_argument("--gpu", action="store_true")
    p.add_argument("--folder", help="only tests/FOLDER/*_test.py, for example soak")
    p.add_argument("--verbose", action="store_true", help="what passed programs say, too")
    p.add_argument("pattern", nargs="?", default="", help="only programs whose path contains this")
    args = p.parse_args()
    build = Path(args.build).resolve()
    programs = sorted((build / "tests").glob("*/*_test"))
    folders = ["e2e", "issues", "sim"] + (["full"] if args.full else [])
    if args.gpu:
        programs, folders = sorted((build / "gpu").glob("*_test")), ["gpu"]
    if args.folder:
        programs, folders = [], [args.folder]
    for folder in folders:
        programs += sorted((ROOT / "tests" / folder).glob("*_test.py"))
    programs = [x for x in programs if args.pattern in str(x)]
    start = time.monotonic()
    total = [0, 0, 0]
    for program in programs:
        total = [a + b for a, b in zip(total, run_one(program, build, args.verbose))]
    print(f"{len(programs)} programs in {time.monotonic() - start:.0f} s")
    print(f"{total[0]} passed, {total[1]} failed, {total[2]} skipped")
    return 0 if total[1] == 0 and total[0] > 0 else 1

sys.exit(main())
