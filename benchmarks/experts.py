"""What passes of a mixture-of-experts target cost by tokens, timed, against the formula of `drafttrain simulate`.

`python -m benchmarks.experts`: a random model whose time goes into reading weights. One run, interleaved, medians of repeats.
"""

from __future__ import annotations

import argparse
from statistics import median
from time import perf_counter

import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from drafttrain.measure.simulate.scenario import Experts

TOKENS = (1, 2, 4, 8, 16)


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--experts", type=int, default=32)
    parser.add_argument("--chosen", type=int, default=2)
    given = parser.parse_args()
    config = Qwen3MoeConfig(
        vocab_size=512,
        hidden_size=1024,
        intermediate_size=1024,
        moe_intermediate_size=768,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=128,
        num_experts=given.experts,
        num_experts_per_tok=given.chosen,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    routed = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    dense = sum(p.numel() for p in model.parameters()) - routed - model.get_input_embeddings().weight.numel()
    read = routed * given.chosen / given.experts
    experts = Experts(given.experts, given.chosen, read / (read + dense))
    chosen: list[torch.Tensor] = []
    for layer in model.model.layers:
        layer.mlp.gate.register_forward_hook(lambda module, args, output: chosen.append(output[-1]))
    seconds: dict[int, list[float]] = {tokens: [] for tokens in TOKENS}
    distinct: dict[int, list[int]] = {tokens: [] for tokens in TOKENS}
    for _ in range(given.repeats + 1):
        for tokens in TOKENS:
            row = torch.randint(0, config.vocab_size, (1, tokens))
            chosen.clear()
            begin = perf_counter()
            model(row)
            seconds[tokens].append(perf_counter() - begin)
            distinct[tokens] += [len(index.unique()) for index in chosen]
    print(f"experts {given.experts}, chosen {given.chosen}, share of a plain step's reads {experts.share:.2f}")
    print("tokens  distinct  formula  time in plain steps  formula")
    plain = median(seconds[1][1:])
    for tokens in TOKENS:
        counted, formula = sum(distinct[tokens]) / len(distinct[tokens]), experts.pass_cost(tokens)
        expected = (formula - 1.0 + experts.share) * given.chosen / experts.share
        print(f"{tokens:6}  {counted:8.1f}  {expected:7.1f}  {median(seconds[tokens][1:]) / plain:19.2f}  {formula:7.2f}")


if __name__ == "__main__":
    main()
