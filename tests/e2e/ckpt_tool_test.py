#!/usr/bin/env python3
"""Checkpoint tools that are killed, stopped, many, or pointed at what is hostile: nothing hangs, is lost or stays."""
import json, os, resource, shutil, signal, subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from harness import BIN, Cluster, alive, run, tiny_job, wait_until
from jobs import Shared

shared = Shared(cpu_slots=2)
made = {}


def trained(c):
    """A job that has ended, with weights enough that an export takes a while, and its last checkpoint."""
    if not made:
        text = tiny_job(c, steps=4, every=2, tp=2, name="full", hidden=512).replace("COLA", "FULL_RANK")
        made["job"] = c.submit(text.replace("rank: 8 ", "").replace("strategy: BTP", "strategy: FULL"))
        c.wait_state(made["job"], "COMPLETED")
        made["path"] = c.json("ckpt", "ls", made["job"])["checkpoints"][-1]["path"]
    return made["job"], made["path"]


def tool(*args, **kw):
    return subprocess.run([str(BIN / "boost-worker"), "ckpt", *map(str, args)], capture_output=True, text=True,
                          timeout=20, **kw)


def begun(directory, path, to):
    """An export that is stopped in the middle."""
    before = set(directory.glob(f"{to.name}.partial-*/*"))
    child = subprocess.Popen([str(BIN / "boost-worker"), "ckpt", "export", path, str(to)], stderr=subprocess.PIPE, text=True)
    wait_until(lambda: child.poll() is not None or set(directory.glob(f"{to.name}.partial-*/*")) - before)
    assert child.poll() is None, "the export was too short to be stopped"
    child.send_signal(signal.SIGSTOP)
    return child


@shared
def test_what_a_killed_one_left_goes_with_the_next(c):
    _, path = trained(c)
    directory = c.dir / "killed"
    directory.mkdir()
    to, other = directory / "out", directory / "out.partial-notes"  # of a user, and no name of ours
    other.mkdir()
    dead = begun(directory, path, to)
    dead.kill()
    dead.communicate()
    live = begun(directory, path, to)
    left = list(directory.glob("out.partial-??????"))
    assert len(left) == 1, left  # the second has taken away what the first had left, its own it keeps
    assert tool("export", path, to).returncode == 0
    assert left[0].exists()  # nobody else's that is at work
    live.send_signal(signal.SIGCONT)
    _, said = live.communicate()
    assert live.returncode == 1 and f"to {to}: Directory not empty" in said, said
    assert sorted(p.name for p in directory.iterdir()) == ["out", "out.partial-notes"]
    assert (to / "config.json").exists()


@shared
def test_checkpoints_are_no_place_for_anything_else(c):
    job, path = trained(c)
    before = sorted(os.listdir(path))
    link = c.dir / "link"
    link.symlink_to(path)
    for to in (f"{path}/mine", f"{path}/a/b", link / "mine", Path(path).parent / "step-99.a1"):
        r = c.ctl("ckpt", "export", job, to)
        assert r.rc in (5, 6) and ("directory of a checkpoint" in r.err or "directory of the checkpoints" in r.err), r
    hf = c.dir / "hf"
    c.ok("ckpt", "export", job, hf)
    for to in (path, f"{path}/deep/er"):
        r = c.ctl("ckpt", "import", hf, to)
        assert r.rc == 5 and f"directory of the checkpoints of job {job}" in r.err, r
    r = tool("export", path, c.dir / "step-99.a1")
    assert r.returncode == 1 and "name of a checkpoint" in r.stderr, r
    assert sorted(os.listdir(path)) == before
    assert not Path(path).parent.joinpath("step-99.a1").exists()
    c.ok("ckpt", "verify", job)


@shared
def test_the_directory_of_a_jobs_checkpoints_is_no_place_either(c):
    job, path = trained(c)
    own = Path(path).parent
    before = sorted(os.listdir(own))
    later = own.parent / f"{own.name.split('-')[0]}-{int(job) + 7}"  # whose job would find it there
    for verb, options in (("convert", ("--rank", 4)), ("export", ())):
        for to, whose in ((own, f"job {job}"), (own / "out", f"job {job}"), (later, f"a later job {int(job) + 7}")):
            r = c.ctl("ckpt", verb, job, to, *options)
            assert r.rc == 5 and f"directory of the checkpoints of {whose}" in r.err and "hint" in r.err, (verb, to, r)
        r = tool(verb, *options, path, own if verb == "convert" else own / "out")
        assert r.returncode == 1 and f"a checkpoint of job {job} ({own.name})" in r.stderr, (verb, r)
    elsewhere = c.dir / "elsewhere"  # of a controller that this one knows nothing of
    shutil.copytree(own, elsewhere / own.name)
    link = c.dir / "to-elsewhere"
    link.symlink_to(elsewhere / own.name)
    for to in (elsewhere / own.name, link):
        r = c.ctl("ckpt", "convert", job, to, "--rank", 4)
        assert r.rc != 0 and f"a checkpoint of job {job} ({own.name})" in r.err, r
    assert sorted(os.listdir(own)) == sorted(os.listdir(elsewhere / own.name)) == before and not later.exists()
    c.ok("ckpt", "export", job, own.parent / "out")


@shared
def test_fifos_and_directories_are_no_files(c):
    job, _ = trained(c)
    good = c.dir / "good"
    c.ok("ckpt", "export", job, good)
    for name in sorted(os.listdir(good)):
        for make in (os.mkfifo, os.mkdir):
            hf = c.dir / "bad"
            shutil.copytree(good, hf)
            (hf / name).unlink()
            make(hf / name)
            r = tool("import", hf, c.dir / "imported")
            assert r.returncode == 1 and f"{name} is not a regular file" in r.stderr, (name, r)
            shutil.rmtree(hf)
    hf = c.dir / "links"  # as the hub's cache has them
    hf.mkdir()
    for name in os.listdir(good):
        (hf / name).symlink_to(good / name)
    r = tool("import", hf, c.dir / "linked")
    assert r.returncode == 0, r


