"""The plain form of docs/container-format.md in numpy: one hash a tensor, to be compared with what convert writes.

    python reference.py MODEL BITS > MODEL-intBITS.txt

Needs numpy. Reads bf16, f16, f32 and fp8 (e4m3 with scales of 128x128 blocks). A line is the name, the hash of the
packed bytes and that of the scales; a hash is h = h * 1099511628211 + byte modulo 2^64, from 14695981039346656037.
"""

import json
import pathlib
import struct
import sys

import numpy as np

FLOAT = ("norm", "mlp.gate.", "mlp.router.", "weights_proj", "bias")
PRIME, START = 1099511628211, 14695981039346656037


def e4m3_table():
    table = np.zeros(256, np.float32)
    for code in range(256):
        exponent, mantissa = code >> 3 & 15, code & 7
        value = mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10)
        if code & 127 == 127:
            value = np.nan
        table[code] = -value if code & 128 else value
    return table


def tensors(model):
    found = {}
    for path in sorted(pathlib.Path(model).glob("model*.safetensors")):
        data = path.read_bytes()
        size = struct.unpack("<Q", data[:8])[0]
        for name, entry in json.loads(data[8 : 8 + size]).items():
            if name != "__metadata__":
                start, end = entry["data_offsets"]
                raw = data[8 + size + start : 8 + size + end]
                found[name] = (entry["dtype"], entry["shape"], raw)
    return found


def floats(found, name):
    dtype, shape, raw = found[name]
    if dtype == "BF16":
        bits = np.frombuffer(raw, "<u2").astype(np.uint32) << 16
        return bits.view(np.float32).reshape(shape)
    if dtype in ("F16", "F32"):
        return np.frombuffer(raw, "<f2" if dtype == "F16" else "<f4").astype(np.float32).reshape(shape)
    if dtype == "F8_E4M3":
        values = e4m3_table()[np.frombuffer(raw, np.uint8)].reshape(shape)
        scales = floats(found, name + "_scale_inv")
        scales = scales.repeat(128, 0).repeat(128, 1)[: shape[0], : shape[1]]
        return values * scales
    raise SystemExit(f"{name} is stored as {dtype}")


def hashed(raw):
    raw = np.frombuffer(raw, np.uint8).astype(np.uint64)
    powers = np.full(len(raw) + 1, PRIME, np.uint64)
    powers[0] = 1
    powers = np.cumprod(powers, dtype=np.uint64)
    with np.errstate(over="ignore"):
        total = (raw * powers[:-1][::-1]).sum(dtype=np.uint64) + np.uint64(START) * powers[-1]
    return f"{int(total):016x}"


def packed(x, bits):
    largest = np.float32(2 ** (bits - 1) - 1)
    scale = np.abs(x).max(1).astype(np.float32) / largest
    scale[scale == 0] = 1
    q = np.clip(np.rint(x / scale[:, None]), -largest - 1, largest).astype(np.int64)
    per_byte = 8 // bits
    unsigned = (q if bits == 8 else q + 2 ** (bits - 1)) & (2**bits - 1)
    width = -(-x.shape[1] // per_byte)
    padded = np.zeros((x.shape[0], width * per_byte), np.int64)
    padded[:, : x.shape[1]] = unsigned
    shifts = np.arange(per_byte) * bits
    bytes_ = (padded.reshape(x.shape[0], width, per_byte) << shifts).sum(2).astype(np.uint8)
    return bytes_.tobytes(), scale.astype("<f4").tobytes()


def main():
    model, bits = sys.argv[1], int(sys.argv[2])
    found = tensors(model)
    for name in sorted(found):
        dtype, shape, _ = found[name]
        if len(shape) != 2 or name.endswith("_scale_inv") or any(part in name for part in FLOAT):
            continue
        weights, scales = packed(floats(found, name), bits)
        print(name, hashed(weights), hashed(scales))


main()
