"""Whether there is a GPU to test on. Standard library only."""
import os, sys
from pathlib import Path

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "e2e"))
from harness import BIN, Skip


# Of an agent that gives the machine's GPUs away; those of the other tests give none.
AGENT = {"nvml_library": "libnvidia-ml.so.1"}


def need(count=1):
    """Skips the test where there are fewer GPUs, or where this build has no CUDA library."""
    library = Path(os.environ.get("BOOST_CUDA_LIBRARY") or BIN.parent / "lib/boost-cuda.so")
    if not library.exists():
        raise Skip("this build has no boost-cuda.so")
    found = len(list(Path("/proc/driver/nvidia/gpus").glob("*"))) or len(list(Path("/dev").glob("nvidia[0-9]*")))
    if found < count:
        raise Skip(f"{count} GPUs are needed, there are {found}")
