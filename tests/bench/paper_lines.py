"""What paper_table.py writes and reads: lines on disk, samples of the GPUs' clocks, steps that count, tokens."""
import datetime, json, os, statistics

from gpu_machine import Smi, machine

SKIPPED = 4  # steps: the first runs plainly, the second is captured


# ---- clocks and memory beside the jobs ---------------------------------------------------


class Clocks:
    """Memory, SM clock and power of all GPUs, sampled."""

    def __init__(self):
        self.smi = Smi("memory.used,clocks.sm,power.draw", 500)

    def between(self, start, end):
        """Of the GPUs at work: peak memory, mean clock and power."""
        busy = [s for s in self.smi.between(start, end) if s[1] > 1024]
        if not busy:
            return {"peak_gib": None, "sm_mhz": None, "watts": None}
        return {"peak_gib": max(s[1] for s in busy) / 1024, "sm_mhz": statistics.mean(s[2] for s in busy),
                "watts": statistics.mean(s[3] for s in busy)}

    def close(self):
        self.smi.close()


# ---- lines -------------------------------------------------------------------------------


class Lines:
    """The results, on disk after each one."""

    def __init__(self, out):
        self.out, self.about, self.rows = out, machine("nccl", "cublaslt", "cudnn"), {}
        if out.exists():
            self.rows = {r["name"]: r for r in map(json.loads, out.read_text().splitlines())}
        self.mine = []

    def put(self, name, value, unit, peer=None, peer_value=None, **more):
        date = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
        ratio = value / peer_value if value is not None and peer_value else None
        row = {"name": name, "value": value, "unit": unit, "peer": peer, "peer_value": peer_value, "ratio": ratio,
               "date": date, **self.about, **more}
        self.rows[name] = {k: float(f"{v:.6g}") if isinstance(v, float) else v for k, v in row.items()}
        self.mine = [n for n in self.mine if n != name] + [name]
        shown = "-" if value is None else f"{value:.5g}"
        extra = "".join(f"  {k} {row[k]:.4g}" for k in ("est_ms", "mfu", "peak_gib", "sm_mhz") if row.get(k))
        self.save()
        print(f"  {name:44} {shown:>9} {unit}{extra}{'  ' + row['note'] if row.get('note') else ''}", flush=True)

    def change(self, name, **more):
        self.rows[name].update({k: float(f"{v:.6g}") if isinstance(v, float) else v for k, v in more.items()})
        self.save()

    def save(self):
        new = self.out.with_name(self.out.name + ".new")
        new.write_text("".join(json.dumps(r) + "\n" for r in self.rows.values()))
        new.rename(self.out)

    def value(self, name):
        row = self.rows.get(name)
        return row["value"] if row else None

    def same_build(self, name):
        """Whether the line is there, of this commit and device."""
        row = self.rows.get(name, {})
        return all(row.get(k) == self.about[k] for k in ("commit", "device"))

# ---- steps and tokens ---------------------------------------------------------------------


def median_of(rows, key):
    values = [r[key] for r in rows if key in r]
    return statistics.median(values) if values else None


def measured(rows, steps, warm_s, seconds):
    """The steps that count, None while there are not enough: behind the first ones and warm_s seconds of work, at least
    `steps`, for at least so many seconds."""
    rows = sorted(rows, key=lambda r: r["step"])
    first, passed = SKIPPED, 0
    while first < len(rows) and passed < warm_s * 1e3:
        passed += rows[first]["step_ms"]
        first += 1
    found = rows[first:]
    enough = passed >= warm_s * 1e3 and len(found) >= steps and sum(r["step_ms"] for r in found) >= seconds * 1e3
    return found if enough else None


def along(points, size):
    """Of (size, time) on a straight line between the two nearest."""
    after = next((i for i in range(1, len(points)) if size <= points[i][0]), len(points) - 1)
    if len(points) < 2:
        return points[0][1]
    (x0, y0), (x1, y1) = points[after - 1], points[after]
    return max(points[0][1], y0 + (size - x0) * (y1 - y0) / (x1 - x0))


def random_tokens(vocab, n):
    """u16 below vocab, a multiple of 256."""
    data = bytearray(os.urandom(2 * n))
    data[1::2] = data[1::2].translate(bytes(b % (vocab // 256) for b in range(256)))
    return data


def learnable_tokens(vocab, n):
    """u16: each follows from the one before by one of a few steps."""
    x, at, out = 1, 0, bytearray()
    for _ in range(n):
        x = (x * 6364136223846793005 + 1442695040888963407) % 2**64
        at = (at + 1 + (x >> 60) % 4 if (x >> 33) % 8 else x >> 40) % vocab
        out += at.to_bytes(2, "little")
    return out
