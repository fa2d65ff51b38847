"""Measurements, also of other engines; not in the wheel."""

#: name -> one line of help. The module ``benchmarks/NAME.py`` has ``add_arguments(parser)``; ``run(args)``, which
#: returns the figures; ``about(result)``, a line that says what was run; and ``TABLES``.
BENCHMARKS = {
    "layer": "one gated layer over shares of active neurons, against the memory roofline",
    "inputs": "one linear layer that reads the weights of some input channels, beside dense",
    "gpu": "one gated layer on a GPU: predicted, by the exact gate, and dense by cuBLAS",
    "gpu-model": "a whole model on a GPU: ours beside dense; or divided, beside offloading and the CPU",
    "decode": "a whole model, synthetic or in --folder, optionally against other engines",
    "imported": "GGUF files of several types, imported, beside llama.cpp on the same files",
    "real": "real GGUF files: start, speed, memory and loss, beside llama.cpp",
    "humaneval": "HumanEval's problems, solved by a real GGUF file here and in llama.cpp",
    "kv": "keys and values in 8 and 4 bits on a real GGUF file: loss, bytes, speed of attention",
    "bundle": "bundles in the C++ runner by the format of keys and values, beside PyTorch's Decoder",
    "generate": "model.generate over our steps, beside transformers' own and torch_pi2.generate",
    "offload": "a model larger than memory, step by step from mmap to the pipeline",
    "together": "processes with a shard each, beside one alone, by the link between them",
    "speculate": "guessed next tokens, verified together, against plain decoding",
    "drafts": "a real GGUF file with drafts of a smaller one, or looked up, beside plain decoding",
    "serve": "servers under load, and how long clients wait, optionally against llama-cpp-python's own",
    "prefix": "the first text of an answer whose prompt begins as one before did",
    "methods": "a table of methods of sparsity beside dense: loss, bytes, speed, time to fit, over a store",
}
