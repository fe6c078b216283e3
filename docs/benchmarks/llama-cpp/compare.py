#!/usr/bin/env python3
"""Runs llama.cpp and tierkeep on the same model, the same token ids and the same machine, in pairs.

usage: compare.py MODELS --llama SOURCE --build BUILD [--tierkeep BINARY] [--pairs 5] ...

MODELS is a folder that models.py wrote. SOURCE is a checkout of llama.cpp (the sdist of llama-cpp-python has
one in vendor/llama.cpp) and BUILD its build folder with libllama in bin/; peer.cpp is compiled against them.
In every pair both are started afresh, in turns first; each fills the sequence, prefills a prompt and decodes
one token at a time, on ids.txt. --memory 1500M runs both in a control group of that size (version 1 or 2; as
root, or with --systemd through `systemd-run --user`), after what the page cache has of the models is dropped.

Medians and ratios are printed, and how many different experts each used in a layer: a pair in which either
used under 80 % of them is void. Memory's bandwidth is timed by numpy before and after, beside what tierkeep
measures; shares are of the larger. --csv FILE appends a row for each pair and one of medians.
"""
import argparse, json, os, statistics, subprocess, sys, tempfile, threading, time

import numpy as np

# Tokens of the prompts after which both are asked for the most likely token.
PROMPTS = [1, 2, 4, 8]
HERE = os.path.dirname(os.path.abspath(__file__))
COLUMNS = ["what", "pair", "context", "prompt", "decode", "threads", "repack", "kv", "numerics", "memory",
           "peer_prefill_tokens_per_s", "peer_decode_tokens_per_s", "prefill_tokens_per_s", "decode_tokens_per_s",
           "prefill_ratio", "decode_ratio", "peer_experts_least", "peer_experts_median", "experts_least",
           "experts_median", "experts_of", "hit_rate", "read_bytes_per_token", "touched_weight_bytes",
           "memory_bytes_per_s", "peer_share", "share", "peak_bytes", "note"]


def size(text):
    units = {"K": 10**3, "M": 10**6, "G": 10**9}
    return int(float(text[:-1]) * units[text[-1]]) if text[-1] in units else int(text)


def build(args):
    out = os.path.join(tempfile.gettempdir(), f"tierkeep-peer-{os.getuid()}")
    lib = os.path.join(os.path.abspath(args.build), "bin")
    command = [os.environ.get("CXX", "c++"), "-std=c++17", "-O2", os.path.join(HERE, "peer.cpp"), "-o", out,
               "-I", os.path.join(args.llama, "include"), "-I", os.path.join(args.llama, "ggml", "include"),
               "-L", lib, "-lllama", "-lggml", "-lggml-base", f"-Wl,-rpath,{lib}", "-pthread"]
    subprocess.run(command, check=True)
    return out


def bandwidth(threads):
    """Bytes a second that all threads together read: sums over 256 MB each, the best of five."""
    parts = [np.ones(32_000_000, dtype=np.int64) for _ in range(threads)]
    best = 0.0
    for _ in range(5):
        workers = [threading.Thread(target=part.sum) for part in parts]
        start = time.perf_counter()
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        best = max(best, sum(p.nbytes for p in parts) / (time.perf_counter() - start))
    return best


def drop(args):
    """What the page cache has of the models is charged to nobody's group: it would be free memory there."""
    for folder, _, files in os.walk(args.models):
        for name in files:
            if name.endswith((".gguf", ".safetensors")):
                fd = os.open(os.path.join(folder, name), os.O_RDONLY)
                os.fsync(fd)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(fd)


class Group:
    """A control group of some bytes, or none."""

    def __init__(self, args):
        self.prefix, self.folder = [], None
        if args is None or args.memory is None:
            return
        limit = size(args.memory)
        if args.systemd:
            self.prefix = ["systemd-run", "--user", "--scope", "--quiet", "-p", f"MemoryMax={limit}", "-p",
                           "MemorySwapMax=0"]
            return
        v1 = os.path.isdir("/sys/fs/cgroup/memory")
        root = "/sys/fs/cgroup/memory" if v1 else "/sys/fs/cgroup"
        self.folder = os.path.join(root, f"tierkeep-peer-{os.getpid()}")
        os.mkdir(self.folder)
        name = "memory.limit_in_bytes" if v1 else "memory.max"
        with open(os.path.join(self.folder, name), "w") as f:
            f.write(str(limit))
        procs = os.path.join(self.folder, "cgroup.procs")
        self.prefix = ["sh", "-c", f'echo $$ > "{procs}" && exec "$@"', "sh"]

    def close(self):
        if self.folder:
            os.rmdir(self.folder)


