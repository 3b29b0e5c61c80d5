#!/usr/bin/env python3
# time limit: 180 s
"""GPUs from submit to the rank's process, with a fake NVML of four GPUs and no NVIDIA driver: who gets which, over the
agent's and the controller's end; what is unsound is passed over; a rank that finds no device says so."""
import ctypes, json, os, shutil, subprocess
from pathlib import Path

from harness import BIN, Cluster, Process, Skip, alive, run, tiny_job, wait_until

FAKES = BIN.parent / "tests" / "fakes"
ON_CUDA = ("--set", "resources.device=CUDA")


def no_driver():
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return
    raise Skip("this machine has an NVIDIA driver: its ranks would find a device")


class Gpus(Cluster):
    """One agent whose GPUs are lines of a file."""

    def __init__(self, lines="count 4\n", cuda_library=FAKES / "boost-cuda.so", **sets):
        super().__init__(start=False)
        self.file = self.dir / "gpus"
        self.tell(lines)
        self.env.update(FAKE_NVML=str(self.file), BOOST_CUDA_LIBRARY=str(cuda_library))
        self.agent_set = {"nvml_library": FAKES / "nvml.so", **sets}
        try:
            self.start_boostd()
            self.start_agent("n1")
            self.wait_nodes(1)
        except BaseException:
            self._kill_all()
            raise

    def tell(self, lines):
        new = self.dir / "gpus.new"
        new.write_text(lines)
        new.rename(self.file)

    def node(self):
        return self.json("node", "ls")["nodes"][0]

    def users(self):
        """{index: (job, rank)}"""
        return {g["index"]: (g["job"], g["rank"]) for g in self.node()["gpus"] if "job" in g}


def sleeper(c):
    """A worker that passes the check for CUDA, writes down what it sees, and sleeps."""
    worker = c.dir / "sleeper"
    worker.write_text("#!/bin/sh\n"
                      "[ \"$1\" = --check-cuda ] && exit 0\n"
                      "echo \"$CUDA_VISIBLE_DEVICES $CUDA_DEVICE_ORDER $OMP_NUM_THREADS\" > \"$2/sees-$4.new\"\n"
                      "mv \"$2/sees-$4.new\" \"$2/sees-$4\"\n"
                      "exec sleep 1000\n")
    worker.chmod(0o755)
    return worker


class Sleeping(Gpus):
    """Ranks that only sleep, so that devices stay taken."""

    def start_agent(self, name, **sets):
        if not getattr(self, "sleeper", None):
            self.sleeper = sleeper(self)
        argv = [BIN / "boost-agent", "--config", "/dev/null", "--state-dir", self.dir / f"agent-{name}", "--node", name,
                "--cpu-slots", str(self.cpu_slots), "--worker", self.sleeper]
        for key, value in {**self.agent_set, **sets}.items():
            argv += ["--set", f"{key}={value}"]
        self.agents[name] = Process(argv, self.dir / f"agent-{name}.log", self.env)
        self._procs.append(self.agents[name])
        return self.agents[name]

    def sees(self, job, rank):
        path = wait_until(lambda: next(iter(self.run_dir(job, 1).parent.glob(f"*-{job}.1/sees-{rank}")), None), 20,
                          f"rank {rank} of job {job} is up")
        return path.read_text().split()


def test_what_is_shown():
    with Gpus() as c:
        n = c.node()
        assert n["devices"] == 4 and n["devices_busy"] == 0 and n["device_kind"] == "NVIDIA H200", n
        assert n["cpu_slots"] == 2 and n["cpu_slots_busy"] == 0 and n["driver"] == "580.00.fake", n
        assert [g["index"] for g in n["gpus"]] == [0, 1, 2, 3], n
        assert n["gpus"][2] == {"index": 2, "name": "NVIDIA H200", "uuid": "GPU-fake-2", "pci_bus_id": "00000000:03:00.0",
                                "memory_mib": 143771, "used_mib": 771, "healthy": True}, n
        assert "0/4 busy" in c.ok("node", "ls") and "NVIDIA H200" in c.ok("node", "ls")
        wide = c.ok("-o", "wide", "node", "ls")
        assert "GPU-fake-3" in wide and "140 GiB" in wide, wide
        assert "devices 0/4 busy, CPU slots beside GPUs 0/2 busy" in c.ok("status")
        # A job that says nothing gets a GPU, and its memory decides.
        path = c.dir / "auto.pbtxt"
        path.write_text(tiny_job(c, name="auto"))
        resolved = json.loads(c.ok("-o", "json", "submit", path, "--dry-run"))["resolved"]
        assert resolved["resources"]["device"] == "CUDA" and resolved["run"]["precision"] == "BF16", resolved


