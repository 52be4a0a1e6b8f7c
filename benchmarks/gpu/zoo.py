"""Architectures to measure, with random weights in half precision: how long one takes does not depend on what it learnt.

Convolutional nets are channels-last on 224 x 224 images, language models take 128 tokens. Each is made on the GPU, so that
drawing the weights takes no time worth naming.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

TORCHVISION = [
    "resnet50",
    "mobilenet_v3_large",
    "shufflenet_v2_x0_5",
    "convnext_tiny",
    "convnext_base",
    "resnet18",
    "resnet34",
    "resnet101",
    "resnet152",
    "resnext50_32x4d",
    "wide_resnet50_2",
    "densenet121",
    "densenet169",
    "mobilenet_v2",
    "mobilenet_v3_small",
    "shufflenet_v2_x1_0",
    "shufflenet_v2_x2_0",
    "mnasnet1_0",
    "efficientnet_b0",
    "efficientnet_b2",
    "efficientnet_v2_s",
    "regnet_y_400mf",
    "regnet_x_3_2gf",
    "convnext_small",
    "squeezenet1_1",
    "googlenet",
    "inception_v3",
    "alexnet",
    "vgg11",
    "vgg16",
    "vit_b_16",
    "vit_b_32",
    "swin_t",
    "swin_s",
    "maxvit_t",
]
TIMM = [
    "vit_tiny_patch16_224",
    "deit_small_patch16_224",
    "mixer_b16_224",
    "ghostnet_100",
    "repvgg_a2",
    "mobilevit_s",
    "res2net50_26w_4s",
    "xcit_tiny_12_p16_224",
    "efficientformer_l1",
    "poolformer_s12",
]
TEXT = ["bert_base", "bert_large", "distilbert", "electra_small", "albert_base", "gpt2", "t5_small_encoder", "roberta_base"]
OWN = ["mnist_cnn", "mlp_512x4", "mlp_4096x8", "lstm_512x2", "unet_small", "recommender", "fcn_resnet50", "matmul_4096"]
DEVICE = "cuda"
FIVE = ("resnet50", "mobilenet_v3_large", "shufflenet_v2_x0_5", "convnext_tiny", "bert_base")
"""What the measurements of sharing use."""

ALL = [*FIVE[:4], "bert_base", *(name for name in [*TORCHVISION, *TEXT, *OWN, *TIMM] if name not in FIVE)]


@dataclass(frozen=True)
class Model:
    name: str
    family: str
    module: Any
    make_input: Callable[[int], Any]
    shape: str


def build(name: str, seed: int = 0) -> Model:
    import torch

    torch.manual_seed(seed)
    if os.environ.get("LAMINA_GPU") == "null":
        return _stand_in(name)
    with torch.device(DEVICE):
        for family, names, make in (  # noqa: B007
            ("torchvision", TORCHVISION, _torchvision),
            ("timm", TIMM, _timm),
            ("text", TEXT, _text),
            ("own", OWN, _own),
        ):
            if name in names:
                module, shape, make_input = make(name)
                break
        else:
            raise ValueError(f"no model {name!r}")
    module = module.half().eval().requires_grad_(False)
    if len(shape) == 3:
        module = module.to(memory_format=torch.channels_last)
    return Model(name, family, module, make_input or images(shape), "x".join(map(str, shape)))


def _stand_in(name: str) -> Model:
    """A model that takes no time, for the executor's twin."""
    import torch

    if name in TEXT:
        return Model(name, "text", torch.nn.Embedding(30_000, 8).eval(), lambda batch: torch.zeros(batch, 128).long(), "128")
    layers = (torch.nn.Conv2d(3, 8, 32, stride=32), torch.nn.Flatten(), torch.nn.Linear(8 * 49, 10))
    module = torch.nn.Sequential(*layers).half().eval().requires_grad_(False)
    return Model(name, "twin", module, lambda batch: torch.zeros(batch, 3, 224, 224).half(), "3x224x224")


def images(shape: tuple[int, ...]) -> Callable[[int], Any]:
    def make(batch: int) -> Any:
        import torch

        made = torch.randn(batch, *shape, device=DEVICE, dtype=torch.half)
        return made.to(memory_format=torch.channels_last) if len(shape) == 3 else made

    return make


def tokens(length: int, words: int) -> Callable[[int], Any]:
    def make(batch: int) -> Any:
        import torch

        return torch.randint(0, words, (batch, length), device=DEVICE)

    return make


def _torchvision(name: str) -> tuple[Any, tuple[int, ...], Any]:
    import torchvision

    size = 299 if name == "inception_v3" else 224
    options = {"aux_logits": False, "init_weights": False} if name in ("googlenet", "inception_v3") else {}
    return getattr(torchvision.models, name)(weights=None, **options), (3, size, size), None


