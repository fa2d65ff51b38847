"""A method of sparsity to start from: copy this file, and run it. ``python examples/methods/template.py``

Replace what is marked (1) to (4). docs/RESEARCH.md has the interface, examples/methods/README.md published methods.
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import torch_pi2


@torch_pi2.register_method  # files and the command line then find it by its name
class Mine(torch_pi2.SparseMethod):
    """(1) What it is, with the paper's equation, and how it differs from it. ``share``: of the FFN's rows read."""

    name = "mine"
    # select consists of torch operators on x_TH and the tensors set in fit, so recorded steps may repeat it without
    # calling it. With Python that decides (an if, a counter, a list) this must be False.
    recordable = True

    def __init__(self, share: float = 0.5) -> None:
        self.share = share  # settings: numbers, texts, lists and mappings; saved with the model

    def fit(self, layer: torch_pi2.LayerSamples) -> None:
        """(2) Once for each layer, on calibration tokens. Tensors that are set here are saved with the model.

        layer.x_TH [T, H]: inputs; layer.weights: gate [I, H] or None, up [I, H], down [H, I], biases;
        layer.gate_TI(), layer.h_TI() [T, I]: act(gate), and what down is multiplied by; layer.fired_TI: bool.
        """
        gate_IH = layer.weights.up if layer.weights.gate is None else layer.weights.gate
        self.sign_IH = torch.sign(gate_IH).to(torch.int8)
        self.size_I = gate_IH.abs().mean(1)

    def select(self, x_TH: torch.Tensor) -> torch.Tensor:
        """(3) Which neurons each token computes, bool [T, I]: here those whose gate is largest in one-bit weights."""
        score_TI = (x_TH.float() @ self.sign_IH.float().T) * self.size_I
        count = max(1, round(self.share * len(self.size_I)))
        return torch.zeros_like(score_TI, dtype=torch.bool).scatter_(1, score_TI.topk(count).indices, True)

    def read_bytes(self) -> int:
        """(4) What select reads for a token, if that is not all of its tensors: signs could be bits."""
        return self.sign_IH.numel() // 8 + self.size_I.nbytes


def small_model() -> LlamaForCausalLM:
    """A random model. Yours: ``AutoModelForCausalLM.from_pretrained(FOLDER, dtype="bfloat16")``."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=128, hidden_act="relu", initializer_range=0.3, **sizes)).eval()


def main() -> None:
    ids = torch.randint(3, 128, (24, 32), generator=torch.Generator().manual_seed(1))  # or texts, with tokenizer=
    dense, settings = small_model(), {"seq_len": 32, "sparsity": 0.5}

    # First on the dense model, by masks: quality without kernels.
    stats = torch_pi2.profile(dense, ids, **settings)
    methods = torch_pi2.fit(dense, ids, stats=stats, method=Mine(share=0.3), **settings)
    for key, method in methods.items():
        card = method.card  # measured on tokens that fit has not seen
        print(f"{key}: {card.predicted_active:.1%} of neurons chosen, {card.mass_recall:.1%} of the output's mass")
    with torch.no_grad():
        wanted = dense(ids[:4], labels=ids[:4]).loss
        with torch_pi2.trying(dense, methods):
            found = dense(ids[:4], labels=ids[:4]).loss
    print(f"loss {float(wanted):.4f} dense, {float(found):.4f} with {Mine.name}")

    # Then for real: kernels that skip, here on int4 weights.
    model = torch_pi2.optimize(
        dense, stats=stats, predictors=methods, method=Mine(share=0.3), weights="int4", **settings
    )
    print("generated", torch_pi2.generate(model, ids[:1, :8], max_new_tokens=8).sequences[0])


if __name__ == "__main__":
    main()
