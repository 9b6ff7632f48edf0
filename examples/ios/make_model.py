"""Writes mobilenetv2_metal.pt, as the iOS tutorial does: python examples/ios/make_model.py"""

from __future__ import annotations

import torch
import torchvision
from torch.utils.mobile_optimizer import optimize_for_mobile

model = torchvision.models.mobilenet_v2(weights="DEFAULT")
scripted_model = torch.jit.script(model.eval())
optimized_model = optimize_for_mobile(scripted_model, backend="metal")
print(torch.jit.export_opnames(optimized_model))  # type: ignore[no-untyped-call]
optimized_model(torch.rand(1, 3, 224, 224))  # so that the program in the file is for this size
optimized_model._save_for_lite_interpreter("mobilenetv2_metal.pt")
