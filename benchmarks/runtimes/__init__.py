"""Lapilli beside other runtimes of whole models, each as pip installs it: `make runtimes`, docs/runtimes.md."""
