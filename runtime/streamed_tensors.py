"""Tensors that exist only while torch.save writes them. With them in the
state of a checkpoint, rank 0 needs memory for one full tensor at a time.

torch.save pickles all objects first, then writes their storages one by one in the same order. The
file is that of the tensors themselves, byte for byte.
"""
from collections import OrderedDict

import torch


class Streamed:
    """Stands in a state for a tensor. When torch.save comes to its bytes, `source.read()` must
    return the tensor, contiguous from the start of its storage."""

    def __init__(self, shape: tuple, dtype: torch.dtype, source):
        self.like = torch.empty(shape, dtype=dtype, device="meta")
        self.source = source

    def __reduce__(self):
        """What torch.Tensor.__reduce_ex__ returns for a tensor on the CPU: a function that builds
        the tensor again, and the arguments of that function. Pickle then asks the first argument
        for its storage."""
        storage = LateStorage(self.like.nbytes, device="meta")
        storage.source = self.source
        typed = torch.storage.TypedStorage(wrap_storage=storage, dtype=self.like.dtype,
                                           _internal=True)
        typed._fake_device = "cpu"          # what the file says of its device
        offset = 0
        shape, stride = tuple(self.like.shape), self.like.stride()
        requires_grad = False
        hooks = OrderedDict()
        return (torch._utils._rebuild_tensor_v2,
                (typed, offset, shape, stride, requires_grad, hooks))


class LateStorage(torch.UntypedStorage):
    """A storage of the device `meta`, which has no memory. torch.save calls `cpu` for the bytes of
    a storage that is not on the CPU, and drops them when they are in the file."""

    def cpu(self):
        return self.source.read().untyped_storage()
