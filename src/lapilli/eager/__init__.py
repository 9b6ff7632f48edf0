"""The eager device "vulkan": plain tensors of PyTorch whose memory lies on a Vulkan device.

PyTorch lets one more kind of device be added from outside, under the dispatch key PrivateUse1. Ours is made of:

- ``device``: tells PyTorch of it; at import time little, the rest at the first use.
- ``storage``: tensors and their memory, and what moves between the host and the devices.
- ``views``: the operators that make tensors and views, and compute nothing.
- ``call`` and its neighbours: an operator becomes a program, which is queued.
- ``api``: ``torch.vulkan``.
- ``autocast``, ``generators``: mixed precision, and where random numbers begin.
- ``tensors``, ``storages``, ``modules``, ``saving``, ``accelerator``: the places where PyTorch must be told in Python.
"""
