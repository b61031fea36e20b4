"""Signs of life of the processes of a launcher."""

import subprocess
import sys

WRITES_WITHOUT_PAUSE = """
import time
from torch.distributed import TCPStore
from gplan.runtime import peers

peers._BEAT_S = 0.0
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
peers.Peers(store, [], rank=0)
time.sleep(0.1)
"""


def test_a_process_ends_cleanly_while_it_writes_signs_of_life() -> None:
    # Aborted with "terminate called without an active exception" when the interpreter ended inside the store.
    done = subprocess.run([sys.executable, "-c", WRITES_WITHOUT_PAUSE], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
