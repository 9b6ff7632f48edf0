"""From a source of a model to a torch.export.ExportedProgram."""

from lapilli.capture.dims import dim_names
from lapilli.capture.sources import capture

__all__ = ["capture", "dim_names"]
