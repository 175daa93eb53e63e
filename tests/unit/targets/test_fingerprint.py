"""One name per set of weights, whatever it is loaded as."""

import torch
from torch import nn

from drafttrain.targets.structure import fingerprint_of


def model(seed: int = 0, scale: float = 1.0) -> nn.Module:
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(300, 20), nn.LayerNorm(20), nn.Linear(20, 3, bias=False))
    with torch.no_grad():
        net[0].weight.mul_(scale)
    return net


def test_fingerprint_equal_weights_agree_and_changed_weights_differ() -> None:
    assert fingerprint_of(model()) == fingerprint_of(model())
    assert len(fingerprint_of(model())) == 64
    assert len({fingerprint_of(m) for m in (model(), model(1), model(scale=1.1))}) == 3


def test_fingerprint_depends_on_parameter_names_and_shapes() -> None:
    named = [("a", (2, 3)), ("a", (3, 2)), ("b", (2, 3))]
    zeros = [nn.ParameterDict({name: nn.Parameter(torch.zeros(shape))}) for name, shape in named]
    assert len({fingerprint_of(z) for z in zeros}) == 3


def test_fingerprint_float32_and_bfloat16_loads_agree() -> None:
    # 2**-14 less a little rounds up to the threshold under which samples count as zero
    full = model(scale=1e-3)
    with torch.no_grad():
        full[0].bias.fill_(2.0**-14 * (1 - 2.0**-12))
    assert fingerprint_of(full) == fingerprint_of(model_copy(full, torch.bfloat16))


def test_fingerprint_of_bfloat16_weights_is_alike_in_every_dtype() -> None:
    for scale in (1.0, 1e-3, 1e-6):
        stored = model_copy(model(scale=scale), torch.bfloat16)
        loads = [model_copy(stored, dtype) for dtype in (torch.bfloat16, torch.float16, torch.float32)]
        assert len({fingerprint_of(load) for load in loads}) == 1


def test_fingerprint_reads_quantised_and_strided_parameters() -> None:
    weight = torch.arange(200, dtype=torch.uint8).reshape(10, 20)
    net = nn.ParameterDict({"q": nn.Parameter(weight, requires_grad=False), "t": nn.Parameter(torch.rand(4, 5).t())})
    before = fingerprint_of(net)
    net["q"].data[0, 0] = 9
    assert fingerprint_of(net) != before


def model_copy(source: nn.Module, dtype: torch.dtype) -> nn.Module:
    copy = model().to(dtype)
    copy.load_state_dict(source.state_dict())
    return copy