def test_jobs_get_different_gpus_and_keep_them():
    with Sleeping() as c:
        first, second = (c.submit(tiny_job(c, tp=2), *ON_CUDA) for _ in range(2))
        assert [c.sees(first, r)[0] for r in range(2)] == ["GPU-fake-0", "GPU-fake-1"]
        assert [c.sees(second, r) for r in range(2)] == [[f"GPU-fake-{g}", "PCI_BUS_ID", "1"] for g in (2, 3)]
        want = {0: (first, 0), 1: (first, 1), 2: (second, 0), 3: (second, 1)}
        wait_until(lambda: c.users() == want, 10, "the node shows who has what")
        devices = c.json("show", second)["devices"]
        assert [(d["node"], d["index"], d["rank"]) for d in devices] == [("n1", 2, 0), ("n1", 3, 1)], devices
        assert "GPU-fake-2" in c.ok("show", second)
        third = c.submit(tiny_job(c), *ON_CUDA)
        assert "needs 1 GPU, 0 of 4 free" in c.status(third)["info"], c.status(third)
        # CPU jobs have slots of their own, and see no GPU of ours.
        cpu = c.submit(tiny_job(c), "--set", "resources.device=CPU")
        sees = c.sees(cpu, 0)
        assert sees[0] != "GPU-fake-0" and "PCI_BUS_ID" not in sees, sees
        assert c.node()["cpu_slots_busy"] == 1 and c.node()["devices_busy"] == 4, c.node()
        pids = {j: c.rank_pids(j, 1) for j in (first, second, cpu)}
        c.agents["n1"].kill9()
        c.start_agent("n1")
        c.restart_boostd()
        c.wait_nodes(1)
        wait_until(lambda: c.users() == want, 10, "the same after the agent's and the controller's end")
        assert {j: c.rank_pids(j, 1) for j in pids} == pids
        c.ok("cancel", "--now", "-y", first)
        c.wait_state(first, "CANCELLED")
        assert c.sees(third, 0)[0] == "GPU-fake-0"


def test_an_attempt_whose_directory_is_removed_gives_its_gpus_back():
    with Sleeping() as c:
        job = c.submit(tiny_job(c, tp=4), *ON_CUDA)
        for rank in range(4):
            c.sees(job, rank)  # and has nothing more to write
        wait_until(lambda: len(c.rank_pids(job, 1)) == 4, 20, "all four ranks run")
        pids = c.rank_pids(job, 1)
        shutil.rmtree(c.run_dir(job, 1))
        wait_until(lambda: len(c.rank_pids(job, 2)) == 4, 20, "the next attempt has all four")
        assert not any(alive(p) for p in pids.values()), pids
        wait_until(lambda: c.users() == {g: (job, g) for g in range(4)}, 10, "the node shows who has what")


def test_unsound_and_taken_devices_are_passed_over():
    stranger = subprocess.Popen(["sleep", "1000"])
    try:
        with Sleeping(f"count 4\n1 ecc 3\n2 pid {stranger.pid}\n") as c:
            gpus = c.node()["gpus"]
            assert [g["healthy"] for g in gpus] == [True, False, True, True], gpus
            assert "3 uncorrected memory errors" in gpus[1]["trouble"] and str(stranger.pid) in gpus[2]["note"], gpus
            assert "gpu 1: 3 uncorrected memory errors" in c.ok("node", "ls")
            job = c.submit(tiny_job(c, tp=2), *ON_CUDA)
            assert [c.sees(job, r)[0] for r in range(2)] == ["GPU-fake-0", "GPU-fake-3"]
            c.ok("cancel", "--now", "-y", job)
            c.wait_state(job, "CANCELLED")
            # An Xid comes and stays; an application's own fault (31) is none of the device's.
            c.tell("count 4\n3 xid 31\n0 xid 79\n")
            wait_until(lambda: not c.node()["gpus"][0]["healthy"], 10, "the Xid is seen")
            gpus = c.node()["gpus"]
            assert [g["healthy"] for g in gpus] == [False, True, True, True], gpus
            assert gpus[0]["trouble"] == "Xid 79 (fell off the bus)", gpus
            wait_until(lambda: any(e["kind"] == "device-unhealthy" and "gpu 0 (NVIDIA H200) of n1" in e["text"] and
                                   "Xid 79" in e["text"] for e in c.json("events")["events"]), 10, "the event of it")
            job = c.submit(tiny_job(c), *ON_CUDA)
            assert c.sees(job, 0)[0] == "GPU-fake-1"
            # One that cannot be asked any more keeps its name.
            c.tell("count 4\n3 lost 1\n")
            wait_until(lambda: not c.node()["gpus"][3]["healthy"], 10, "the lost GPU is seen")
            assert c.node()["gpus"][3]["trouble"] == "GPU is lost" and c.node()["gpus"][3]["uuid"] == "GPU-fake-3"
    finally:
        stranger.kill()
        stranger.wait()


