#!/usr/bin/env python3
"""Writes one Mixture-of-Experts model twice: as GGUF for llama.cpp and as a packed container for tierkeep.

usage: models.py OUT [--layers N] [--group 32|64|row] [--seed N] [--small]

The geometry is OLMoE-1B-7B's (16 layers, 64 experts of which 8 are active); weights are random, symmetric
around zero, and drawn as 4-bit integers with their scales, so nothing is quantised. With --group 32 (the
default) both files hold the same numbers in the same bits: Q4_0 there, 4 bits with an f16 scale for 32
columns here, 4.5 bits a weight, for attention, experts, embedding and head alike; norms and routers are
f32 in both. With --group 64 (4.25 bits) or row (4 bits and an f32 scale a row), which Q4_0 does not have, the
container's weights are other numbers of the same distribution. Sizes are printed.

OUT/peer.gguf and OUT/tierkeep/ are written (3.9 GB each in full), OUT/ids.txt besides: uniformly random
token ids. Needs numpy and gguf, both from PyPI.
"""
import argparse, json, os, struct, zlib

import gguf
import numpy as np

FULL = dict(hidden=2048, layers=16, heads=16, experts=64, active=8, ff=1024, vocab=50304, context=4096)
SMALL = dict(hidden=256, layers=2, heads=4, experts=16, active=4, ff=128, vocab=1024, context=4096)
EPS, THETA = 1e-5, 10000.0
BLOCK = 4096


def generator(seed, name):
    return np.random.Generator(np.random.PCG64([seed, zlib.crc32(name.encode())]))


def matrix(seed, name, rows, cols, group):
    """Integers 0 to 15 (value plus 8), (rows, cols), and their scales, (rows, groups)."""
    draw = generator(seed, name)
    integers = draw.integers(0, 16, (rows, cols), dtype=np.uint8)
    groups = cols // (cols if group == "row" else int(group))
    # Of either sign: the integers reach one further down than up. Their deviation is 4.61.
    # Embeddings are as large as what norms make of them, so that what attention adds, which is much the same for
    # all tokens, does not send all tokens to the same experts.
    deviation = 1.0 if name == "model.embed_tokens.weight" else 1.0 / np.sqrt(cols)
    size = deviation / 4.61 * draw.uniform(0.8, 1.2, (rows, groups))
    scales = np.where(draw.integers(0, 2, (rows, groups)) == 1, size, -size)
    return integers, scales.astype(np.float32 if group == "row" else np.float16)


