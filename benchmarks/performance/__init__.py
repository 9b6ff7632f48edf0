"""How fast Lapilli is beside torch, one table after another: `python -m performance` writes docs/performance.md."""
