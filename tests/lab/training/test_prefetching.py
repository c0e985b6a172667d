"""Batches made ahead: the same bytes, at most one ahead, errors and signals as without, and no thread left behind."""

import gc
import signal
import threading
import time
import weakref

import pytest
import torch
from running import Signalling, content, small
from toy_language import PairLanguage

from isoloss.errors import IsolossError
from isoloss.lab.training.train import Batches, Interrupted, Training, train
from isoloss.run_config import ModelConfig, ObjectiveConfig
from isoloss.runs import Run

AHEAD = small(prefetch=True)


def trained(path, config, language=None, **arguments):
    run = Run(path)
    train(run, config, language or PairLanguage(is_ragged=True), **arguments)
    return run


@pytest.fixture(autouse=True)
def _no_thread_is_left():
    before = threading.active_count()
    yield
    assert threading.active_count() == before


class Watched(PairLanguage):
    """Notes which thread makes which step's batch, with how many threads of torch's."""

    def __init__(self, **arguments):
        super().__init__(**arguments)
        self.made = []

    def batch(self, step, n, *, seed):
        self.made.append((step, threading.current_thread() is threading.main_thread(), torch.get_num_threads()))
        return super().batch(step, n, seed=seed)


# --- the batches alone


def test_the_next_batch_is_made_while_this_one_is_used():
    begun, go_on = [threading.Event() for _ in range(5)], threading.Event()

    def make(step):
        begun[step].set()
        if step == 2:
            assert go_on.wait(10)
        return step * 10

    with Batches(make, last=3, ahead=True) as batches:
        assert batches.of(1) == 10
        assert begun[2].wait(10)  # nobody has asked for it
        assert not begun[3].is_set()  # one ahead, no more
        go_on.set()
        assert [batches.of(2), batches.of(3)] == [20, 30]
    assert not begun[4].is_set()


@pytest.mark.parametrize("ahead", [False, True])
def test_an_error_comes_at_its_own_step_as_it_is(ahead):
    error = ValueError("no batch")

    def make(step):
        if step == 2:
            raise error
        return step

    with Batches(make, last=3, ahead=ahead) as batches:
        assert batches.of(1) == 1
        with pytest.raises(ValueError, match="no batch") as raised:
            batches.of(2)
        assert raised.value is error


def test_a_step_out_of_order_is_made_anew():
    with Batches(lambda step: step, last=9, ahead=True) as batches:
        assert [batches.of(step) for step in (4, 2, 3, 3)] == [4, 2, 3, 3]


def test_after_wait_nothing_is_being_made():
    done = []

    def make(step):
        time.sleep(0.05)
        done.append(step)

    with Batches(make, last=3, ahead=True) as batches:
        batches.of(1)
        batches.wait()
        assert done == [1, 2]


# --- in a run


@pytest.mark.parametrize("objective", [ObjectiveConfig(), ObjectiveConfig(masking="fraction", fraction=0.5)])
def test_a_run_is_the_same_bytes(tmp_path, objective):
    changes = {"objective": objective, "checkpoints": (0, 5), "model": ModelConfig(size="d16", dropout=0.2)}
    language = Watched(is_ragged=True)
    ahead = trained(tmp_path / "ahead", small(prefetch=True, **changes), language)
    assert content(ahead) == content(trained(tmp_path / "plain", small(**changes)))
    assert language.made == [(step, False, 1) for step in range(1, 11)]


def test_exact_labels_are_the_same_bytes(tmp_path):
    changes = {"objective": ObjectiveConfig(labels="exact"), "steps": 5}
    language = small().language.build()
    ahead = trained(tmp_path / "ahead", small(prefetch=True, **changes), language)
    assert content(ahead) == content(trained(tmp_path / "plain", small(**changes), language))


def test_nothing_is_made_while_something_is_measured(tmp_path):
    active = threading.Event()

    class Slow(PairLanguage):
        def batch(self, step, n, *, seed):
            active.set()
            time.sleep(0.02)
            active.clear()
            return super().batch(step, n, seed=seed)

    seen = []

    def measure(model):
        seen.append(active.is_set())
        return {}

    trained(tmp_path, small(prefetch=True, log_every=2, measure_every=2), Slow(), measure=measure)
    assert seen == [False] * 5


@pytest.mark.parametrize("at", [1, 4, 10])
def test_a_signal_ends_it_and_the_run_goes_on_bit_for_bit(tmp_path, at):
    whole = trained(tmp_path / "whole", small())
    with pytest.raises(Interrupted) as stop:
        trained(tmp_path / "run", AHEAD, Signalling(at=[at], is_ragged=True))
    assert stop.value.step in (at - 1, at)
    assert content(trained(tmp_path / "run", AHEAD)) == content(whole)


def test_a_second_ctrl_c_stops_at_once(tmp_path):
    class Twice(PairLanguage):
        def batch(self, step, n, *, seed):
            if step == 3:
                self.thread = threading.current_thread()
                first = signal.getsignal(signal.SIGINT)
                for _ in range(2):  # to the main thread, as Ctrl-C is: a signal to this one does not wake it
                    signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
                    self.wait_until(lambda: signal.getsignal(signal.SIGINT) is not first)
            return super().batch(step, n, seed=seed)

        def wait_until(self, is_so):
            deadline = time.monotonic() + 30
            while not is_so():
                assert time.monotonic() < deadline
                time.sleep(0.001)

    language = Twice()
    with pytest.raises(KeyboardInterrupt):
        trained(tmp_path, AHEAD, language)
    language.thread.join(30)


@pytest.mark.parametrize("settings", [{}, {"prefetch": True}, {"compiled": True}])
def test_what_was_trained_is_freed_at_its_end(tmp_path, monkeypatch, settings):
    if "compiled" in settings:  # numba's compiler keeps its callers until they are collected
        trained(tmp_path / "first", small(**settings))
        gc.collect()
    made, begin = [], Training.__post_init__

    def noted(training):
        made.append(weakref.ref(training))
        begin(training)

    monkeypatch.setattr(Training, "__post_init__", noted)
    gc.disable()
    try:
        trained(tmp_path / "run", small(**settings))
        assert [training() for training in made] == [None]
    finally:
        gc.enable()


def test_an_error_in_the_thread_reaches_the_caller(tmp_path):
    error = IsolossError("the sentences of step 7 are gone")

    class Failing(PairLanguage):
        def batch(self, step, n, *, seed):
            if step == 7:
                raise error
            return super().batch(step, n, seed=seed)

    with pytest.raises(IsolossError) as raised:
        trained(tmp_path / "run", AHEAD, Failing(is_ragged=True))
    assert raised.value is error
    assert [line["step"] for line in Run(tmp_path / "run").metrics()] == [4]
    whole = content(trained(tmp_path / "whole", small()))
    assert content(trained(tmp_path / "run", AHEAD)) == whole


@pytest.mark.parametrize("threads", [0, 2])
def test_it_needs_one_thread(tmp_path, threads):
    with pytest.raises(IsolossError, match=rf"prefetch is on and threads is {threads}; it must be 1"):
        trained(tmp_path / "run", small(prefetch=True, threads=threads))
    assert not (tmp_path / "run").exists()
