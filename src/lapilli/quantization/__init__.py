"""torchao's PT2E flow with a quantizer whose models Lapilli computes in integers:

    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
    from lapilli.quantization import VulkanQuantizer, fit_weights, get_symmetric_quantization_config

    quantizer = VulkanQuantizer().set_global(get_symmetric_quantization_config(is_per_channel=True))
    prepared = prepare_pt2e(torch.export.export(model, inputs).module(), quantizer)
    for batch in batches:
        prepared(*batch)  # calibration
    fit_weights(prepared, batches)  # a third of the error, for a minute or so
    program = lapilli.compile(torch.export.export(convert_pt2e(prepared), inputs))

torchao must be installed.
"""

from __future__ import annotations

from lapilli.quantization.fitting import fit_weights
from lapilli.quantization.quantizer import QuantizationConfig, VulkanQuantizer, get_symmetric_quantization_config

__all__ = ["QuantizationConfig", "VulkanQuantizer", "fit_weights", "get_symmetric_quantization_config"]