def test_a_job_waits_until_its_gpu_has_let_go():
    """Memory outlives its process for a while: the next job, which stands ready, is not refused for it."""
    with Sleeping("count 1\n") as c:
        job, after = (c.submit(tiny_job(c), *ON_CUDA) for _ in range(2))
        c.sees(job, 0)
        c.tell("count 1\n0 used 900\n")
        wait_until(lambda: c.node()["gpus"][0]["used_mib"] == 1670, 10, "the agent sees the memory")
        pid = wait_until(lambda: c.rank_pids(job, 1).get(0), 10, "the rank's pid")
        c.ok("cancel", "--now", "-y", job)
        wait_until(lambda: not alive(pid), 10, "the rank's end")
        c.tell("count 1\n")
        c.sees(after, 0)
        assert not [e for e in c.events(after) if e["kind"] == "attempt-refused"], c.events(after)
        # What stays is not waited for without end, and the node says so.
        c.tell("count 1\n0 used 900\n")
        wait_until(lambda: c.node()["gpus"][0]["used_mib"] == 1670, 10, "the agent sees the memory")
        c.ok("cancel", "--now", "-y", after)
        c.wait_state(after, "CANCELLED", deadline=20)
        wait_until(lambda: "900 MiB of it" in c.node()["gpus"][0].get("note", ""), 10, "the note")


def test_a_rank_without_a_driver_is_infrastructure():
    no_driver()
    with Gpus() as c:
        job = c.submit(tiny_job(c), *ON_CUDA, "--set", "restart.max_restarts=0")
        event = wait_until(lambda: next((e for e in c.events(job) if e["kind"] == "rank-exit"), None), 30, "the rank ends")
        for part in ("exit code 66 (device or driver) on gpu 0 (NVIDIA H200)", "no NVIDIA driver", "no restart used"):
            assert part in event["text"], event
        c.tell("count 4\n0 xid 119\n")  # the next time it is known why
        wait_until(lambda: "GPU" in str(c.json("events")) and not c.node()["gpus"][0]["healthy"], 10, "Xid 119")
        assert c.status(job)["state"] in ("RECOVERING", "STARTING", "HELD"), c.status(job)


def test_a_node_without_the_backend_says_so():
    with Gpus(cuda_library="/nowhere/boost-cuda.so") as c:
        path = c.dir / "job.pbtxt"
        path.write_text(tiny_job(c))
        r = c.ctl("submit", path, *ON_CUDA)
        assert r.rc == 6 and "this node's boost-worker is without CUDA" in r.err and "/nowhere/boost-cuda.so" in r.err, r
        # Held, nothing is asked; then the start says it.
        job = c.submit(tiny_job(c), *ON_CUDA, "--hold")
        c.ok("release", job)
        event = wait_until(lambda: next((e for e in c.events(job) if e["kind"] == "attempt-refused"), None), 20, "refused")
        assert "without CUDA" in event["text"] and "no restart used" in event["text"], event


