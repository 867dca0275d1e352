from __future__ import annotations

import inspect
import os
import signal
from collections.abc import Iterator

import pytest
from hypothesis import settings

from evertrain import aio
from tests import once, ports, requests_asked
from tests.embedded.up import Up, small_job
from tests.keeper import kept
from tests.leftovers import TEST_ID, Leftovers, mark

LIMIT = 600
"""Seconds for a test with whole jobs, some of which other jobs share the cores with."""

# The tests share few cores with the processes they start. And some fork: a child of a process in which OpenMP has run
# with several threads hangs in its first parallel region.
os.environ["OMP_NUM_THREADS"] = "1"

# The same random tests each time, or a change is judged by luck; others with `make test-all`.
settings.register_profile("same", deadline=None, derandomize=True, database=None)
settings.register_profile("random", deadline=None, print_blob=True)
settings.load_profile("random" if os.environ.get("EVERTRAIN_TEST_RANDOM") else "same")

# Clusters of several tests run at the same time.
os.environ["EVERTRAIN_CLUSTERD_ADDR"] = "127.0.0.1:0"

# A shell that runs the tests in the background has them ignore Ctrl-C, and so would every process that they start.
for _number, _usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(_number) == signal.SIG_IGN:
        signal.signal(_number, _usual)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """A test that is a coroutine runs in a loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = pyfuncitem._fixtureinfo.argnames
    aio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "e2e" in item.path.parts and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(LIMIT))


@pytest.fixture(scope="session", autouse=True)
def _logs_of_the_callback_interface(tmp_path_factory: pytest.TempPathFactory) -> None:
    os.environ["TTP_LOG_PATH"] = str(tmp_path_factory.mktemp("ttp-logs"))


@pytest.fixture(scope="session", autouse=True)
def _logs_of_taskd(tmp_path_factory: pytest.TempPathFactory) -> None:
    os.environ["TASKD_LOG_PATH"] = str(tmp_path_factory.mktemp("taskd") / "logs")


@pytest.fixture(scope="session", autouse=True)
def _results_for_all_workers(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent  # each worker has its own folder in that of the whole run
    os.environ[once.FOLDER] = str(folder / "results")


@pytest.fixture(scope="session", autouse=True)
def _requests_of_parts_are_listened_to() -> Iterator[None]:
    with requests_asked.listening():
        yield


@pytest.fixture(autouse=True)
def _parts_ask_for_what_they_may() -> Iterator[None]:
    yield
    unlisted, requests_asked.unlisted[:] = list(requests_asked.unlisted), []
    assert not unlisted


@pytest.fixture(scope="session", autouse=True)
def _ports_of_this_process() -> None:
    ports.claim()  # now: no test is blamed for what stays open


@pytest.fixture(scope="session", autouse=True)
def _kept() -> Iterator[None]:
    """A test process that is killed can end nothing any more. What several tests share belongs to none of them."""
    with kept(mark()):
        os.environ[TEST_ID] = f"{os.getpid()}-shared"
        yield


@pytest.fixture
def no_leftovers(_kept: None) -> Iterator[None]:
    """Fails a test that leaves a process, a descriptor or shared memory behind, and ends the processes."""
    leftovers, shared = Leftovers(), os.environ[TEST_ID]
    os.environ[TEST_ID] = leftovers.test_id
    try:
        yield
    finally:
        os.environ[TEST_ID] = shared
        found = leftovers.find()
        leftovers.end()
    if found:
        pytest.fail("the test left behind: " + "; ".join(found), pytrace=False)


@pytest.fixture(autouse=True)
def _no_leftovers_of_real_processes(request: pytest.FixtureRequest) -> None:
    if {"integration", "e2e"} & set(request.path.parts):
        request.getfixturevalue("no_leftovers")


@pytest.fixture
def up(shared_cluster: Up) -> Iterator[Up]:
    """A cluster for all tests that leave it as they found it; if one fails, its jobs are nobody else's trouble."""
    yield shared_cluster
    if jobs := shared_cluster.kubectl("get", "acjob", "-o", "name").stdout.split():
        shared_cluster.kubectl("delete", *jobs)
        shared_cluster.kubectl("wait", "--for=delete", "pods", "--all", "--timeout=200s")


@pytest.fixture(scope="session")
def shared_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    cluster = Up(tmp_path_factory.mktemp("cluster"), "--node-label", "example-key=example-value")
    try:
        # The nodes have then started what lasts as long as they do, and a test isn't blamed for it.
        cluster.kubectl("apply", "-f", "-", stdin=small_job("first", "true", npus=8))
        cluster.kubectl("wait", "--for=condition=Succeeded", "acjob/first", "--timeout=200s")
        cluster.kubectl("delete", "acjob", "first")
        yield cluster
    finally:
        assert cluster.end() == 0, cluster.lines