def _timm(name: str) -> tuple[Any, tuple[int, ...], Any]:
    import timm

    return timm.create_model(name, pretrained=False), (3, 224, 224), None


def _text(name: str) -> tuple[Any, tuple[int, ...], Any]:
    import torch
    import transformers as hf

    attention = {"attn_implementation": "sdpa"}
    made = {
        "bert_base": lambda: hf.BertModel(hf.BertConfig(**attention)),
        "bert_large": lambda: hf.BertModel(
            hf.BertConfig(hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096, **attention)
        ),
        "distilbert": lambda: hf.DistilBertModel(hf.DistilBertConfig(**attention)),
        "electra_small": lambda: hf.ElectraModel(hf.ElectraConfig(**attention)),
        "albert_base": lambda: hf.AlbertModel(
            hf.AlbertConfig(hidden_size=768, num_attention_heads=12, intermediate_size=3072, **attention)
        ),
        "gpt2": lambda: hf.GPT2Model(hf.GPT2Config(**attention)),
        "t5_small_encoder": lambda: hf.T5EncoderModel(hf.T5Config()),
        "roberta_base": lambda: hf.RobertaModel(hf.RobertaConfig(**attention)),
    }[name]()

    class FirstToken(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = made

        def forward(self, ids: Any) -> Any:
            return self.model(input_ids=ids).last_hidden_state[:, 0]

    return FirstToken(), (128,), tokens(128, 30_000)


def _own(name: str) -> tuple[Any, tuple[int, ...], Any]:
    import torch
    from torch import nn

    def mlp(width: int, depth: int) -> Any:
        return nn.Sequential(*[layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.ReLU())])

    if name == "mnist_cnn":
        net = nn.Sequential(
            nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
            nn.Linear(9216, 128), nn.ReLU(), nn.Linear(128, 10),
        )  # fmt: skip
        return net, (1, 28, 28), None
    if name == "mlp_512x4":
        return mlp(512, 4), (512,), None
    if name == "mlp_4096x8":
        return mlp(4096, 8), (4096,), None
    if name == "matmul_4096":
        return nn.Linear(4096, 4096, bias=False), (256, 4096), None
    if name == "lstm_512x2":

        class Last(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.lstm = nn.LSTM(512, 512, 2, batch_first=True)

            def forward(self, steps: Any) -> Any:
                return self.lstm(steps)[0][:, -1]

        return Last(), (32, 512), None
    if name == "fcn_resnet50":
        import torchvision

        fcn = torchvision.models.segmentation.fcn_resnet50(weights=None, weights_backbone=None)

        class Map(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.fcn = fcn

            def forward(self, image: Any) -> Any:
                return self.fcn(image)["out"]

        return Map(), (3, 224, 224), None
    if name == "recommender":

        class Recommender(nn.Module):
            """Twenty-six tables of 100,000 rows and a small net on top: memory, not arithmetic."""

            def __init__(self) -> None:
                super().__init__()
                self.table = nn.Embedding(26 * 100_000, 64)
                self.top = nn.Sequential(nn.Linear(26 * 64, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 1))

            def forward(self, ids: Any) -> Any:
                return self.top(self.table(ids).flatten(1))

        return Recommender(), (26,), tokens(26, 26 * 100_000)
    assert name == "unet_small"

    class Unet(nn.Module):
        def __init__(self) -> None:
            super().__init__()

            def block(inside: int, outside: int) -> Any:
                return nn.Sequential(
                    nn.Conv2d(inside, outside, 3, padding=1), nn.ReLU(), nn.Conv2d(outside, outside, 3, padding=1), nn.ReLU()
                )

            self.down = nn.ModuleList([block(3, 32), block(32, 64), block(64, 128)])
            self.pool = nn.MaxPool2d(2)
            self.middle = block(128, 256)
            self.up = nn.ModuleList([nn.ConvTranspose2d(256, 128, 2, 2), nn.ConvTranspose2d(128, 64, 2, 2)])
            self.last_up = nn.ConvTranspose2d(64, 32, 2, 2)
            self.join = nn.ModuleList([block(256, 128), block(128, 64)])
            self.last = nn.Sequential(block(64, 32), nn.Conv2d(32, 2, 1))

        def forward(self, x: Any) -> Any:
            kept = []
            for block in self.down:
                x = block(x)
                kept.append(x)
                x = self.pool(x)
            x = self.middle(x)
            for up, join in zip(self.up, self.join, strict=True):
                x = join(torch.cat([up(x), kept.pop()], 1))
            return self.last(torch.cat([self.last_up(x), kept.pop()], 1))

    return Unet(), (3, 224, 224), None
