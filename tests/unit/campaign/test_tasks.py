import threading

import pytest

from retrain.campaign.running.tasks import Tasks, append
from retrain.util.jsonl import NewLines, parse_row


@pytest.fixture
def tasks(tmp_path) -> Tasks:
    made = Tasks.of(tmp_path)
    assert made.open() == 0
    return made


def test_each_task_is_claimed_once_in_order(tasks):
    """Also by workers that claim at the same moment."""
    names = [f"1{number:06d}" for number in range(40)]
    for name in names:
        tasks.publish(name, {"of": name})
    claimed: dict[str, list[str]] = {"a": [], "b": [], "c": []}
    barrier = threading.Barrier(3)

    def claim_all(worker: str) -> None:
        barrier.wait()
        while (task := tasks.claim(worker)) is not None:
            assert task[1] == {"of": task[0]}
            claimed[worker].append(task[0])

    threads = [threading.Thread(target=claim_all, args=(worker,)) for worker in claimed]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(name for each in claimed.values() for name in each) == names
    assert all(each == sorted(each) for each in claimed.values())
    assert tasks.claims() == {name: worker for worker, each in claimed.items() for name in each}
    assert tasks.content(names[0], tasks.claims()[names[0]]) == {"of": names[0]}


def test_a_claimed_task_cannot_be_withdrawn_and_a_withdrawn_one_not_claimed(tasks):
    tasks.publish("1000001", {})
    assert tasks.withdraw("1000001")
    assert tasks.claim("a") is None
    tasks.publish("1000002", {})
    assert tasks.claim("worker_1-3") == ("1000002", {})
    assert not tasks.withdraw("1000002")
    tasks.stop("1000002")
    assert tasks.stopped() == {"1000002"}
    tasks.forget("1000002", "worker_1-3")
    assert (tasks.claims(), tasks.stopped()) == ({}, frozenset())


def test_a_new_controller_keeps_claims_and_withdraws_what_waits(tasks, tmp_path):
    tasks.publish("1000007", {})
    tasks.claim("a")
    tasks.publish("1000009", {})
    tasks.close()
    assert tasks.is_closed()
    assert tasks.open() == 7
    assert (tasks.claims(), tasks.claim("b"), tasks.is_closed()) == ({"1000007": "a"}, None, False)
    assert Tasks.of(tmp_path / "removed").is_closed()


def test_events_are_read_line_by_line_as_they_are_complete(tmp_path):
    events = NewLines(tmp_path / "events_1.jsonl", awaits_bytes=True)

    def rows() -> list[dict]:
        return list(map(parse_row, events))

    assert rows() == []
    append(events.path, {"step": 0})
    with open(events.path, "ab") as file:
        file.write(b'{"step": 1')
    assert rows() == [{"step": 0}]
    with open(events.path, "ab") as file:
        file.write(b'}\n{"step": 2}\n\0\0\0')  # a length that has arrived before its bytes, as on NFS
    assert rows() == [{"step": 1}, {"step": 2}]
    assert rows() == []
