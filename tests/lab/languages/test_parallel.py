"""Pieces on threads: each once, one thread a piece, and settings as they were afterwards."""

import threading

import pytest
import torch

from isoloss.lab.languages.batches import run_in_threads

CPU = torch.device("cpu")


@pytest.fixture(params=[1, 3])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    assert torch.get_num_threads() == request.param
    torch.set_num_threads(before)


def test_every_piece_is_done_once_by_one_thread(threads):
    done, lock = [], threading.Lock()

    def work(a, b):
        with lock:
            done.append((a, b, torch.get_num_threads(), threading.get_ident()))

    run_in_threads(work, ((i, -i) for i in range(200)), CPU)
    assert sorted(done) == sorted((i, -i, 1, name) for (i, _, _, name) in done)
    assert sorted(i for i, *_ in done) == list(range(200))
    assert len({name for *_, name in done}) <= threads


def test_pieces_are_worked_on_side_by_side():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    both = threading.Barrier(2)
    try:
        run_in_threads(lambda: both.wait(timeout=60), [(), ()], CPU)
    finally:
        torch.set_num_threads(before)


def test_no_pieces(threads):
    run_in_threads(lambda: pytest.fail("there is no work"), [], CPU)


def test_the_error_is_that_of_the_first_piece_that_fails(threads):
    second = threading.Event()

    def work(index):
        if index == 5:
            second.wait(timeout=60 if threads > 1 else 0)
            raise ValueError("piece 5")
        if index == 6:
            second.set()
            raise ValueError("piece 6")

    with pytest.raises(ValueError, match="piece 5"):
        run_in_threads(work, [(i,) for i in range(50)], CPU)


def test_another_device_is_given_one_piece_after_the_other():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    names = []
    try:
        run_in_threads(
            lambda: names.append((threading.get_ident(), torch.get_num_threads())), [()] * 9, torch.device("meta")
        )
    finally:
        torch.set_num_threads(before)
    assert names == [(threading.get_ident(), 3)] * 9


def test_inference_mode_holds_in_every_thread(threads):
    with torch.inference_mode():
        out = torch.zeros(10)
        run_in_threads(lambda place: out[place].add_(place), [(i,) for i in range(10)], CPU)
    assert out.tolist() == list(range(10))
