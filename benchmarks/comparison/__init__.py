"""Lapilli beside the other ways of running PyTorch on Vulkan: `make comparison` measures all in one run, and writes
docs/comparison.md.

- `environments`: what is installed, each system in an environment of its own
- `cases`, `models`: what the systems are asked to compute
- `systems`: how each of them runs a module; `features`: what else is asked of it
- `judging`: when a result is right; `timing`: inference and training beside torch's CPU; `machine`: how busy it is
- `worker`: one part of one system, measured in its environment; `page`: the document"""
