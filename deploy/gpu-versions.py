#!/usr/bin/env python3
"""What a machine with a GPU has: for deploy/gpu-check.sh.

  (nothing)      versions of CUDA's libraries as the loader finds them, as text
  --json ROOT    one JSON object: date, commit, device, driver, versions
  --path         folders to put first on LD_LIBRARY_PATH: those of the Python packages of cuDNN and NCCL, which are newer than
                 a system's, and of cuBLAS if it is
"""
import ctypes, datetime, json, os, site, subprocess, sys
from pathlib import Path

FUNCTIONS = {"cudnn": ("libcudnn.so.9", "cudnnGetVersion"), "cublaslt": ("libcublasLt.so.13", "cublasLtGetVersion")}


def version(library, function):
    """Of a library by path or name; None where it cannot be loaded. In a process of its own: it stays loaded."""
    code = ("import ctypes, sys\nf = getattr(ctypes.CDLL(sys.argv[1]), sys.argv[2])\nf.restype = ctypes.c_size_t\n"
            "print(f())")
    p = subprocess.run([sys.executable, "-c", code, library, function], capture_output=True, text=True)
    return int(p.stdout) if p.returncode == 0 else None


def nccl_version():
    code = ("import ctypes\nn = ctypes.c_int()\nassert ctypes.CDLL('libnccl.so.2').ncclGetVersion(ctypes.byref(n)) == 0\n"
            "print(n.value)")
    p = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    return int(p.stdout) if p.returncode == 0 else None


def python_folders():
    """Folders nvidia/ of the installed Python packages."""
    found = []
    try:
        import nvidia
        found += list(nvidia.__path__)
    except ImportError:
        pass
    places = list(sys.path) + [site.getusersitepackages()]
    places += site.getsitepackages() if hasattr(site, "getsitepackages") else []
    found += [os.path.join(p, "nvidia") for p in places if p]
    return [Path(p) for p in dict.fromkeys(found) if os.path.isdir(p)]


def path():
    chosen = []
    for base in python_folders():
        for name in ("cudnn", "nccl"):
            folder = base / name / "lib"
            if folder.is_dir():
                chosen.append(str(folder))
        library = base / "cu13" / "lib" / "libcublasLt.so.13"
        if library.exists():
            name, function = FUNCTIONS["cublaslt"]
            theirs, system = version(str(library), function), version(name, function)
            if theirs and (system is None or theirs > system):
                chosen.append(str(library.parent))
    return ":".join(dict.fromkeys(chosen))


def versions():
    out = {name: version(*where) for name, where in FUNCTIONS.items()}
    out["nccl"] = nccl_version()
    try:
        n = ctypes.c_int()
        out["driver_cuda"] = n.value if ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(n)) == 0 else None
    except OSError:
        out["driver_cuda"] = None
    return out


def query(field):
    try:
        p = subprocess.run(["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader"], capture_output=True,
                           text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return p.stdout.splitlines()[0].strip() if p.returncode == 0 and p.stdout.strip() else None


def built(root):
    """What gpu-bundle.sh wrote down, or the tree's commit."""
    file = Path(root) / "BUILD"
    if file.exists():
        return dict(line.split(" ", 1) for line in file.read_text().splitlines() if " " in line)
    p = subprocess.run(["git", "-C", root, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True)
    return {"commit": p.stdout.strip() or "unknown"}


def main():
    if sys.argv[1:2] == ["--path"]:
        print(path())
    elif sys.argv[1:2] == ["--json"]:
        print(json.dumps({"date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
                          **built(sys.argv[2]), "gpu": query("name"), "driver": query("driver_version"), **versions()}))
    else:
        for name, value in versions().items():
            print(f"{name:12} {value}")


main()
