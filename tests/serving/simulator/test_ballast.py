"""What leaks is really held, is bounded, and is given back."""

from pathlib import Path

import pytest

from serving.simulator.ballast import Ballast

MIB = 2**20


@pytest.fixture
def ballast(tmp_path):
    held = Ballast(64 * MIB, folder=tmp_path)
    yield held
    held.release()


def anonymous_bytes():
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


def open_descriptors():
    return len(list(Path("/proc/self/fd").iterdir()))


def follow(ballast, memory=0.0, descriptors=0.0, shared=0.0):
    while ballast.follow(memory_bytes=memory, descriptors=descriptors, shared_bytes=shared):
        pass


@pytest.mark.parametrize("amounts", [{"memory": float("inf")}, {"shared": float("inf")}, {"memory": 1e300}])
def test_an_infinite_leak_holds_what_may_be_held(ballast, amounts):
    follow(ballast, **amounts)
    assert ballast.memory_bytes + ballast.shared_bytes == 64 * MIB
    assert ballast.is_short


def test_leaked_memory_is_anonymous_memory_of_the_process_until_it_is_given_back(ballast):
    before = anonymous_bytes()
    follow(ballast, memory=40.5 * MIB)
    assert ballast.memory_bytes == 40 * MIB
    assert anonymous_bytes() - before == pytest.approx(40 * MIB, rel=0.1)
    follow(ballast)
    assert anonymous_bytes() - before < 4 * MIB


def test_leaked_descriptors_are_open_until_they_are_given_back(ballast):
    before = open_descriptors()
    follow(ballast, descriptors=17.9)
    assert open_descriptors() == before + 17
    follow(ballast, descriptors=3)
    assert ballast.descriptors == 3
    ballast.release()
    assert open_descriptors() == before


def test_leaked_shared_memory_is_in_files_of_a_folder_of_its_own_that_goes_at_the_end(ballast, tmp_path):
    follow(ballast, shared=3 * MIB)
    assert sum(path.stat().st_size for path in tmp_path.glob("plimsoll-simulator-*/*")) == 3 * MIB
    follow(ballast, shared=MIB)
    assert len(list(tmp_path.glob("plimsoll-simulator-*/*"))) == 1
    ballast.release()
    assert list(tmp_path.iterdir()) == []


def test_no_more_is_held_than_the_limit_and_the_shortfall_is_told(ballast):
    follow(ballast, memory=1000 * MIB, shared=10 * MIB)
    assert ballast.memory_bytes + ballast.shared_bytes == 64 * MIB
    assert ballast.shared_bytes == 10 * MIB
    assert ballast.is_short
    follow(ballast, memory=10 * MIB)
    assert not ballast.is_short


def test_memory_is_taken_a_little_at_a_time(ballast):
    assert ballast.follow(memory_bytes=64 * MIB, descriptors=0, shared_bytes=0)
    assert ballast.memory_bytes < 64 * MIB


def test_a_folder_that_cannot_be_written_is_a_shortfall_and_no_error(tmp_path):
    held = Ballast(folder=tmp_path / "nowhere")
    assert not held.follow(memory_bytes=0, descriptors=0, shared_bytes=5 * MIB)
    assert held.is_short
    held.release()
