"""Triton kernels that cost nothing until they are launched: importing triton takes half a second and needs the package."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Kernel:
    """A kernel in Triton's language. `kernel[grid](...)` compiles and launches it, as with triton.jit."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.fn: Any = fn
        self.__name__, self.__doc__ = fn.__name__, fn.__doc__
        self._jitted: Any = None

    def __getitem__(self, grid: Any) -> Any:
        return self.jitted()[grid]

    def jitted(self) -> Any:
        """What triton.jit makes of the function. Puts `tl` and the jitted helpers it calls into its module."""
        if self._jitted is None:
            import triton
            import triton.language

            names: dict[str, Any] = self.fn.__globals__
            names.setdefault("tl", triton.language)
            for used in self.fn.__code__.co_names:
                if isinstance(names.get(used), Kernel):
                    names[used] = names[used].jitted()
            self._jitted = triton.jit(self.fn)
        return self._jitted


def kernel(fn: Callable[..., Any]) -> Any:
    """Decorator in the place of triton.jit. Typed Any: in the module the name is a kernel, inside other kernels a function."""
    return Kernel(fn)


def language_type(dtype: Any) -> Any:
    """Triton's name of a torch dtype."""
    import triton.language

    return getattr(triton.language, str(dtype).removeprefix("torch."))


def backend() -> str:
    """What kernels are compiled for: cuda or hip; cuda under the interpreter, too."""
    import triton
    from triton.runtime import driver

    return "cuda" if triton.knobs.runtime.interpret else str(driver.active.get_current_target().backend)


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def power_of_2(n: int) -> int:
    """The least power of two that is at least n (n >= 1)."""
    return 1 << (n - 1).bit_length()
