#!/usr/bin/env python3
"""Each bug of mutants.py, planted in a copy of its file, is caught by the simulator within a few thousand seeds.

Copies and programs lie in $BOOST_TEST_DIR; nothing of it is in what ships.
"""
# time limit: 300
import os, re, subprocess, sys
from pathlib import Path

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from mutants import MUTANTS

ROOT = Path(os.environ.get("BOOST_ROOT", Path(__file__).resolve().parents[2]))
BUILD = Path(os.environ["BOOST_BIN"]).parent if "BOOST_BIN" in os.environ else ROOT / "build"
WORK = Path(os.environ.get("BOOST_TEST_DIR", BUILD / "sim" / "mutants"))
SEEDS = 6000
STALE = 3  # bugs that no longer fit: skipped, not more
CC = os.environ.get("CC", "cc").split()

class Stale(Exception):
    pass

def plant(source, text, instead):
    code = (ROOT / source).read_text()
    count = code.count(text)
    if count != 1:
        raise Stale(f"{source} has {count} times what is to be changed; plant the bug anew in mutants.py")
    return code.replace(text, instead)

def build(name, source, code):
    folder = WORK / name
    folder.mkdir(parents=True, exist_ok=True)
    copy = folder / Path(source).name
    copy.write_text(code)
    program = folder / "simulator"
    lib = BUILD / "lib"
    subprocess.run(CC + ["-std=c17", "-O1", "-w", "-D_GNU_SOURCE", f"-I{ROOT}", f"-I{BUILD}/gen", "-fno-strict-aliasing",
                         "-o", str(program), str(copy), str(lib / "libsim.a"), str(lib / "libworld.a"),
                         str(lib / "libdaemon.a"), str(lib / "libstore.a"), str(lib / "libplan.a"),
                         str(lib / "libproto.a"), "-lsqlite3", "-lprotobuf-c", "-ljansson", "-lm", "-pthread"], check=True)
    return program

def main():
    only = sys.argv[1] if len(sys.argv) > 1 else ""
    chosen = [m for m in MUTANTS if only in m[0]]
    failed = stale = 0
    print(f"1..{len(chosen)}")
    for i, (name, source, text, instead, invariant) in enumerate(chosen, 1):
        try:
            program = build(name, source, plant(source, text, instead))
            run = subprocess.run([str(program), "--seeds", "1", str(SEEDS)], capture_output=True, text=True, timeout=120)
            found = re.search(r'^seed (\d+): "([^"]+)"', run.stdout, re.M)
            if run.returncode == 0:
                raise AssertionError(f"{SEEDS} seeds do not find it")
            if found and invariant and found.group(2) != invariant:
                raise AssertionError(f"found as \"{found.group(2)}\", not \"{invariant}\"\n{run.stdout}")
            how = f"seed {found.group(1)}: {found.group(2)}" if found else f"died with {run.returncode}"
            print(f"ok {i} - {name} # {how}", flush=True)
        except Stale as e:
            stale += 1
            failed += stale > STALE
            print(f"ok {i} - {name} # SKIP {e}" if stale <= STALE else f"not ok {i} - {name}: {e}", flush=True)
        except (AssertionError, subprocess.SubprocessError) as e:
            failed += 1
            print(f"not ok {i} - {name}", flush=True)
            print("\n".join("# " + line for line in str(e).splitlines()), flush=True)
    return 1 if failed else 0

sys.exit(main())
