"""Signs of life of the processes of a launcher."""

import subprocess
import sys

from torch.distributed import TCPStore

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


FAILS = """
import sys
from torch.distributed import TCPStore
from gplan.runtime.peers import Peer, Peers

rank, port = int(sys.argv[1]), int(sys.argv[2])
peers = [Peer(rank=x, node=0, host="a", local_rank=x, facts={}) for x in range(3)]
Peers(TCPStore("127.0.0.1", port, is_master=False), peers, rank=rank).show_equal_errors_once()
raise ValueError("batch of 30" if rank < 2 else "another")
"""


def test_an_error_of_all_ranks_is_shown_whole_once() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes = [
        subprocess.Popen([sys.executable, "-c", FAILS, str(x), str(store.port)], stderr=subprocess.PIPE, text=True)
        for x in range(3)
    ]
    shown = [x.communicate()[1] for x in processes]
    assert [x.returncode for x in processes] == [1, 1, 1]
    assert shown[1] == "rank 1 ends with the same error as rank 0\n"
    assert "Traceback" in shown[0] and "ValueError: batch of 30" in shown[0]
    assert "Traceback" in shown[2] and "ValueError: another" in shown[2]