@shared
def test_models_that_cannot_be_are_damage(c):
    _, path = trained(c)
    directory = c.dir / "impossible" / Path(path).name
    shutil.copytree(path, directory)
    manifest = json.loads((directory / "manifest.json").read_text())
    for field, value in (("heads", 0), ("heads", 3), ("layers", 1000000), ("layers", -1), ("vocab", -1), ("hidden", 2**31 - 1),
                         ("kv_heads", 7), ("intermediate", 0), ("factorization", "SVD")):
        spoiled = json.loads(json.dumps(manifest))
        spoiled["spec"]["model"][field] = value
        (directory / "manifest.json").write_text(json.dumps(spoiled))
        for options in ((), ("--headers",)):
            r = tool("verify", *options, directory)
            assert r.returncode == 0 and r.stdout.startswith("fault: manifest.json "), (field, value, r)
        r = tool("export", directory, c.dir / "never")
        assert r.returncode == 1 and "manifest.json" in r.stderr and not (c.dir / "never").exists(), (field, value, r)


@shared
def test_numbers_that_say_nothing_about_the_state_do_no_harm(c):
    _, path = trained(c)
    directory = c.dir / "odd" / Path(path).name
    shutil.copytree(path, directory)
    manifest = json.loads((directory / "manifest.json").read_text())
    for field, value in (("micro_batch", 0), ("global_batch", 0), ("bucket_mib", -1), ("tp", 0), ("dp", -7)):
        odd = json.loads(json.dumps(manifest))
        odd["spec"]["parallel"][field] = value
        (directory / "manifest.json").write_text(json.dumps(odd))
        r = tool("verify", directory)
        assert r.returncode == 0 and "is sound" in r.stdout, (field, r)
    for section in ("data", "optimizer"):
        odd = json.loads(json.dumps(manifest))
        del odd["spec"][section]
        (directory / "manifest.json").write_text(json.dumps(odd))
        r = tool("verify", directory)
        assert r.returncode == 0 and "fault: manifest.json holds no whole job" in r.stdout, (section, r)


@shared
def test_a_turned_bit_is_not_carried_on(c):
    _, path = trained(c)
    directory = c.dir / "turned" / Path(path).name
    shutil.copytree(path, directory)
    shard = next(directory.glob("rank-*"))
    with open(shard, "r+b") as f:
        f.seek(-100, os.SEEK_END)
        byte = f.read(1)[0]
        f.seek(-100, os.SEEK_END)
        f.write(bytes([byte ^ 1]))
    for verb, options in (("export", ()), ("convert", ("--rank", 4))):
        r = tool(verb, *options, directory, c.dir / verb)
        assert r.returncode == 1 and f"{shard.name} is damaged: its CRC-32C" in r.stderr, (verb, r)
        assert not (c.dir / verb).exists()


@shared
def test_what_cannot_be_looked_at_is_not_damaged_by_that(c):
    """Without a descriptor for the second shard, say: who took that for damage would go on from an older checkpoint."""
    _, path = trained(c)
    few = {"preexec_fn": lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (4, 4))}
    r = tool("verify", path, **few)
    assert r.returncode == 1 and "Too many open files" in r.stderr and "fault" not in r.stdout and "sound" not in r.stdout, r
    directory = c.dir / "both" / Path(path).name
    shutil.copytree(path, directory)
    os.truncate(max(directory.glob("rank-*")), 1000)
    r = tool("verify", directory, **few)
    assert r.returncode == 0 and "fault: " in r.stdout and "1000 bytes" in r.stdout, r


def test_many_tools_hold_nothing_up():
    """Exports that hang take no thread from a job, and all of them get their turn."""
    with Cluster(agents=0) as c:
        gate, worker = c.dir / "gate", c.dir / "worker"
        worker.write_text(f"""#!/bin/sh
[ "$1 $2" = "ckpt export" ] || exec "{BIN}/boost-worker" "$@"
echo $$ >> "{c.dir}/pids"
while [ ! -e "{gate}" ]; do sleep 0.1; done
echo exported
""")
        worker.chmod(0o755)
        c.start_agent("n1", wrap=("sh", "-c", f'exec "$0" "$@" --worker "{worker}"'))
        c.wait_nodes(1)
        job = c.submit(tiny_job(c, steps=4, every=2))
        c.wait_state(job, "COMPLETED")
        many = [c.popen_ctl("ckpt", "export", job, c.dir / f"out{i}") for i in range(66)]
        try:
            pids = c.dir / "pids"
            wait_until(lambda: pids.exists() and len(pids.read_text().split()) >= 16, 20)
            job = c.submit(tiny_job(c, steps=4, every=2, name="second"))
            c.wait_state(job, "COMPLETED", 20)  # it is started, and its checkpoints are committed
            c.ok("ckpt", "ls", job)
            at_work = [p for p in pids.read_text().split() if alive(int(p))]
            assert len(at_work) == 16, at_work
            gate.touch()
            for child in many:
                said, _ = child.communicate(timeout=30)
                assert child.returncode == 0 and "exported" in said, said
            assert len(pids.read_text().split()) == len(many)
        finally:
            gate.touch()
            for child in many:
                child.kill()
                child.wait()


test_nothing_is_left = shared.last

run(globals())
