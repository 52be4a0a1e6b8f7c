"""Function threads on a GPU: they wait for their function to come back, and for no other."""

from __future__ import annotations

import gc
import queue
import threading
import weakref

import pytest

from lamina.gpu import function_threads
from lamina.gpu.function_threads import FunctionThreads, ThreadCache

CAT, DOG = ("cat", "app.py"), ("dog", "app.py")


def thread_of(maker: FunctionThreads, *, further: bool = False) -> object:
    return maker.submit(threading.get_ident, further=further).result(10)


def left(maker: FunctionThreads) -> None:
    """And come to rest."""
    rests = threading.Event()
    maker.retire(lambda: None, rests.set)
    assert rests.wait(10)


def test_a_function_that_is_loaded_again_finds_the_threads_that_have_met_its_shapes():
    makers = ThreadCache()
    maker = makers.acquire(CAT)
    threads = thread_of(maker), thread_of(maker, further=True)
    left(maker)
    again = makers.acquire(CAT)
    assert (thread_of(again), thread_of(again, further=True)) == threads


def test_its_two_threads_are_two():
    maker = ThreadCache().acquire(CAT)
    assert thread_of(maker) != thread_of(maker, further=True)


def test_no_other_function_finds_them_nor_another_version_of_it():
    makers = ThreadCache()
    maker = makers.acquire(CAT)
    left(maker)
    assert makers.acquire(DOG) is not maker and makers.acquire(("cat", "new.py")) is not maker


def test_two_of_one_function_have_threads_of_their_own():
    makers = ThreadCache()
    assert makers.acquire(CAT) is not makers.acquire(CAT)


def test_a_function_that_takes_long_to_close_holds_up_no_other():
    makers = ThreadCache()
    maker, goes_on = makers.acquire(CAT), threading.Event()
    maker.retire(lambda: bool(goes_on.wait(20)) or None, lambda: None)
    assert makers.acquire(CAT) is not maker
    goes_on.set()


def test_a_function_that_fails_to_close_comes_to_rest_all_the_same():
    makers = ThreadCache()
    maker = makers.acquire(CAT)
    rests = threading.Event()
    maker.retire(lambda: [][1], rests.set)  # type: ignore[arg-type]
    assert rests.wait(10)
    assert makers.acquire(CAT) is maker


def test_retired_threads_keep_no_reference_to_their_function():
    class Runner:
        def close(self) -> None:
            pass

    maker, runner = ThreadCache().acquire(CAT), Runner()
    known, found = weakref.ref(runner), queue.SimpleQueue[object]()
    goes_on = threading.Event()
    maker.submit(goes_on.wait, 20)
    maker.retire(runner.close, lambda: found.put(known()))
    del runner
    goes_on.set()
    assert found.get(timeout=10) is None


def test_of_too_many_that_wait_the_one_that_has_waited_longest_goes(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(function_threads, "MAX_IDLE", 2)
    makers = ThreadCache()
    oldest, *others = [makers.acquire((name, "")) for name in "abc"]
    for maker in (oldest, *others):
        left(maker)
    assert [makers.acquire((name, "")) is maker for name, maker in zip("bc", others, strict=True)] == [True, True]
    assert makers.acquire(("a", "")) is not oldest
    with pytest.raises(RuntimeError, match="shutdown"):
        oldest.submit(print)


def test_with_their_owner_they_end():
    makers = ThreadCache()
    maker = makers.acquire(CAT)
    thread = maker.submit(threading.current_thread).result(10)
    left(maker)
    del makers, maker
    gc.collect()
    assert isinstance(thread, threading.Thread)
    thread.join(10)
    assert not thread.is_alive()


# ------------------------------------------------------------------------------------------ threads of an architecture

SHAPE = ("a digest", "")


def test_functions_of_one_architecture_have_the_same_threads():
    makers = ThreadCache()
    assert makers.share(SHAPE) is makers.share(SHAPE) is not makers.share(("another", ""))


def test_threads_of_an_architecture_outlive_its_functions(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(function_threads, "MAX_IDLE", 1)
    makers = ThreadCache()
    oldest, other, used = makers.share(SHAPE), makers.share(("other", "")), makers.share(("used", ""))
    makers.share(("used", ""))
    for threads in (oldest, other, used):
        makers.unshare(threads)
    assert makers.share(("other", "")) is other and makers.share(("used", "")) is used
    with pytest.raises(RuntimeError, match="shutdown"):
        oldest.submit(print)


def test_an_architecture_is_code_and_shapes_but_not_weights():
    torch = pytest.importorskip("torch", reason="torch is not installed")

    def net(width: int, layer: type = torch.nn.ReLU) -> object:
        return torch.nn.Sequential(torch.nn.Linear(4, width), layer())

    example = (torch.zeros(1, 4),)
    found = function_threads.architecture_of(net(3), example)
    assert found == function_threads.architecture_of(net(3), example)
    others = [(net(5), example), (net(3, torch.nn.Tanh), example), (net(3), (torch.zeros(1, 2, 4),))]
    assert found not in [function_threads.architecture_of(*other) for other in others]
