"""The device of a pass: where an array library computes, how rows get there, and its memory."""

import importlib
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from array_api_compat import is_cupy_array, is_torch_array

from cme_dask.errors import DataError, ResourceError

Array = Any

_WRAPPED = ("cupy", "torch")  # libraries that array_api_compat makes follow the standard


@dataclass(frozen=True)
class Device:
    """A device other than the host, named so that another process finds it.

    Attributes
    ----------
    library
        The module of the array library, such as ``"cupy"``.
    name
        What its ``asarray`` takes as ``device``; of CuPy the number of the GPU.
    """

    library: str
    name: Any

    @classmethod
    def of(cls, device: Any) -> Self:
        """From what a user gives: ``"cuda"``, or a device of an array library.

        Raises
        ------
        DataError
            If it is neither.
        """
        library = type(device).__module__.partition(".")[0]
        if isinstance(device, str):
            kind, _, number = device.partition(":")
            if kind == "cuda" and (number or "0").isdigit():
                return cls("cupy", int(number or 0))
        elif library == "cupy":
            return cls(library, int(device.id))
        elif library not in ("builtins", "numpy"):
            return cls(library, device)
        raise DataError(
            "device must be 'cuda', 'cuda:1', ... or a device of an array library such as "
            f"torch.device('cuda'), got {device!r}"
        )

    def place(self, array: Array) -> Array:
        """The array on the device.

        Raises
        ------
        ResourceError
            If this process has not got the device.
        """
        try:
            if self.library == "cupy":
                cupy = importlib.import_module("cupy")
                with cupy.cuda.Device(self.name):
                    return cupy.asarray(array)
            prefix = "array_api_compat." if self.library in _WRAPPED else ""
            xp = importlib.import_module(prefix + self.library)
            return xp.asarray(array, device=self.name)
        except Exception as error:
            if isinstance(error, MemoryError) or "memory" in str(error).lower():
                raise
            raise ResourceError(
                f"the device {self.name!r} of {self.library} can't be used here: {error}"
            ) from error

    def memory(self) -> int:
        """Bytes of its memory, see :func:`device_memory`."""
        return device_memory(self.place(np.zeros(1)))


def device_memory(like: Array) -> int:
    """Bytes of the memory of the GPU that holds an array; 0 in host memory and where unknown."""
    if is_cupy_array(like):
        return int(like.device.mem_info[1])
    if is_torch_array(like) and like.device.type == "cuda":
        torch = importlib.import_module("torch")
        return int(torch.cuda.get_device_properties(like.device).total_memory)
    return 0