def test_a_backend_that_cannot_be_loaded_is_named():
    with Gpus() as c:
        worker = BIN / "boost-worker"
        whole = (FAKES / "boost-cuda.so").read_bytes()
        half, fifo, text = c.dir / "half.so", c.dir / "fifo.so", c.dir / "text.so"
        text.write_text("this is no library\n" * 10)
        half.write_bytes(whole[:len(whole) // 4])  # of the headers all, of what they promise a part
        os.mkfifo(fifo)
        for path, why in ((half, "is cut short"), (text, "is no library"), (fifo, "is not a file"), (c.dir, "is not a file")):
            r = subprocess.run([worker, "--check-cuda"], env={**c.env, "BOOST_CUDA_LIBRARY": str(path)}, text=True,
                               capture_output=True, stdin=subprocess.DEVNULL, timeout=60)
            assert r.returncode == 66 and f"{path} {why}" in r.stderr, (path, r)
            assert "LD_LIBRARY_PATH" not in r.stderr, r


def test_a_worker_that_dies_of_the_check_is_named():
    with Sleeping() as c:
        c.sleeper.write_text("#!/bin/sh\nkill -BUS $$\n")
        path = c.dir / "job.pbtxt"
        path.write_text(tiny_job(c))
        r = c.ctl("submit", path, *ON_CUDA)
        assert r.rc == 6 and "without CUDA: it was killed by signal 7" in r.err, r


def test_shares_of_a_gpu():
    with Sleeping("count 1\n", ranks_per_gpu=2) as c:
        assert c.node()["devices"] == 2 and [g["memory_mib"] for g in c.node()["gpus"]] == [71885, 71885], c.node()
        job = c.submit(tiny_job(c, tp=2), *ON_CUDA)
        assert [c.sees(job, r)[0] for r in range(2)] == ["GPU-fake-0"] * 2
        wait_until(lambda: [(g.get("job"), g.get("rank")) for g in c.node()["gpus"]] == [(job, 0), (job, 1)], 10, "shares")


def test_a_failed_test_leaves_no_rank():
    """The command line of these ranks is "sleep 1000": only their environment tells whose they are."""
    class Fails(Exception):
        pass
    try:
        with Sleeping("count 1\n") as c:
            job = c.submit(tiny_job(c), *ON_CUDA)
            c.sees(job, 0)
            pid = wait_until(lambda: c.rank_pids(job, 1).get(0), 10, "its rank")
            wait_until(lambda: "sleep" in Path(f"/proc/{pid}/comm").read_text(), 10, "the worker's sleep")
            assert pid in c.processes(), c.processes()
            raise Fails
    except Fails:
        wait_until(lambda: not alive(pid), 10, "the end of the rank")


def test_no_library_is_a_cpu_node():
    with Cluster(agent_set={"nvml_library": "/nowhere/libnvidia-ml.so.1"}) as c:
        n = c.json("node", "ls")["nodes"][0]
        assert n["device_kind"] == "cpu" and n["devices"] == 2 and "gpus" not in n, n
        said = c.agents["n1"].log_text()
        assert said.count("nvml_library cannot be loaded") == 1 and "/nowhere/libnvidia-ml.so.1" in said, said
        # A second agent of the name was reached and refused; it keeps trying, so only its log tells.
        argv = [BIN / "boost-agent", "--config", "/dev/null", "--state-dir", c.dir / "twin", "--node", "n1"]
        with open(c.dir / "twin.log", "wb") as log:
            twin = subprocess.Popen(argv, env=c.env, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=log)
        try:
            wait_until(lambda: "another agent of node n1" in (c.dir / "twin.log").read_text(), 10, "the refusal")
        finally:
            twin.terminate()
            twin.wait()
        said = (c.dir / "twin.log").read_text()
        assert "refused by the controller" in said and "cannot reach" not in said, said


def test_utilisation_where_the_peak_is_known():
    with Cluster(agent_set={"peak_tflops": 0.001}) as c:
        job = c.submit(tiny_job(c, steps=40, tp=2))
        c.wait_state(job, "COMPLETED")
        rows = [r for r in c.json("metrics", job)["metrics"] if "mfu" in r]
        path = c.dir / "plan.pbtxt"
        path.write_text(tiny_job(c, steps=40, tp=2))
        flop = c.json("plan", path)["model_flop_per_step"]
        assert len(rows) == 40, len(rows)
        for r in rows:  # two ranks of 10^9 FLOP/s each, to the step's time as it was told
            want = flop / (r["step_ms"] / 1e3 * 2 * 1e9)
            assert abs(r["mfu"] - want) <= 1e-9 * want, (r, want)
        assert "mfu" in c.json("show", job)["job"] or c.status(job)["state"] == "COMPLETED"
    with Cluster() as c:
        job = c.submit(tiny_job(c, steps=5))
        c.wait_state(job, "COMPLETED")
        assert not any("mfu" in r for r in c.json("metrics", job)["metrics"])


run(globals())
