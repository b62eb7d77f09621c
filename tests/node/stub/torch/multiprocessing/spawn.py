"""Start processes and wait for them, as torch does."""

import multiprocessing


def _wrap(fn, i, args):
    fn(i, *args)


def spawn(fn, args=(), nprocs=1):
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_wrap, args=(fn, i, args)) for i in range(nprocs)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        if process.exitcode:
            raise RuntimeError(f"process exited with {process.exitcode}")
