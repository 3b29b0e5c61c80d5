#!/usr/bin/env python3
# time limit: 900
"""The machine's GPUs as its own NVML tells of them: what is shown, who has which, over the agent's end; the same job on the
CPU beside it; a stop with its checkpoint."""
import gpu
from harness import Cluster, run, tiny_job, wait_until

CUDA = ("--set", "resources.device=CUDA")
SHAPE = {"hidden": 128, "layers": 2, "seq_len": 128, "batch": 8}  # widths that a device's kernels like


def cluster():
    gpu.need()
    return Cluster(agent_set=gpu.AGENT)


def node(c):
    return c.json("node", "ls")["nodes"][0]


def users(c):
    return [(g["job"], g["rank"]) for g in node(c)["gpus"] if "job" in g]


def losses(c, job):
    """{step: loss} of the newest attempt that made it."""
    return {r["step"]: r["loss"] for r in c.json("metrics", job)["metrics"] if "loss" in r}


def test_one_rank():
    with cluster() as c:
        n = node(c)
        assert n["devices"] >= 1 and n["devices_busy"] == 0 and n["device_kind"] != "cpu" and n["driver"], n
        for g in n["gpus"]:
            assert g["healthy"] and g["uuid"].startswith("GPU-") and g["memory_mib"] > 4096 and g["pci_bus_id"], g
        job = c.submit(tiny_job(c, steps=300, every=100, **SHAPE))  # it says nothing of a device
        wait_until(lambda: users(c) == [(job, 0)], 60, "the node shows who has the GPU")
        c.wait_state(job, "COMPLETED", deadline=240)
        of = losses(c, job)
        assert sorted(of) == list(range(1, 301)) and of[300] < 0.7 * of[1], (of[1], of[300])
        resolved = c.json("show", job)["resolved"]
        assert resolved["resources"]["device"] == "CUDA" and resolved["run"]["precision"] == "BF16", resolved
        rows = [r["mfu"] for r in c.json("metrics", job)["metrics"] if "mfu" in r]
        assert all(0 < x < 1 for x in rows), rows[:3]
        print(f"# {n['device_kind']}, driver {n['driver']}; MFU told for {len(rows)} of 300 steps of a tiny model")
        wait_until(lambda: users(c) == [], 20, "the GPU is free again")


def test_the_cpu_beside_it():
    """The same job and data on both: the first loss is that of the same weights, to bf16's rounding of the activations."""
    with cluster() as c:
        jobs = [c.submit(tiny_job(c, steps=5, every=0, **SHAPE), "--set", f"resources.device={d}", "--set",
                         "run.precision=BF16") for d in ("CUDA", "CPU")]
        for job in jobs:
            c.wait_state(job, "COMPLETED", deadline=240)
        on_gpu, on_cpu = (losses(c, j) for j in jobs)
        # A mean over 1024 tokens whose logits carry relative errors of 2^-8: an absolute 0.02 is ten times what is seen
        # between two CPU precisions.
        assert abs(on_gpu[1] - on_cpu[1]) < 0.02 and abs(on_gpu[5] - on_cpu[5]) < 0.05, (on_gpu, on_cpu)


def test_the_agent_is_killed_and_the_job_stopped():
    with cluster() as c:
        job = c.submit(tiny_job(c, steps=1_000_000, every=0, **SHAPE), *CUDA)
        c.wait_step(job, 20, deadline=240)
        pids = c.rank_pids(job, 1)
        c.agents["n1"].kill9()
        c.start_agent("n1")
        c.wait_nodes(1)
        wait_until(lambda: users(c) == [(job, 0)], 30, "the new agent knows who has the GPU")
        step = c.status(job)["step"]
        c.wait_step(job, step + 50, deadline=60)
        assert c.rank_pids(job, 1) == pids and c.status(job)["attempt"] == 1
        c.ok("cancel", "-y", job)  # with a checkpoint
        c.wait_state(job, "CANCELLED", deadline=60)
        assert [k["state"] for k in c.json("ckpt", "ls", job)["checkpoints"]][-1:] == ["COMMITTED"]


run(globals())
