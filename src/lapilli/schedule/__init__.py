"""From the kernel IR to a list of kernels: what is realised, what is fused, in which layout, in which order."""
