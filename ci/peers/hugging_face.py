#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compares tandem's logits with those of Hugging Face transformers on the same parameters, both ways: a model that tandem trained is
exported and loaded there, and a random one of transformers is saved, imported and read by tandem.

    hugging_face.py path/to/tandem

Prints one JSON line for each comparison. Exit status: 0 the same within the bound, 1 not, 77 torch or transformers cannot be
imported (the reason is printed).
"""
import json
import pathlib
import subprocess
import sys
import tempfile

SKIPPED = 77
PROMPT = "To be, or not to be: that is the question; whether 'tis nobler in the mind to suffer"
# Both compute in fp32. Relative to the largest logit of a position: two programs, each with a rounding of 2^-24 for each term of the
# longest sum (the MLP's second product) in each layer and the head, which add up like a random walk.
UNIT = 2.0 ** -24

MODELS = {
    "tied": {"layers": 3, "hidden": 96, "heads": 4, "sequence": 128, "tied": "true"},
    "untied_wide": {"layers": 2, "hidden": 64, "heads": 2, "sequence": 96, "mlp_hidden": 200, "tied": "false"},
}


def run(tandem, *arguments):
    done = subprocess.run([tandem, *map(str, arguments)], capture_output=True, text=True, errors="replace", check=False)
    if done.returncode != 0:
        sys.exit(f"tandem {' '.join(map(str, arguments))}: exit status {done.returncode}: {done.stderr}")


def logits_of_tandem(tandem, checkpoint, folder):
    from safetensors.torch import load_file
    run(tandem, "generate", "--checkpoint", checkpoint, "--prompt", PROMPT, "--tokens", 1, "--temperature", 0, "--logits",
        folder / "logits.safetensors")
    tensors = load_file(folder / "logits.safetensors")
    assert tensors["tokens"].tolist() == list(PROMPT.encode()), "tandem read other tokens than the prompt's"
    return tensors["logits"]


def logits_of_transformers(torch, model):
    tokens = torch.tensor([list(PROMPT.encode())])
    with torch.no_grad():
        return model.eval().float()(tokens).logits[0]


def compare(name, ours, theirs, config):
    error = ((ours - theirs).abs().max(dim=1).values / theirs.abs().max(dim=1).values).max().item()
    longest = max(4 * config.n_embd, config.n_inner or 0)
    bound = 2 * UNIT * (longest * (config.n_layer + 1)) ** 0.5
    different = (ours.argmax(dim=1) != theirs.argmax(dim=1)).sum().item()
    print(json.dumps({"comparison": name, "positions": ours.shape[0], "relative_error": error, "bound": bound,
                      "largest_difference": (ours - theirs).abs().max().item(), "largest_logit": theirs.abs().max().item(),
                      "other_likeliest_tokens": different}))
    return error <= bound


def exported(tandem, transformers, torch, name, settings, folder):
    arguments = [argument for key, value in settings.items() for argument in ("--set", f"{key}={value}")]
    # Biases and norms that are not 0 and 1, or mixing them up would not show.
    run(tandem, "train", "--steps", 12, *arguments, "--set", "initialization=scattered", "--set", "data=2", "--set", "tensor=2",
        "--set", "zero=1", "--out", folder / "run")
    run(tandem, "checkpoint", "export", folder / "run", "--out", folder / "exported")
    model, report = transformers.GPT2LMHeadModel.from_pretrained(folder / "exported", output_loading_info=True)
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        assert not report[problem], f"{problem}: {report[problem]}"
    return compare(f"exported/{name}", logits_of_tandem(tandem, folder / "run", folder), logits_of_transformers(torch, model),
                   model.config)


def imported(tandem, transformers, torch, name, settings, folder):
    torch.manual_seed(5)
    config = transformers.GPT2Config(
        vocab_size=300, n_positions=settings["sequence"], n_embd=settings["hidden"], n_layer=settings["layers"],
        n_head=settings["heads"], n_inner=settings.get("mlp_hidden"), tie_word_embeddings=settings["tied"] == "true")
    model = transformers.GPT2LMHeadModel(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    model.save_pretrained(folder / "saved", max_shard_size="200KB")
    run(tandem, "checkpoint", "import", folder / "saved", "--out", folder / "imported")
    return compare(f"imported/{name}", logits_of_tandem(tandem, folder / "imported", folder), logits_of_transformers(torch, model),
                   config)


def main():
    try:
        import torch
        import transformers
    except ImportError as error:
        print(f"skipped: {error}")
        return SKIPPED
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    good = True
    for direction in (exported, imported):
        for name, settings in MODELS.items():
            with tempfile.TemporaryDirectory(prefix="tandem-hugging-face-") as folder:
                good = direction(sys.argv[1], transformers, torch, name, settings, pathlib.Path(folder)) and good
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
