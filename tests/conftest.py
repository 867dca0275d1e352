from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from leftovers import TEST_ID, Leftovers

# The tests share few cores with the processes they start. And some fork: a child of a process in which OpenMP has run
# with several threads hangs in its first parallel region.
os.environ["OMP_NUM_THREADS"] = "1"

# A shell that runs the tests in the background has them ignore Ctrl-C, and so would every process that they start.
for _number, _usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(_number) == signal.SIG_IGN:
        signal.signal(_number, _usual)


@pytest.fixture(scope="session", autouse=True)
def _logs_of_the_callback_interface(tmp_path_factory: pytest.TempPathFactory) -> None:
    os.environ["TTP_LOG_PATH"] = str(tmp_path_factory.mktemp("ttp-logs"))


@pytest.fixture
def no_leftovers() -> Iterator[None]:
    """Fails a test that leaves a process, a descriptor or shared memory behind, and ends the processes."""
    leftovers = Leftovers()
    os.environ[TEST_ID] = leftovers.test_id
    try:
        yield
    finally:
        del os.environ[TEST_ID]
        found = leftovers.find()
        leftovers.end()
    if found:
        pytest.fail("the test left behind: " + "; ".join(found), pytrace=False)


@pytest.fixture(autouse=True)
def _no_leftovers_of_real_processes(request: pytest.FixtureRequest) -> None:
    if {"integration", "e2e"} & set(request.path.parts):
        request.getfixturevalue("no_leftovers")
