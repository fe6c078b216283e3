"""Makes the oracle gpt_oss-mxfp4: a tiny random gpt-oss with its experts as published, MXFP4 blocks and scales.

usage: make_mxfp4.py OUTDIR          needs torch, transformers, safetensors

The experts are quantised to e2m1 in blocks of 32 with one e8m0 scale a block (OCP Microscaling Formats 1.0, section 6.3:
the scale is two to the power of floor(log2(largest)) - 2), two values a byte, the low nibble first. The reference computes
in float32 from the dequantised values, which transformers takes as weights of its own bf16 layout.
"""
import json, os, sys, tempfile
import torch, transformers
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

OUT = sys.argv[1]
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
CONFIG = dict(
    vocab_size=288, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, num_local_experts=6, num_experts_per_tok=2, sliding_window=8,
    layer_types=["sliding_attention", "full_attention", "sliding_attention"], max_position_embeddings=512,
    rope_parameters={"rope_type": "yarn", "rope_theta": 150000.0, "factor": 8.0, "beta_fast": 32.0, "beta_slow": 1.0,
                     "truncate": False, "original_max_position_embeddings": 64},
    pad_token_id=None, bos_token_id=None, eos_token_id=None, tie_word_embeddings=False)


def quantise(weights):
    """(experts, rows, columns) to blocks (experts, rows, columns / 32, 16) and scales (experts, rows, columns / 32)."""
    blocks = weights.float().unflatten(-1, (-1, 32))
    largest = blocks.abs().amax(-1, keepdim=True).clamp(min=2.0 ** -126)
    exponent = largest.log2().floor() - 2
    scaled = blocks / 2.0 ** exponent
    code = (scaled.abs().unsqueeze(-1) - E2M1[:8]).abs().argmin(-1) + 8 * (scaled < 0)
    code = code.to(torch.uint8)
    return code[..., 0::2] | code[..., 1::2] << 4, (exponent.squeeze(-1) + 127).to(torch.uint8)


def dequantise(blocks, scales):
    code = torch.stack([blocks & 15, blocks >> 4], -1).flatten(-2).long()
    return (E2M1[code] * 2.0 ** (scales.float() - 127).unsqueeze(-1)).flatten(-2)


def main():
    torch.manual_seed(7)
    torch.set_num_threads(1)
    config = AutoConfig.for_model("gpt_oss", **CONFIG)
    config._attn_implementation = config._experts_implementation = "eager"
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    published, values = {}, {}
    for name, p in model.named_parameters():
        if "norm" in name: p.data = 1 + 0.1 * torch.randn_like(p)
        elif name.endswith("bias") or "sinks" in name: p.data = 0.1 * torch.randn_like(p)
        elif "embed" in name: p.data = torch.randn_like(p)
        elif ".experts." in name: p.data = torch.randn_like(p) * p.shape[-2] ** -0.5
        else: p.data = torch.randn_like(p) * p.shape[-1] ** -0.5
        if name.endswith("router.weight"): p.data *= 2
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            # Published rows are outputs; the reference has them as columns.
            blocks, scales = quantise(p.data.transpose(1, 2))
            # Block scales beyond those of ordinary weights, both ways.
            scales[0, 0, 0], scales[1, 1, 1] = scales[0, 0, 0] - 9, scales[1, 1, 1] + 2
            published[name + "_blocks"], published[name + "_scales"] = blocks, scales
            values[name] = dequantise(blocks, scales).transpose(1, 2).contiguous()
        else:
            published[name] = p.data.to(torch.bfloat16)
            values[name] = published[name].float()
    os.makedirs(OUT, exist_ok=True)
    save_file({k: v.contiguous() for k, v in published.items()}, f"{OUT}/model.safetensors", metadata={"format": "pt"})
    with tempfile.TemporaryDirectory() as d:
        config.save_pretrained(d)
        save_file(values, f"{d}/model.safetensors", metadata={"format": "pt"})
        model, info = AutoModelForCausalLM.from_pretrained(
            d, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager", output_loading_info=True)
        assert not info["missing_keys"] and not info["unexpected_keys"], info
        written = json.load(open(f"{d}/config.json"))
    for name, p in model.named_parameters():
        assert torch.equal(p, values[name]), name
    written["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": [
        "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]}
    json.dump(written, open(f"{OUT}/config.json", "w"), indent=2)

    model.eval()
    prompt = torch.randint(0, CONFIG["vocab_size"], (1, 40))
    layers, margins = {}, []
    def keep(i):
        return lambda module, given, out: layers.__setitem__(
            f"layer.{i}", (out[0] if isinstance(out, tuple) else out)[0].float().contiguous())
    with torch.no_grad():
        hooks = [layer.register_forward_hook(keep(i)) for i, layer in enumerate(model.model.layers)]
        logits = model(prompt).logits[0].float()
        for hook in hooks: hook.remove()
        ids = prompt
        for _ in range(24):
            best = model(ids).logits[0, -1].float().topk(2)
            margins.append((best.values[0] - best.values[1]).item())
            ids = torch.cat([ids, best.indices[:1][None]], 1)
        # The same with the cache kept from token to token, for cached_greedy.json.
        step, cached = model(prompt, use_cache=True), []
        for _ in range(24):
            cached.append(int(step.logits[0, -1].argmax()))
            step = model(torch.tensor([[cached[-1]]]), past_key_values=step.past_key_values, use_cache=True)
    top = logits.topk(2, -1)
    json.dump({
        "reference": f"transformers {transformers.__version__}, torch {torch.__version__}, float32, eager",
        "prompt": prompt[0].tolist(), "teacher_forcing_argmax": logits.argmax(-1).tolist(),
        "teacher_forcing_margin": [round(x, 5) for x in (top.values[:, 0] - top.values[:, 1]).tolist()],
        "greedy": ids[0, 40:].tolist(), "greedy_margin": [round(x, 5) for x in margins],
    }, open(f"{OUT}/oracle.json", "w"))
    save_file({"logits": logits.contiguous(), **layers}, f"{OUT}/oracle.safetensors")
    print("least margin", min(margins), "cached", cached)


main()