def started(command, group):
    ran = subprocess.run(group.prefix + command, capture_output=True, text=True)
    if ran.returncode < 0 or ran.returncode in (137, 9):
        return None, "killed"
    try:
        return json.loads(ran.stdout), ""
    except json.JSONDecodeError:
        said = (ran.stderr.strip().splitlines() or ["nothing said"])[-1]
        return None, f"exit {ran.returncode}: {said[:120]}"


def peer(binary, args, group):
    prompt = min(args.prompt, args.context)
    command = [binary, os.path.join(args.models, "peer.gguf"), os.path.join(args.models, "ids.txt"),
               args.context - prompt, prompt, args.decode, args.threads, int(not args.no_repack), args.kv, args.warm_up, 0]
    out, note = started([str(word) for word in command], group)
    if out is None:
        return {}, note
    return {"peer_prefill_tokens_per_s": prompt / out["prefill_s"],
            "peer_decode_tokens_per_s": args.decode / sum(out["steps_s"])}, ""


def experts_of_peer(binary, args):
    """Counted once and apart, for the same tokens take the same experts each time, and counting slows it down."""
    prompt = min(args.prompt, args.context)
    command = [binary, os.path.join(args.models, "peer.gguf"), os.path.join(args.models, "ids.txt"),
               args.context - prompt, prompt, args.decode, args.threads, 0, args.kv, 0, 1]
    out, note = started([str(word) for word in command], Group(None))
    if out is None:
        sys.exit(f"llama.cpp: {note}")
    # Of the last layer it computes only what logits are asked for.
    distinct = sorted(out["distinct"][:-1])
    return {"peer_experts_least": distinct[0], "peer_experts_median": distinct[(len(distinct) - 1) // 2]}


def check_same(binary, args):
    """Both say which token is the most likely after some prompts. Where both run the same model most agree: each rounds
    in its own way, and with random weights a little can send a token to other experts."""
    path, same = os.path.join(args.models, "ids.txt"), []
    ids = open(path).read().split()
    for n in PROMPTS:
        command = [binary, os.path.join(args.models, "peer.gguf"), path, 0, n, 0, args.threads, 0, "f32", 0, 0]
        theirs, note = started([str(word) for word in command], Group(None))
        command = [args.tierkeep, "run", os.path.join(args.models, "tierkeep"), "--no-usage", "--no-measure", "--json", "-n",
                   "1", "--ignore-stop", "--ids", ",".join(ids[:n])]
        own, own_note = started(command, Group(None))
        if theirs is None or own is None:
            sys.exit(f"llama.cpp: {note or 'runs'}; tierkeep: {own_note or 'runs'}")
        same.append(theirs["best"] == own["report"]["tokens"][0])
    print(f"the most likely token is the same after {sum(same)} of {len(same)} short prompts")


def ours(args, group):
    command = [args.tierkeep, "bench", os.path.join(args.models, "tierkeep"), "--json", "--repeat", "1", "--contexts",
               args.context, "--prompt", args.prompt, "--decode", args.decode, "--warm-up", args.warm_up,
               "--threads", args.threads, "--kv", args.kv, "--stream", "ids:" + os.path.join(args.models, "ids.txt")]
    if args.memory is not None:
        command += ["--ram", args.ram]
    command += args.tierkeep_args.split()
    out, note = started([str(word) for word in command], group)
    if out is None or "rows" not in out:
        return {}, note or str(out)[:160]
    figures, row = out["rows"][0]["figures"], out["rows"][0]
    held = figures["held"]
    return {"prefill_tokens_per_s": figures["prefill_tokens_per_s"]["median"],
            "decode_tokens_per_s": figures["decode_tokens_per_s"]["median"],
            "experts_least": figures["distinct"]["least"], "experts_median": figures["distinct"]["median"],
            "experts_of": figures["distinct"]["of"], "hit_rate": figures["hit_rate"],
            "read_bytes_per_token": figures["read_bytes_per_token"],
            "touched_weight_bytes": figures["touched"]["weights"], "peak_bytes": held["peak_bytes"],
            "numerics": row["engine"]["numerics"], "own_memory": out["memory"]["bytes_per_s"] or 0.0}, ""


def finish(row, most):
    for part in ["prefill", "decode"]:
        a, b = row.get(f"{part}_tokens_per_s"), row.get(f"peer_{part}_tokens_per_s")
        row[f"{part}_ratio"] = a / b if a and b else None
    row["memory_bytes_per_s"] = most
    touched = row.get("touched_weight_bytes")
    if touched and most:
        for name, speed in [("share", "decode_tokens_per_s"), ("peer_share", "peer_decode_tokens_per_s")]:
            row[name] = row[speed] * touched / most if row.get(speed) else None
    return row


def show(row):
    def number(key, digits=2):
        value = row.get(key)
        return "-" if value is None else f"{value:.{digits}f}"

    print(f"{row['pair']:>6}  llama.cpp: prefill {number('peer_prefill_tokens_per_s')}, decode "
          f"{number('peer_decode_tokens_per_s')} tokens/s   tierkeep: prefill {number('prefill_tokens_per_s')}, decode "
          f"{number('decode_tokens_per_s')}   ratio {number('prefill_ratio')} and {number('decode_ratio')}   experts "
          f"{row.get('peer_experts_least', '-')}/{row.get('peer_experts_median', '-')} and "
          f"{row.get('experts_least', '-')}/{row.get('experts_median', '-')} of {row.get('experts_of', '-')}   hits "
          f"{number('hit_rate', 3)}  {row.get('note', '')}", flush=True)


def csv_field(value):
    text = "" if value is None else f"{value:.5g}" if isinstance(value, float) and abs(value) < 1e6 else (
        f"{value:.0f}" if isinstance(value, float) else str(value))
    return '"' + text.replace('"', '""') + '"' if any(c in text for c in ',"\n') else text


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("models")
    p.add_argument("--llama", required=True)
    p.add_argument("--build", required=True)
    p.add_argument("--tierkeep", default="tierkeep")
    p.add_argument("--tierkeep-args", default="", help="further options of `tierkeep bench`")
    p.add_argument("--pairs", type=int, default=5)
    p.add_argument("--context", type=int, default=512)
    p.add_argument("--prompt", type=int, default=128)
    p.add_argument("--decode", type=int, default=64)
    p.add_argument("--warm-up", type=int, default=4)
    p.add_argument("--threads", type=int, default=max(1, len(os.sched_getaffinity(0))))
    p.add_argument("--kv", choices=["f16", "f32"], default="f16")
    p.add_argument("--no-repack", action="store_true", help="llama.cpp without its second form of the weights")
    p.add_argument("--memory", help="size of the control group, such as 1500M")
    p.add_argument("--ram", default="92%", help="tierkeep's budget within the group")
    p.add_argument("--systemd", action="store_true")
    p.add_argument("--csv")
    args = p.parse_args()
    binary = build(args)
    common = {"what": "llama.cpp and tierkeep", "context": args.context, "prompt": min(args.prompt, args.context),
              "decode": args.decode, "threads": args.threads, "repack": not args.no_repack, "kv": args.kv,
              "memory": args.memory or "all"}
    check_same(binary, args)
    common.update(experts_of_peer(binary, args))
    most, rows = bandwidth(args.threads), []
    for at in range(args.pairs):
        row = dict(common, pair=at + 1, note="")
        # Who is first in a pair is last in the next.
        for which in (["peer", "ours"] if at % 2 == 0 else ["ours", "peer"]):
            group = Group(args)
            if args.memory is not None:
                drop(args)
            try:
                figures, note = peer(binary, args, group) if which == "peer" else ours(args, group)
            finally:
                group.close()
            row.update(figures)
            row["note"] += f" {which}: {note}" if note else ""
        most = max(most, bandwidth(args.threads), row.get("own_memory", 0.0))
        of = row.get("experts_of")
        # The mean over layers is not known of both: the layer in the middle is.
        used = [row[k] for k in ("peer_experts_median", "experts_median") if k in row]
        if of and any(n < 0.8 * of for n in used):
            row["note"] += " void: under 80 % of the experts"
        rows.append(row)
        show(finish(row, most))
    medians = dict(common, pair="median", note="")
    for key in ["peer_prefill_tokens_per_s", "peer_decode_tokens_per_s", "prefill_tokens_per_s", "decode_tokens_per_s",
                "hit_rate", "read_bytes_per_token", "touched_weight_bytes", "peak_bytes", "experts_least", "experts_median",
                "experts_of"]:
        values = [row[key] for row in rows if row.get(key) is not None]
        medians[key] = statistics.median(values) if values else None
    medians["numerics"] = rows[0].get("numerics") if rows else None
    finish(medians, most)
    # Ratios are of pairs, not of medians.
    for key in ["prefill_ratio", "decode_ratio"]:
        values = [row[key] for row in rows if row.get(key) is not None]
        medians[key] = statistics.median(values) if values else None
    show(medians)
    shares = {k: medians.get(k) for k in ("share", "peer_share")}
    said = {k: "-" if v is None else f"{100 * v:.1f} %" for k, v in shares.items()}
    print(f"memory {most / 1e9:.1f} GB/s (the larger of numpy's and tierkeep's figures in this run); weights touched over it "
          f"in decode: llama.cpp {said['peer_share']}, tierkeep {said['share']} (of the container's bytes a token, for both)")
    if args.csv:
        is_new = not os.path.exists(args.csv) or os.path.getsize(args.csv) == 0
        with open(args.csv, "a") as f:
            if is_new:
                f.write(",".join(COLUMNS) + "\n")
            for row in rows + [medians]:
                row["note"] = row["note"].strip()
                f.write(",".join(csv_field(row.get(column)) for column in COLUMNS) + "\n")


if __name__ == "__main__":
    sys.exit(main())
