"""What the long emulated run is put together from."""

import subprocess
import sys
import threading
from pathlib import Path

from scripts.long_run.killing import Killing
from scripts.long_run.parts import Part, all_losses, spans


def part(first: int, times: tuple[float, ...], pause_s: float) -> Part:
    return Part(
        label=f"from {first}",
        first_iteration=first,
        iterations_s=times,
        losses=tuple(float(first + number) for number in range(len(times))),
        pause_s=pause_s,
        oracle_s=(1.0,) * len(times),
    )


PARTS = [part(1, (1.0, 2.0, 2.0), 0.0), part(3, (4.0,), 10.0)]


def test_parts_follow_each_other_with_their_pauses() -> None:
    found = [(each.start_s, each.end_s, each.iteration, each.part) for each in spans(PARTS)]
    assert found == [(0, 1, 1, 0), (1, 3, 2, 0), (3, 5, 3, 0), (5, 15, None, 1), (15, 19, 3, 1)]


def test_iterations_that_are_trained_twice_are_compared_twice() -> None:
    assert list(all_losses(PARTS)) == [(1, 1.0), (2, 2.0), (3, 3.0), (3, 3.0)]


def test_it_is_drawn(tmp_path: Path) -> None:
    from scripts.long_run.picture import draw

    assert draw(tmp_path / "run.png", PARTS, tokens=8).read_bytes().startswith(b"\x89PNG")


def test_ranks_are_killed_once_so_much_is_trained(tmp_path: Path) -> None:
    ranks = []
    for rank in range(2):
        with (tmp_path / f"rank_{rank}.txt").open("w") as output:
            words = [sys.executable, "-c", "import time; time.sleep(60)"]
            ranks.append(subprocess.Popen(words, stdout=output))
    killing = Killing(ranks=[1], after_iterations=2, limit_s=30.0)
    thread = threading.Thread(target=killing, args=(tmp_path,))
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    thread.start()
    thread.join(timeout=0.2)
    assert thread.is_alive()
    (tmp_path / "metrics.jsonl").write_text("{}\n{}\n")
    thread.join()
    assert ranks[1].wait() == -9
    assert ranks[0].poll() is None
    ranks[0].kill()
    ranks[0].wait()
    assert killing.killed == [ranks[1].pid]
