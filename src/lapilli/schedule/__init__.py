"""From the kernel IR to a list of kernels: realization, fusion, layouts, order."""