def q4_0(integers, scales):
    """Blocks of 32: an f16 scale, then 16 bytes with element j below and element j + 16 above."""
    rows, cols = integers.shape
    blocks = integers.reshape(rows, cols // 32, 2, 16)
    packed = blocks[:, :, 0, :] | (blocks[:, :, 1, :] << 4)
    scales = scales.reshape(rows, cols // 32, 1).view(np.uint8)
    return np.concatenate([scales, packed], axis=2).reshape(rows, -1)


def container(integers, scales):
    """Pairs of neighbours in a byte, the first below; scales apart."""
    packed = integers[:, 0::2] | (integers[:, 1::2] << 4)
    return np.ascontiguousarray(packed), np.ascontiguousarray(scales)


def norm(seed, name, n):
    return generator(seed, name).uniform(0.9, 1.1, n).astype(np.float32)


def router(seed, name, experts, hidden):
    return (generator(seed, name).standard_normal((experts, hidden)) / np.sqrt(hidden)).astype(np.float32)


def plan(g):
    """What there is, in the order of the container: (published name, GGUF name, kind, rows, cols)."""
    h, ff = g["hidden"], g["ff"]
    yield "model.embed_tokens.weight", "token_embd.weight", "q", g["vocab"], h
    for i in range(g["layers"]):
        at, blk = f"model.layers.{i}.", f"blk.{i}."
        yield at + "input_layernorm.weight", blk + "attn_norm.weight", "n", h, 0
        for ours, theirs in [("q", "q"), ("k", "k"), ("v", "v"), ("o", "output")]:
            yield at + f"self_attn.{ours}_proj.weight", blk + f"attn_{theirs}.weight", "q", h, h
        for x in "qk":
            yield at + f"self_attn.{x}_norm.weight", blk + f"attn_{x}_norm.weight", "n", h, 0
        yield at + "post_attention_layernorm.weight", blk + "ffn_norm.weight", "n", h, 0
        yield at + "mlp.gate.weight", blk + "ffn_gate_inp.weight", "r", g["experts"], h
        for part, rows, cols in [("gate", ff, h), ("up", ff, h), ("down", h, ff)]:
            yield (at + "mlp.experts.{}." + part + "_proj.weight", blk + f"ffn_{part}_exps.weight", "e", rows, cols)
    yield "model.norm.weight", "output_norm.weight", "n", h, 0
    yield "lm_head.weight", "output.weight", "q", g["vocab"], h


def write_gguf(path, g, seed):
    w = gguf.GGUFWriter(path, "olmoe")
    w.add_name("random")
    w.add_context_length(g["context"])
    w.add_embedding_length(g["hidden"])
    w.add_block_count(g["layers"])
    w.add_feed_forward_length(g["ff"])
    w.add_head_count(g["heads"])
    w.add_head_count_kv(g["heads"])
    w.add_layer_norm_rms_eps(EPS)
    w.add_rope_freq_base(THETA)
    w.add_expert_count(g["experts"])
    w.add_expert_used_count(g["active"])
    w.add_vocab_size(g["vocab"])
    w.add_tokenizer_model("none")
    w.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_0)
    q = gguf.GGMLQuantizationType.Q4_0
    tensors = list(plan(g))
    for _, name, kind, rows, cols in tensors:
        if kind == "n":
            w.add_tensor_info(name, (rows,), np.dtype(np.float32), rows * 4)
        elif kind == "r":
            w.add_tensor_info(name, (rows, cols), np.dtype(np.float32), rows * cols * 4)
        else:
            shape = (rows, cols // 32 * 18)
            shape = (g["experts"], *shape) if kind == "e" else shape
            w.add_tensor_info(name, shape, np.dtype(np.uint8), int(np.prod(shape)), raw_dtype=q)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_ti_data_to_file()
    for name, _, kind, rows, cols in tensors:
        if kind == "n":
            w.write_tensor_data(norm(seed, name, rows))
        elif kind == "r":
            w.write_tensor_data(router(seed, name, rows, cols))
        elif kind == "q":
            w.write_tensor_data(q4_0(*matrix(seed, name, rows, cols, "32")))
        else:
            experts = [q4_0(*matrix(seed, name.format(e), rows, cols, "32")) for e in range(g["experts"])]
            w.write_tensor_data(np.stack(experts))
    w.close()


class Container:
    """Files of safetensors: first every tensor's place, then the bytes."""

    def __init__(self, group):
        self.group, self.tensors, self.at, self.pads = group, [], 0, 0

    def add(self, name, dtype, shape, make):
        size = int(np.prod(shape)) * {"U8": 1, "F16": 2, "F32": 4}[dtype]
        self.tensors.append((name, dtype, list(shape), self.at, size, make))
        self.at += size

    def align(self):
        room = -self.at % BLOCK
        if room:
            self.add(f"__pad.{self.pads}", "U8", (room,), None)
            self.pads += 1

    def packed(self, name, rows, cols, seed):
        groups = 1 if self.group == "row" else cols // int(self.group)
        kept = {}

        def make(part):
            if part == 0:
                kept["both"] = container(*matrix(seed, name, rows, cols, self.group))
                return kept["both"][0]
            return kept.pop("both")[1]

        self.add(name, "U8", (rows, cols // 2), lambda: make(0))
        scale = "F32" if self.group == "row" else "F16"
        shape = (rows,) if self.group == "row" else (rows, groups)
        self.add(name + ".qs", scale, shape, lambda: make(1))

    def write(self, path):
        meta = {"tierkeep.format": "1"}
        for part in ["experts", "dense", "embedding"]:
            meta[f"tierkeep.{part}.bits"] = "4"
            meta[f"tierkeep.{part}.group"] = self.group
            meta[f"tierkeep.{part}.scale"] = "f32" if self.group == "row" else "f16"
        header = {"__metadata__": meta}
        for name, dtype, shape, at, size, _ in self.tensors:
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-(8 + len(text)) % BLOCK)
        with open(path, "wb") as f:
            f.write(struct.pack("<Q", len(text)) + text)
            for _, _, _, _, size, make in self.tensors:
                data = bytes(size) if make is None else make().tobytes()
                assert len(data) == size
                f.write(data)


def write_container(folder, g, seed, group):
    os.makedirs(folder, exist_ok=True)
    c = Container(group)
    experts = []
    for name, _, kind, rows, cols in plan(g):
        if kind != "e" and experts:
            for e in range(g["experts"]):
                c.align()
                for part, r, k in experts:
                    c.packed(part.format(e), r, k, seed)
            experts = []
        if kind == "n":
            c.add(name, "F32", (rows,), lambda name=name, rows=rows: norm(seed, name, rows))
        elif kind == "r":
            c.add(name, "F32", (rows, cols), lambda n=name, r=rows, k=cols: router(seed, n, r, k))
        elif kind == "q":
            c.packed(name, rows, cols, seed)
        else:
            experts.append((name, rows, cols))
    c.write(os.path.join(folder, "model.safetensors"))
    config = dict(
        architectures=["OlmoeForCausalLM"], model_type="olmoe", hidden_size=g["hidden"],
        num_hidden_layers=g["layers"], num_attention_heads=g["heads"], num_key_value_heads=g["heads"],
        num_experts=g["experts"], num_experts_per_tok=g["active"], intermediate_size=g["ff"],
        norm_topk_prob=False, vocab_size=g["vocab"], rms_norm_eps=EPS, max_position_embeddings=g["context"],
        rope_theta=THETA, hidden_act="silu", tie_word_embeddings=False, clip_qkv=None, dtype="float32")
    with open(os.path.join(folder, "config.json"), "w") as f:
        json.dump(config, f, indent=2)


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("out")
    p.add_argument("--layers", type=int)
    p.add_argument("--group", choices=["32", "64", "row"], default="32")
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--small", action="store_true", help="a geometry of a few MB, to try the script")
    a = p.parse_args()
    g = dict(SMALL if a.small else FULL)
    if a.layers:
        g["layers"] = a.layers
    os.makedirs(a.out, exist_ok=True)
    peer, ours = os.path.join(a.out, "peer.gguf"), os.path.join(a.out, "tierkeep")
    write_gguf(peer, g, a.seed)
    write_container(ours, g, a.seed, a.group)
    ids = generator(a.seed, "ids").integers(0, g["vocab"], 8192)
    with open(os.path.join(a.out, "ids.txt"), "w") as f:
        f.write("\n".join(map(str, ids)) + "\n")
    with open(os.path.join(a.out, "geometry.json"), "w") as f:
        json.dump(dict(g, group=a.group, seed=a.seed), f)
    sizes = [os.path.getsize(peer), os.path.getsize(os.path.join(ours, "model.safetensors"))]
    print(f"peer.gguf {sizes[0]:,} bytes, tierkeep/model.safetensors {sizes[1]:,} bytes")


if __name__ == "__main__":
    main()
