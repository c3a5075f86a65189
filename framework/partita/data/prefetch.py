"""Work done ahead of its use by threads. Order is kept, errors arrive in place of the result, and closing ends the threads."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

T = TypeVar("T")


class Prefetch(Generic[T]):
    """Iterator of (n, make(n)) for n = first, first + 1, ... to `last` (None: without end), `threads` + 1 of them ahead.

    With 0 threads each is made when asked for. Usable as a context manager; `close` may be called more than once.
    """

    def __init__(self, make: Callable[[int], T], first: int, last: int | None = None, threads: int = 1) -> None:
        self._make, self._next, self._last = make, first, last
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="partita-data") if threads > 0 else None
        self._ahead: deque[tuple[int, Future[T]]] = deque()
        if self._pool is not None:
            for _ in range(threads + 1):
                self._submit()

    def __iter__(self) -> Iterator[tuple[int, T]]:
        return self

    def __next__(self) -> tuple[int, T]:
        if self._pool is not None:
            return self._take()
        if self._last is not None and self._next > self._last:
            raise StopIteration
        number, self._next = self._next, self._next + 1
        return number, self._make(number)

    def _take(self) -> tuple[int, T]:
        if not self._ahead:
            self.close()
            raise StopIteration
        number, future = self._ahead.popleft()
        try:
            result = future.result()
        except BaseException:
            self.close()
            raise
        self._submit()  # after the wait: the woken thread would compete with this one for the interpreter
        return number, result

    def _submit(self) -> None:
        if self._pool is not None and (self._last is None or self._next <= self._last):
            self._ahead.append((self._next, self._pool.submit(self._make, self._next)))
            self._next += 1

    def close(self) -> None:
        """Drops what is ahead and waits for the threads to end (at most the one piece of work that each is at)."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
        self._ahead.clear()
        self._last = self._next - 1

    def __enter__(self) -> Prefetch[T]:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
