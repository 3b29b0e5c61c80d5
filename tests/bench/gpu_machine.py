"""The machine with GPUs that benchmarks run on: what it is, and samples of its clocks beside them."""
import json, subprocess, sys, threading, time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


class Smi:
    """Samples of nvidia-smi, (time, value of each of the fields), of one GPU or of all in turn; none where it is not there."""

    def __init__(self, fields, every_ms, gpu=None):
        self.samples, self.process = [], None
        which = [] if gpu is None else ["-i", gpu]
        try:
            self.process = subprocess.Popen(
                ["nvidia-smi", *which, f"--query-gpu={fields}", "--format=csv,noheader,nounits", "-lms", str(every_ms)],
                stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        except OSError:
            return
        self.thread = threading.Thread(target=self.read, daemon=True)
        self.thread.start()

    def read(self):
        for line in self.process.stdout:
            try:
                self.samples.append((time.monotonic(), *(float(x) for x in line.split(","))))
            except ValueError:
                pass

    def between(self, start, end):
        return [s for s in self.samples if start <= s[0] <= end]

    def close(self):
        if self.process:
            self.process.kill()
            self.process.wait()
            self.thread.join()


def machine(*libraries):
    """Commit and device, and the versions of the driver and of these libraries, for each line."""
    p = subprocess.run([sys.executable, ROOT / "deploy" / "gpu-versions.py", "--json", ROOT], capture_output=True,
                       text=True)
    found = json.loads(p.stdout) if p.returncode == 0 else {}
    return {"commit": found.get("commit", "unknown"), "device": found.get("gpu") or "no GPU",
            **{k: found.get(k) for k in ("driver", *libraries)}}
