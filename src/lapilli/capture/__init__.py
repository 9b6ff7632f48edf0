"""Captures a model from any source as a torch.export.ExportedProgram."""

from lapilli.capture.dims import dim_names
from lapilli.capture.sources import capture, prepared

__all__ = ["capture", "dim_names", "prepared"]
